package debug

import (
	"fmt"
	"html/template"
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
	Window, Other      string // "in the last 5 minutes", "since the page was mounted", or the other way round
	All                bool

	RecentLink, AllLink, RefreshLink, JSONLink, UnfilteredLink template.URL

	Filtered string // what is shown, empty for everything
	Empty    bool
	Usage    []usageView
	Answers  []answer
	Targets  []targetView
	Calls    []callView
	Retriers bool // there are several
	Hedges   bool // there are some
	Connects bool // calls waited for a connection
}

// A usageView says in words what the calls of one retrier hold.
type usageView struct {
	Retrier int    // 0 if there is only one
	Now     string // "12 calls wait, 3 streams are open, which keep 1.5 of 64 MiB for replays."
	Full    string // what did not fit so far; empty if everything did
}

// A targetView is a target of one retrier.
type targetView struct {
	Retrier int
	Name    string
	Others  bool
	Budgets []chart
	Methods []methodView
}

// A methodView is one line of the table.
type methodView struct {
	Service, Name string // "shop.Cart/", "Get"
	Link          template.URL
	Others, Idle  bool
	Off           string // in words; empty if it is on

	Calls, Attempts, Retries, Share, Rescued, Lost string
	ShareBar                                       string // the width of a bar
	Hedges                                         string // empty if there are none
	Stops                                          []item

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
		Empty:    s.Total.Calls == 0 && s.Total.Attempts == 0 && len(s.Methods) == 0,
	}
	if s.Closed != nil {
		v.Closed = stamp(*s.Closed)
	}
	if q.all {
		v.Window, v.Other = "since the page was mounted", "In the last "+length(Recent)
	}
	v.link(q)
	v.Filtered = q.words()
	v.Answers = answers(s, q.all)
	v.addTargets(s, q)
	v.addUsage(s.Retriers)
	for i := range s.Calls {
		v.Calls = append(v.Calls, newCallView(&s.Calls[i], s.Now, v.Retriers))
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
			t.Methods = append(t.Methods, newMethodView(&s.Methods[i], q))
		}
		t.Budgets = chartsOf(s.Methods[begin:i], s, q.all)
		v.Targets = append(v.Targets, t)
	}
}

func (v *view) addUsage(retriers []Retrier) {
	for _, r := range retriers {
		u := usageView{Now: fmt.Sprintf("%s, %s, and %s of %s are kept to replay streams and for hedges.",
			plural(int64(r.WaitingCalls), "call waits", "calls wait"),
			plural(int64(r.OpenStreams), "stream is open", "streams are open"), amount(r.ReplayMemory), amount(r.ReplayLimit))}
		if len(retriers) > 1 {
			u.Retrier = r.Number
		}
		if r.CommittedStreams+r.UnsentHedges > 0 {
			u.Full = fmt.Sprintf("That was full: %s early, and %s not sent.",
				plural(r.CommittedStreams, "stream has committed", "streams have committed"), plural(r.UnsentHedges, "hedge was", "hedges were"))
		}
		v.Usage = append(v.Usage, u)
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
		Lost:     count(c.Lost),
		Stops:    stops(c),
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
