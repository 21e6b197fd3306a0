package debug

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/internal/inside"
)

// A Snapshot is what a [Page] has counted, as ?format=json gives it. Lengths of time are in
// the unit that the name says; what a peer has sent is in Target, Method, Message and
// Peer only, cut and without control characters. Fields may be added, none will change its
// meaning.
type Snapshot struct {
	Since  time.Time  `json:"since"`  // when the page was mounted; nothing before that is counted
	Now    time.Time  `json:"now"`    // when the snapshot was made
	Closed *time.Time `json:"closed"` // when counting ended, null while it goes on

	RecentSeconds float64 `json:"recent_seconds"` // how far Recent goes back; it may be up to 15 s more

	Total  Counts `json:"total"`  // of all Methods, since Since
	Recent Counts `json:"recent"` // of all Methods, in the last minutes
	Steps  []Step `json:"steps"`  // the last minutes, oldest first

	Retriers []Retrier `json:"retriers"` // what the calls of each retrier hold now
	Targets  []Target  `json:"targets"`  // that fail now, or calls to which wait or have given up; by retrier and name
	Methods  []Method  `json:"methods"`  // by retrier, target and method
	Budgets  []Budget  `json:"budgets"`  // the budgets that Methods spend from
	Calls    []Call    `json:"calls"`    // the last 50 calls that retried, hedged, waited or gave up, newest first
}

// A Target is a backend, as the calls of one retrier know it, see [grpcretry.WithPatience].
type Target struct {
	Retrier int    `json:"retrier"` // the Number of its Retrier
	Target  string `json:"target"`  // its name, as calls have it

	FailingMs    float64 `json:"failing_ms"`    // since the first failure after the last answered call; 0 if it is not failing
	WaitingCalls int     `json:"waiting_calls"` // calls that wait before their next attempt, now
	GaveUp       int64   `json:"gave_up"`       // calls that have ended with target_down
	PatienceMs   float64 `json:"patience_ms"`   // how long its calls wait since it began to fail, by the most patient policy; 0: never
}

// A Retrier is one of the retriers passed to Handler.
type Retrier struct {
	Number int `json:"number"` // 1 for the first, and so on

	WaitingCalls int `json:"waiting_calls"` // calls that wait before their next attempt, now
	OpenStreams  int `json:"open_streams"`  // streams that have not ended, now; those that pass straight through excluded

	ReplayMemory     int64 `json:"replay_memory_bytes"` // kept now to replay streams
	ReplayLimit      int64 `json:"replay_limit_bytes"`  // its limit
	CommittedStreams int64 `json:"committed_streams"`   // streams that the limit has committed, since the retrier was created
}

// A Method is one method of one target, called through one retrier.
type Method struct {
	Retrier int    `json:"retrier"` // 1 for the first retrier passed to Handler, and so on
	Target  string `json:"target"`  // in gRPC's canonical form: "dns:///shop:443"
	Method  string `json:"method"`  // "/pkg.Service/Method"
	Others  bool   `json:"others"`  // the sum of all methods after the first 100; Target and Method are empty
	Off     bool   `json:"off"`     // calls pass straight through, and none was counted before; see Policy

	Policy *Policy `json:"policy"` // the policy in effect, null for Others
	Budget int     `json:"budget"` // the Number of the budget last spent from; 0 if it is not among Budgets

	Total  Counts `json:"total"`  // since the page was mounted
	Recent Counts `json:"recent"` // in the last minutes
}

