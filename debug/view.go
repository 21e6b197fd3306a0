package debug

import (
	"fmt"
	"html/template"
	"slices"
	"strconv"
	"strings"
	"time"
)

// This file turns a Snapshot into what the template writes: words and lengths, no more
// decisions. Whatever is a string here is escaped there.

// A view is the page.
type view struct {
	Style   template.CSS
	Refresh int

	Since, Now, Closed string // Closed is empty while the page counts
	Age                string
	Window             string // "in the last 5 minutes" or "since the page was mounted"
	Other              string // the other of the two; empty while they are the same
	All                bool

	RecentLink, AllLink, RefreshLink, JSONLink, UnfilteredLink template.URL

	Filtered string // what is shown, empty for everything
	Unmade   bool   // there is no retrier to count the calls of
	Empty    bool
	Usage    []usageView
	Waits    []waitView
	Answers  []answer
	Targets  []targetView
	Calls    []callView
	Scale    string // what the width of the calls' timelines stands for
	Retriers bool   // there are several
	Hedges   bool   // there are some
	Connects bool   // calls waited for a connection
}

// A usageView says in words what the calls of one retrier hold.
type usageView struct {
	Retrier int    // 0 if there is only one
	Now     string // "12 calls wait, 3 streams are open, which keep 1.5 of 64 MiB for replays."
	Full    string // what did not fit so far; empty if everything did
}

// A waitView is a target that is failing, or for which calls wait or have given up.
type waitView struct {
	Retrier                        int // 0 if there is only one
	Name, Failing, Waiting, GaveUp string
	Patience                       string
	Over                           bool // it has been failing for longer than that
	Quiet                          bool // it is not failing
}

// A targetView is a target of one retrier.
type targetView struct {
	Retrier int
	Name    string
	Others  bool
	Budgets []chart
	Methods []methodView
	MayRun  bool // the table has the column "May have run"
}

// Columns is how many columns the table has after the method's.
func (t *targetView) Columns() int {
	if t.MayRun {
		return 8
	}
	return 7
}

// A methodView is one line of the table.
type methodView struct {
	Service, Name string // "shop.Cart/", "Get"
	Link          template.URL
	Others, Idle  bool
	Off           string // in words; empty if it is on

	Calls, Attempts, Retries, Share, Rescued string
	ShareBar                                 string // the width of a bar
	Hedges                                   string // empty if there are none
	Failed                                   string
	FailedHow                                []string // how many of them were retried, and how many were not
	MayHaveRun                               string
	Stops                                    []item // the other reasons

	Policy []string
}

func newView(s *Snapshot, q query) *view {
	v := &view{
		Style:    template.CSS(pageCSS),
		Refresh:  q.refresh,
		Since:    stamp(s.Since),
		Now:      stamp(s.Now),
		Age:      length(s.Now.Sub(s.Since).Round(time.Second)),
		Window:   "in the last " + length(Recent),
		Other:    "Since the page was mounted",
		All:      q.all,
		Hedges:   s.Total.Hedges > 0,
		Connects: s.Total.Waits[connect] > 0,
		Unmade:   len(s.Retriers) == 0 && q.retrier == 0,
		Empty:    s.Total.Calls == 0 && s.Total.Attempts == 0 && len(s.Methods) == 0,
	}
	if s.Closed != nil {
		v.Closed = stamp(*s.Closed)
	}
	if q.all {
		v.Window, v.Other = "since the page was mounted", "In the last "+length(Recent)
	}
	if s.Now.Sub(s.Since) <= Recent {
		v.Other = "" // it would repeat the card
	}
	v.link(q)
	v.Filtered = q.words()
	v.Answers = answers(s, q.all)
	v.addTargets(s, q)
	v.addUsage(s.Retriers)
	v.addWaits(s)
	scale := scaleOf(s.Calls)
	v.Scale = lengthMs(scale)
	for i := range s.Calls {
		v.Calls = append(v.Calls, newCallView(&s.Calls[i], s.Now, v.Retriers, scale))
	}
	return v
}

func stamp(t time.Time) string { return t.UTC().Format("2006-01-02 15:04:05 UTC") }

// link makes the links to the same page with one thing changed.
func (v *view) link(q query) {
	with := func(change func(*query)) template.URL {
		changed := q
		change(&changed)
		return changed.link()
	}
	v.RecentLink = with(func(q *query) { q.all = false })
	v.AllLink = with(func(q *query) { q.all = true })
	v.JSONLink = with(func(q *query) { q.json, q.all, q.refresh = true, false, 0 })
	v.UnfilteredLink = with(func(q *query) { q.filter = filter{} })
	v.RefreshLink = with(func(q *query) {
		if q.refresh = 5; v.Refresh > 0 {
			q.refresh = 0
		}
	})
}

