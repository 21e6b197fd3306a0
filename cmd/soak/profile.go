package main

import (
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/balancer"
	"github.com/grpcretry/grpcretry/internal/inside"
)

// A profile is a Retrier of a client process, with its ClientConns.
type profile struct {
	name        string
	retrier     *grpcretry.Retrier
	attempts    int           // what the policy allows at most
	hedges      int           // likewise, for a hedged call
	hedgeAll    bool          // Echo and Expand may be hedged without an option
	balanced    bool          // its ClientConns know all servers
	updates     bool          // its policies change
	smallMemory bool          // its replay memory is often used up
	codes       []codes.Code  // that are retried at some time
	wait        time.Duration // at most, apart from those that the server asks for: the backoff, or Patience
	audits      []audit

	conns []atomic.Pointer[conn]
	traffic
}

// A conn is a ClientConn, and whether it has been closed under the calls that use it.
type conn struct {
	cc     *grpc.ClientConn
	closed atomic.Bool
}

// connectParams has gRPC reconnect quickly.
var connectParams = grpc.ConnectParams{
	Backoff:           backoff.Config{BaseDelay: 10 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 200 * time.Millisecond},
	MinConnectTimeout: time.Second,
}

const echoService = "/grpcretry.test.v1.EchoService/"

// patience is how long calls wait for a target that is failing.
const patience = 2 * time.Second

// smallMemory is a replay memory that a few streams use up.
const smallMemory = 12 << 10

// newProfiles returns the profiles of a client process.
func newProfiles(observe grpcretry.Option) ([]*profile, error) {
	backoff := grpcretry.WithBackoff(grpcretry.Exponential{Base: 2 * time.Millisecond, Max: 20 * time.Millisecond})
	common := []grpcretry.Option{observe, backoff, grpcretry.WithMethod(echoService+"Append", grpcretry.WithUnsentOnly(true)),
		grpcretry.WithPatience(patience)}
	tight := grpcretry.RatioBudget{Ratio: 0.01, Reserve: 3, Window: time.Second}
	tightBudget, err := grpcretry.NewRatioBudget(tight)
	if err != nil {
		return nil, err
	}
	const perSecond, burst = 20, 10
	limited := newCounted(grpcretry.NewRateBudget(rate.NewLimiter(perSecond, burst)))
	const maxTokens, tokenRatio = 20, 0.05
	throttle, err := grpcretry.NewThrottle(maxTokens, tokenRatio)
	if err != nil {
		return nil, err
	}
	counted := newCounted(throttle)
	const concurrent = 3
	concurrency, err := grpcretry.NewConcurrencyBudget(concurrent)
	if err != nil {
		return nil, err
	}
	few := newCounted(concurrency)
	hedging := grpcretry.WithPolicy(grpcretry.Policy{MaxAttempts: 3,
		Hedging: &grpcretry.Hedging{Delay: grpcretry.HedgeAtQuantile(0.95, time.Millisecond, 0)}})

	profiles := []*profile{
		{name: "default budget", attempts: 4, hedges: 3},
		{name: "tight budget", attempts: 4, hedges: 3, audits: []audit{ratioAudit(tight, tightBudget), restored(tightBudget, tight.Reserve)}},
		{name: "rate budget", attempts: 6, hedges: 3, audits: []audit{rateAudit(perSecond, burst), limited.audit}},
		{name: "throttle", attempts: 5, hedges: 3,
			audits: []audit{throttleAudit(maxTokens, tokenRatio), counted.audit, restored(throttle, maxTokens/2)},
			codes:  []codes.Code{codes.Unavailable, codes.ResourceExhausted, codes.Aborted}},
		{name: "concurrency budget", attempts: 4, hedges: 3, audits: []audit{few.audit, restored(few, concurrent)}},
		{name: "no budget, attempt timeout", attempts: 8, hedges: 3},
		{name: "hedged, other backends", attempts: 4, hedges: 3, hedgeAll: true, balanced: true},
		{name: "updated", attempts: 4, hedges: 3, updates: true, balanced: true,
			codes: []codes.Code{codes.Unavailable, codes.ResourceExhausted, codes.Aborted, codes.Internal}},
		{name: "small replay memory", attempts: 4, hedges: 3, smallMemory: true},
	}
	options := [][]grpcretry.Option{
		{},
		{grpcretry.WithBudget(tightBudget)},
		{grpcretry.WithBudget(limited), grpcretry.WithMaxAttempts(6)},
		{grpcretry.WithBudget(counted), grpcretry.WithMaxAttempts(5),
			grpcretry.WithCodes(codes.Unavailable, codes.ResourceExhausted, codes.Aborted),
			grpcretry.WithPatience(0)}, // nobody waits for a throttle, but the library does not know one that is counted
		{grpcretry.WithBudget(few)},
		{grpcretry.WithBudget(grpcretry.Unlimited), grpcretry.WithMaxAttempts(8), grpcretry.WithAttemptTimeout(100 * time.Millisecond),
			grpcretry.WithMaxElapsed(3 * time.Second)},
		{grpcretry.WithMethod(echoService+"Echo", hedging), grpcretry.WithMethod(echoService+"Expand", hedging)},
		{grpcretry.WithBudget(grpcretry.Unlimited)},
		{grpcretry.WithBudget(grpcretry.Unlimited), inside.WithReplayMemory(smallMemory).(grpcretry.Option)},
	}
	for i, p := range profiles {
		p.wait = patience
		if p.codes == nil {
			p.codes = []codes.Code{codes.Unavailable, codes.ResourceExhausted}
		}
		if p.retrier, err = grpcretry.New(append(append([]grpcretry.Option{}, common...), options[i]...)...); err != nil {
			return nil, fmt.Errorf("profile %s: %w", p.name, err)
		}
	}
	return profiles, nil
}