// Counts are sums over calls. A call is counted when it ends, an attempt when that ends.
type Counts struct {
	Calls    int64 `json:"calls"`     // calls that ended
	FirstTry int64 `json:"first_try"` // calls that succeeded on the first attempt
	Rescued  int64 `json:"rescued"`   // calls that succeeded after a retry
	HedgeWon int64 `json:"hedge_won"` // calls that succeeded by a hedge

	FailedOnce    int64 `json:"failed_once"`    // calls that failed on their only attempt
	FailedRetried int64 `json:"failed_retried"` // calls that failed after a retry or a hedge

	Attempts     int64   `json:"attempts"`      // attempts that ended
	Retries      int64   `json:"retries"`       // retries that reached a server, hedges excluded
	Wasted       int64   `json:"wasted"`        // retries that reached a server and failed
	RetryShare   float64 `json:"retry_share"`   // Retries by Attempts, 0 … 1
	Hedges       int64   `json:"hedges"`        // attempts that were sent beside another in flight, in place of none, and reached a server
	HedgesWasted int64   `json:"hedges_wasted"` // hedges that did not win their call

	// By name; names without a count are absent.
	Stopped map[string]int64 `json:"stopped"` // calls that failed, by the reason for the stop, a word as in the metrics
	Failed  map[string]int64 `json:"failed"`  // attempts that failed, by status code: UNAVAILABLE, …
	Waits   map[string]int64 `json:"waits"`   // waits that were started, by source: backoff, pushback, retry_info or connect
}

// A Step is a part of the last minutes: 15 s, except that the newest step has not ended.
type Step struct {
	BeganSecondsAgo float64 `json:"began_seconds_ago"` // the age of the step's start

	Calls    int64 `json:"calls"`    // as in [Counts], like all below
	Attempts int64 `json:"attempts"` // attempts that ended
	Retries  int64 `json:"retries"`  // retries that reached a server, hedges excluded
	Rescued  int64 `json:"rescued"`  // calls that succeeded after a retry
	Wasted   int64 `json:"wasted"`   // retries that reached a server and failed

	FailedRetried int64 `json:"failed_retried"` // calls that failed after a retry or a hedge
}

// A Budget limits retries.
type Budget struct {
	Number int    `json:"number"` // in this page, from 1
	Kind   string `json:"kind"`   // in words

	Unlimited bool     `json:"unlimited"` // there is no limit now
	Level     *float64 `json:"level"`     // the retries that could be made now, null if that is no number
	Levels    []Level  `json:"levels"`    // the last minutes, oldest first
}

// A Level is the level of a budget at one time. The page looks at most once a second: when a
// call fails, is retried or ends, and when the page is read.
type Level struct {
	SecondsAgo float64  `json:"seconds_ago"` // the age of the level
	Level      *float64 `json:"level"`       // as in [Budget]
}

// Snapshot returns what the page has counted. It is a copy that the caller may keep and change.
func (p *Page) Snapshot() Snapshot { return p.snapshot(filter{}) }

// A filter selects what is shown; zero fields let everything through.
type filter struct {
	retrier        int
	target, method string
}

func (f filter) lets(m *Method) bool {
	return (f.retrier == 0 || f.retrier == m.Retrier) &&
		(f.target == "" || f.target == m.Target) &&
		(f.method == "" || f.method == m.Method)
}

func (p *Page) snapshot(f filter) Snapshot {
	now := time.Now()
	s := Snapshot{
		Since: p.since, Now: now, RecentSeconds: Recent.Seconds(),
		Retriers: p.retriers(f), Targets: p.targets(f), Methods: []Method{}, Budgets: []Budget{}, Calls: []Call{},
	}
	rows := p.shown(f, &s, p.age(now))
	s.Budgets = p.readBudgets(rows, now)

	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.closed.IsZero() {
		closed := p.closed
		s.Closed = &closed
	}
	s.Calls = lastCalls(rows, maxKept)
	return s
}

// retriers returns what the calls of each retrier hold.
func (p *Page) retriers(f filter) []Retrier {
	all := []Retrier{}
	for _, s := range p.sources {
		if f.retrier != 0 && f.retrier != s.number {
			continue
		}
		u := inside.UsageOf(s.retrier)
		all = append(all, Retrier{
			Number:       s.number,
			WaitingCalls: u.WaitingCalls, OpenStreams: u.OpenStreams,
			ReplayMemory: u.ReplayMemory, ReplayLimit: u.ReplayLimit,
			CommittedStreams: u.CommittedStreams,
		})
	}
	return all
}