// words describe what the filter lets through.
func (f filter) words() string {
	var all []string
	if f.method != "" {
		all = append(all, "method "+text(f.method, maxName))
	}
	if f.target != "" {
		all = append(all, "target "+text(f.target, maxName))
	}
	if f.retrier != 0 {
		all = append(all, "retrier "+strconv.Itoa(f.retrier))
	}
	return strings.Join(all, ", ")
}

// addTargets puts the methods, which are in order, below their targets.
func (v *view) addTargets(s *Snapshot, q query) {
	for _, m := range s.Methods {
		if m.Retrier != s.Methods[0].Retrier {
			v.Retriers = true
		}
	}
	for i := 0; i < len(s.Methods); {
		first := &s.Methods[i]
		same := func(m *Method) bool {
			return m.Retrier == first.Retrier && m.Target == first.Target && m.Others == first.Others
		}
		t := targetView{Name: first.Target, Others: first.Others}
		if v.Retriers {
			t.Retrier = first.Retrier
		}
		begin := i
		for ; i < len(s.Methods) && same(&s.Methods[i]); i++ {
			m := &s.Methods[i]
			t.Methods = append(t.Methods, newMethodView(m, q))
			t.MayRun = t.MayRun || m.Policy != nil && m.Policy.UnsentOnly || m.Total.Stopped[mayHaveRun] > 0
		}
		t.Budgets = chartsOf(s.Methods[begin:i], s, q.all)
		v.Targets = append(v.Targets, t)
	}
}

func (v *view) addUsage(retriers []Retrier) {
	for _, r := range retriers {
		u := usageView{Now: fmt.Sprintf("%s, %s, and %s of %s are kept to replay streams.",
			plural(int64(r.WaitingCalls), "call waits", "calls wait"),
			plural(int64(r.OpenStreams), "stream is open", "streams are open"), amount(r.ReplayMemory), amount(r.ReplayLimit))}
		if len(retriers) > 1 {
			u.Retrier = r.Number
		}
		if r.CommittedStreams > 0 {
			u.Full = fmt.Sprintf("That was full: %s early.", plural(r.CommittedStreams, "stream has committed", "streams have committed"))
		}
		v.Usage = append(v.Usage, u)
	}
}

func (v *view) addWaits(s *Snapshot) {
	for _, t := range s.Targets {
		w := waitView{Name: t.Target, Failing: "–", Waiting: count(int64(t.WaitingCalls)), GaveUp: count(t.GaveUp), Quiet: t.FailingMs == 0,
			Patience: "none"}
		if !w.Quiet {
			w.Failing, w.Over = lengthMs(t.FailingMs), t.FailingMs >= t.PatienceMs
		}
		if t.PatienceMs > 0 {
			w.Patience = lengthMs(t.PatienceMs)
		}
		if len(s.Retriers) > 1 {
			w.Retrier = t.Retrier
		}
		v.Waits = append(v.Waits, w)
	}
}

func newMethodView(m *Method, q query) methodView {
	c := chosen(&m.Recent, &m.Total, q.all)
	v := methodView{
		Others:   m.Others,
		Idle:     c.Calls == 0 && c.Attempts == 0,
		Calls:    count(c.Calls),
		Attempts: count(c.Attempts),
		Retries:  count(c.Retries),
		Share:    percent(c.RetryShare),
		ShareBar: width(c.RetryShare),
		Rescued:  count(c.Rescued),
		Failed:   count(c.FailedOnce + c.FailedRetried),

		MayHaveRun: count(c.Stopped[mayHaveRun]),
		Stops:      slices.DeleteFunc(stops(c), func(i item) bool { return i.Name == mayHaveRun }),
	}
	if c.FailedOnce > 0 {
		v.FailedHow = append(v.FailedHow, count(c.FailedOnce)+" not retried")
	}
	if c.FailedRetried > 0 {
		v.FailedHow = append(v.FailedHow, count(c.FailedRetried)+" retried")
	}
	if c.Hedges > 0 {
		v.Hedges = plural(c.Hedges, "hedge", "hedges")
	}
	v.Service, v.Name = splitMethod(m.Method)
	if m.Policy != nil {
		v.Policy = m.Policy.Text
		if m.Off {
			v.Off = m.Policy.Text[0]
		}
		q.filter = filter{m.Retrier, m.Target, m.Method}
		v.Link = q.link()
	}
	return v
}

func chosen(recent, total *Counts, all bool) *Counts {
	if all {
		return total
	}
	return recent
}

// splitMethod separates the part that distinguishes the methods of a service.
func splitMethod(method string) (service, name string) {
	method = strings.TrimPrefix(method, "/")
	i := strings.LastIndexByte(method, '/') + 1
	return method[:i], method[i:]
}

// width writes a share of 0 … 1 as a width in SVG.
func width(share float64) string {
	if !(share > 0) { // NaN too
		share = 0
	}
	return strconv.FormatFloat(100*min(1, share), 'f', 2, 64) + "%"
}