// updates are the policies that follow one another in the profile whose policies change.
func drawUpdate(draw *rand.Rand) []grpcretry.Option {
	switch draw.IntN(6) {
	case 0:
		return []grpcretry.Option{grpcretry.Disable()}
	case 1:
		return []grpcretry.Option{grpcretry.WithMaxAttempts(2 + draw.IntN(3)), grpcretry.WithAttemptTimeout(50 * time.Millisecond)}
	case 2:
		return []grpcretry.Option{grpcretry.WithMaxAttempts(4), grpcretry.WithAttemptTimeout(0), grpcretry.WithBufferLimit(2000)}
	case 3:
		return []grpcretry.Option{grpcretry.WithMaxAttempts(3), grpcretry.WithMethod(echoService+"Append", grpcretry.WithUnsentOnly(true)),
			grpcretry.WithBufferLimit(256 << 10)}
	case 4:
		return []grpcretry.Option{grpcretry.WithCodes(codes.Unavailable, codes.Internal, codes.Aborted), grpcretry.WithMaxAttempts(4)}
	default:
		return []grpcretry.Option{grpcretry.WithMaxAttempts(4), grpcretry.WithCodes(codes.Unavailable, codes.ResourceExhausted),
			grpcretry.WithBackoff(grpcretry.Constant(time.Duration(draw.IntN(10)) * time.Millisecond))}
	}
}

// dial returns a new ClientConn of the profile. To be balanced, it needs all addresses.
func (p *profile) dial(addresses []string) (*conn, error) {
	options := append(p.retrier.DialOptions(), grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithConnectParams(connectParams), grpc.WithIdleTimeout(0))
	target := "passthrough:///" + addresses[0]
	if p.balanced {
		builder := manual.NewBuilderWithScheme("soak")
		var state resolver.State
		for _, a := range addresses {
			state.Endpoints = append(state.Endpoints, resolver.Endpoint{Addresses: []resolver.Address{{Addr: a}}})
		}
		builder.InitialState(state)
		options = append(options, grpc.WithResolvers(builder), balancer.DialOption())
		target = "soak:///servers"
	}
	cc, err := grpc.NewClient(target, options...)
	if err != nil {
		return nil, err
	}
	return &conn{cc: cc}, nil
}

// A traffic counts what a budget must know. Counters only grow.
type traffic struct {
	answered atomic.Int64 // attempts that were answered
	retried  atomic.Int64 // retries that were sent, apart from those after an unsent attempt; hedges have a budget of their own
	returned atomic.Int64 // of these, those that succeeded, or reached no server
	inFlight atomic.Int64 // calls

	mu      sync.Mutex
	samples []sample // guarded by mu
}

// A sample is a traffic's counters at some time.
type sample struct {
	at                          time.Time
	answered, retried, returned int64
}

// look takes a sample. Attempts are answered after the retries that they pay for are sent, so
// the order of the reads makes no budget look smaller than it was.
func (t *traffic) look() sample {
	s := sample{at: time.Now()}
	s.retried = t.retried.Load()
	s.returned = t.returned.Load()
	s.answered = t.answered.Load()
	return s
}

// keep takes a sample, and keeps it for a minute.
func (t *traffic) keep() {
	t.mu.Lock()
	defer t.mu.Unlock()
	now := t.look()
	for len(t.samples) > 0 && now.at.Sub(t.samples[0].at) > time.Minute {
		t.samples = t.samples[1:]
	}
	t.samples = append(t.samples, now)
}

// An audit checks a profile's budget; at the end no call is in flight. It returns what is wrong.
type audit func(p *profile, atEnd bool) string