// targets returns what calls know about the backends that are or were failing.
func (p *Page) targets(f filter) []Target {
	all := []Target{}
	for _, s := range p.sources {
		if f.retrier != 0 && f.retrier != s.number {
			continue
		}
		for _, state := range inside.TargetsOf(s.retrier) {
			t := Target{
				Retrier: s.number, Target: text(state.Name, maxName),
				FailingMs: ms(state.Failing), WaitingCalls: state.Waiting, GaveUp: state.GaveUp,
			}
			t.PatienceMs = ms(s.patience(state.Name))
			quiet := state.Failing == 0 && state.Waiting == 0 && state.GaveUp == 0
			if !quiet && (f.target == "" || f.target == t.Target) && len(all) < maxRows {
				all = append(all, t)
			}
		}
	}
	return all
}

// patience returns the longest with which the methods that were called wait for a target.
func (s *source) patience(target string) (longest time.Duration) {
	for key := range *s.rows.Load() {
		if key.target == cutLong(target, maxName) {
			longest = max(longest, s.retrier.Policy(key.method).Patience)
		}
	}
	return longest
}

// shown fills in the methods and the sums over them, and returns their rows.
func (p *Page) shown(f filter, s *Snapshot, age time.Duration) (rows []*row) {
	var recent history
	var total counts
	for r := range p.allRows {
		m := r.method()
		if !f.lets(&m) {
			continue
		}
		rowRecent, rowTotal := r.read(age)
		if m.Others && rowTotal == (counts{}) {
			continue
		}
		recent.add(&rowRecent)
		total.add(&rowTotal)
		rowSum := rowRecent.sum()
		m.Recent, m.Total = rowSum.public(), rowTotal.public()
		s.Methods = append(s.Methods, m)
		rows = append(rows, r)
	}
	s.Methods = append(s.Methods, p.off(f, s.Methods)...)
	slices.SortFunc(s.Methods, func(a, b Method) int {
		return cmp.Or(cmp.Compare(a.Retrier, b.Retrier), compareLast(a.Others, b.Others),
			cmp.Compare(a.Target, b.Target), cmp.Compare(a.Method, b.Method))
	})
	sum := recent.sum()
	s.Recent, s.Total, s.Steps = sum.public(), total.public(), recent.public(age)
	return rows
}

// off returns the methods that are off and were called, except those that are shown anyway:
// single calls of them may be on.
func (p *Page) off(f filter, shown []Method) (methods []Method) {
	for _, s := range p.sources {
		for _, called := range inside.PassedMethods(s.retrier) {
			m := Method{Retrier: s.number, Target: text(called.Target, maxName), Method: text(called.Method, maxName), Off: true}
			counted := slices.ContainsFunc(shown, func(other Method) bool {
				return other.Retrier == m.Retrier && other.Target == m.Target && other.Method == m.Method
			})
			policy := s.retrier.Policy(called.Method)
			if isOn := policy.MaxAttempts > 1 || policy.Hedging != nil; isOn || counted || !f.lets(&m) {
				continue
			}
			m.Policy = describe(policy, called.Method, false)
			zero := counts{}
			m.Recent, m.Total = zero.public(), zero.public()
			methods = append(methods, m)
		}
	}
	return methods[:min(len(methods), maxRows)]
}

// public returns the steps since the page was mounted.
func (h *history) public(age time.Duration) (steps []Step) {
	newest := int64(age / stepLength)
	for i := range h {
		number := newest - int64(len(h)-1-i)
		if number < 0 {
			continue
		}
		c := h[i].public()
		steps = append(steps, Step{
			BeganSecondsAgo: (age - time.Duration(number)*stepLength).Seconds(),
			Calls:           c.Calls, Attempts: c.Attempts, Retries: c.Retries, Rescued: c.Rescued, Wasted: c.Wasted, FailedRetried: c.FailedRetried,
		})
	}
	return steps
}

func compareLast(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return 1
	default:
		return -1
	}
}

// method returns a row without its counts.
func (r *row) method() Method {
	m := Method{
		Retrier: r.source.number,
		Target:  text(r.key.target, maxName),
		Method:  text(r.key.method, maxName),
		Others:  r == r.source.others,
	}
	if !m.Others {
		m.Policy = describe(r.source.retrier.Policy(r.key.method), r.key.method, r.key.function)
	}
	if l := r.level.Load(); l != nil && !m.Others {
		m.Budget = l.number
	}
	return m
}

// readBudgets returns those that the rows spend from. It asks each for its balance, so it
// must not hold the lock.
func (p *Page) readBudgets(rows []*row, now time.Time) []Budget {
	var levels []*level
	for _, r := range rows {
		if l := r.level.Load(); l != nil && !slices.Contains(levels, l) && r != r.source.others {
			levels = append(levels, l)
		}
	}
	slices.SortFunc(levels, func(a, b *level) int { return cmp.Compare(a.number, b.number) })
	budgets := make([]Budget, len(levels))
	for i, l := range levels {
		balance, samples := l.read(p.age(now), now)
		budgets[i] = Budget{Number: l.number, Kind: kindOf(l.budget),
			Unlimited: math.IsInf(balance, 1), Level: number(balance), Levels: []Level{}}
		for _, sample := range samples {
			budgets[i].Levels = append(budgets[i].Levels,
				Level{SecondsAgo: (p.age(now) - sample.age).Seconds(), Level: number(sample.balance)})
		}
	}
	return budgets
}

// number returns nil for a balance that JSON has no number for.
func number(balance float64) *float64 {
	if math.IsInf(balance, 0) || math.IsNaN(balance) {
		return nil
	}
	return &balance
}

// lastCalls needs the page's mu. It copies the last n calls of the rows, newest first.
func lastCalls(rows []*row, n int) []Call {
	var all []*Call
	for _, r := range rows {
		all = append(all, r.kept...)
	}
	slices.SortStableFunc(all, func(a, b *Call) int { return b.Ended.Compare(a.Ended) })
	calls := make([]Call, 0, min(n, len(all)))
	for _, c := range all[:min(n, len(all))] {
		call := *c
		call.Attempts = slices.Clone(c.Attempts)
		calls = append(calls, call)
	}
	return calls
}

// public returns counts by name, with the numbers derived from them.
func (c *counts) public() Counts {
	p := Counts{
		FirstTry: c[firstOutcome],
		Rescued:  c[firstOutcome+1],
		HedgeWon: c[firstOutcome+2],
		Wasted:   c[retriesFailed],

		FailedRetried: c[failedRetried],
		HedgesWasted:  c[hedgesWasted],

		Stopped: map[string]int64{},
		Failed:  map[string]int64{},
		Waits:   map[string]int64{},
	}
	p.Calls = p.FirstTry + p.Rescued + p.HedgeWon
	p.Attempts = p.Calls + c[attemptsBeaten]
	for i, name := range outcomes[successes:] {
		p.FailedOnce += put(p.Stopped, name, c[firstOutcome+successes+counter(i)])
	}
	p.Calls += p.FailedOnce
	p.FailedOnce = max(0, p.FailedOnce-p.FailedRetried) // never below, if a call is being counted right now
	for i, name := range codeNames {
		p.Attempts += put(p.Failed, name, c[firstCode+counter(i)])
	}
	for i, source := range waitSources {
		put(p.Waits, source.String(), c[firstWait+counter(i)])
	}
	p.Retries = p.Rescued + p.Wasted + c[retriesBeaten]
	p.Hedges = p.HedgeWon + p.HedgesWasted
	if p.Attempts > 0 {
		p.RetryShare = float64(p.Retries) / float64(p.Attempts)
	}
	return p
}

func put(names map[string]int64, name string, n int64) int64 {
	if n > 0 {
		names[name] = n
	}
	return n
}

// kindOf describes a budget in words: its own, if it has a String method.
func kindOf(b grpcretry.Budget) string {
	if s, ok := b.(fmt.Stringer); ok {
		return text(s.String(), maxName)
	}
	return text(fmt.Sprintf("%T", b), maxName)
}