// ratioAudit checks that between any two samples no more retries were spent than the reserve, and
// the share of the calls that were answered between them and in the window before.
func ratioAudit(s grpcretry.RatioBudget, b grpcretry.Budget) audit {
	return func(p *profile, atEnd bool) string {
		p.mu.Lock()
		defer p.mu.Unlock()
		if len(p.samples) == 0 {
			return ""
		}
		last := p.samples[len(p.samples)-1]
		begin := 0 // of the window before a sample
		for i, first := range p.samples {
			for first.at.Sub(p.samples[begin].at) > s.Window*6/5 {
				begin++
			}
			earned := p.samples[max(begin-1, 0)]
			if begin == 0 {
				earned = sample{} // the first sample may come late
			}
			spent := last.retried - first.retried - (last.returned - first.returned)
			limit := s.Reserve + s.Ratio*float64(last.answered-earned.answered) + float64(workers)
			if float64(spent) > limit {
				return fmt.Sprintf("in %v, %d retries were spent and not returned, and the budget allows %.1f: %d attempts were answered then and "+
					"in the window before",
					last.at.Sub(p.samples[i].at), spent, limit, last.answered-earned.answered)
			}
		}
		if balance := b.Balance(time.Now()); balance < 0 {
			return fmt.Sprintf("the balance is %v", balance)
		}
		return ""
	}
}

// rateAudit checks that retries stayed within their rate.
func rateAudit(perSecond, burst float64) audit {
	return func(p *profile, _ bool) string {
		p.mu.Lock()
		defer p.mu.Unlock()
		if len(p.samples) == 0 {
			return ""
		}
		last := p.samples[len(p.samples)-1]
		for _, first := range p.samples {
			// A retry that reached no server is returned, one that succeeded is not. Both are taken for
			// returned, so at most that many more may have been sent.
			spent := last.retried - first.retried - (last.returned - first.returned)
			limit := burst + perSecond*last.at.Sub(first.at).Seconds() + float64(workers)
			if float64(spent) > limit {
				return fmt.Sprintf("in %v, %d retries were spent, and the rate allows %.1f", last.at.Sub(first.at), spent, limit)
			}
		}
		return ""
	}
}

// throttleAudit checks that no more retries were sent than a throttle allows that was full at
// the start: each of them needs a failure, and failures empty it, by one token each, to half.
func throttleAudit(maxTokens, tokenRatio float64) audit {
	return func(p *profile, _ bool) string {
		retried, answered := p.retried.Load(), p.answered.Load()
		limit := maxTokens/2 + tokenRatio*float64(answered) + float64(workers)
		if float64(retried) > limit {
			return fmt.Sprintf("%d retries were sent, and the throttle allows %.1f after %d answered attempts", retried, limit, answered)
		}
		return ""
	}
}

// A countedBudget counts what the library takes from a budget, and what it reports.
type countedBudget struct {
	grpcretry.Budget
	withdrawn, ended atomic.Int64
}

func newCounted(b grpcretry.Budget) *countedBudget { return &countedBudget{Budget: b} }

func (b *countedBudget) Withdraw(now time.Time) bool {
	ok := b.Budget.Withdraw(now)
	if ok {
		b.withdrawn.Add(1)
	}
	return ok
}

func (b *countedBudget) Deposit(o grpcretry.Outcome) {
	if o.Attempt > 1 {
		b.ended.Add(1)
	}
	b.Budget.Deposit(o)
}

// audit checks that each retry taken from the budget has ended.
func (b *countedBudget) audit(_ *profile, atEnd bool) string {
	ended := b.ended.Load()
	withdrawn := b.withdrawn.Load()
	if ended > withdrawn || atEnd && ended != withdrawn {
		return fmt.Sprintf("%d retries were taken from the budget, and %d ended", withdrawn, ended)
	}
	return ""
}

// restored checks that at the end, after some successes, a budget is as it was at the start, or better.
func restored(b grpcretry.Budget, full float64) audit {
	return func(_ *profile, atEnd bool) string {
		if !atEnd {
			return ""
		}
		for range 1000 {
			b.Deposit(grpcretry.Outcome{Attempt: 1, Result: grpcretry.Succeeded})
		}
		if got := b.Balance(time.Now()); got < full-0.001 || got > 20*full {
			return fmt.Sprintf("at the end, after 1000 successes, the balance is %v, and at the start it was %v", got, full)
		}
		return ""
	}
}

// checkUsage returns what a profile's Retrier still holds when no call is in flight, "" for nothing.
func (p *profile) checkUsage() string {
	u := inside.UsageOf(p.retrier)
	switch {
	case u.WaitingCalls != 0 || u.OpenStreams != 0 || u.ReplayMemory != 0:
		return fmt.Sprintf("%d calls are waiting, %d streams are open, and %d bytes are kept for replays, when no call is in flight",
			u.WaitingCalls, u.OpenStreams, u.ReplayMemory)
	case p.smallMemory && p.answered.Load() > 5000 && u.CommittedStreams == 0:
		return fmt.Sprintf("the replay memory of %d bytes has committed no stream", u.ReplayLimit)
	}
	return ""
}
