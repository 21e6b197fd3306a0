package debug

import (
	"context"
	"fmt"
	"math"
	"runtime"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/internal/inside"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// This file holds the page to the bounds that the package comment promises. Events are
// made up, because millions of calls would take long.

// told is a page, and what tells it of events as a retrier would.
func told(t testing.TB) (*Page, func(grpcretry.Event, ...grpcretry.Budget)) {
	p := handler(t, retrier(t))
	return p, func(e grpcretry.Event, spent ...grpcretry.Budget) {
		of := callOf(e)
		if len(spent) > 0 {
			of.Budget = spent[0]
		}
		p.sources[0].observe(context.Background(), e, of)
	}
}

// callOf is what a retrier tells beside an event of failedCall, or of a first attempt.
func callOf(e grpcretry.Event) inside.Call {
	first := e.Attempt
	if len(e.Attempts) > 0 {
		first = e.Attempts[0]
	}
	return inside.Call{Start: first.Start, Made: e.Attempt.Number}
}

// failedCall is the end of a call that made attempts, one after the other.
func failedCall(target, method string, attempts int, message, peer string) grpcretry.Event {
	start := time.Now()
	e := grpcretry.Event{
		Kind: grpcretry.CallEnd, Target: target,
		Err: status.Error(codes.Unavailable, message), Reason: grpcretry.ErrAttemptsExhausted,
		Elapsed: time.Duration(attempts) * time.Second,
	}
	for i := range attempts {
		e.Attempts = append(e.Attempts, grpcretry.Attempt{
			Method: method, Number: i + 1, Start: start.Add(time.Duration(i) * time.Second), Duration: time.Second,
			Err: status.Error(codes.Unavailable, message), Peer: addressed{address: peer},
		})
	}
	e.Attempt = e.Attempts[attempts-1]
	return e
}

func TestMethodsOverTheLimitAreCountedTogether(t *testing.T) {
	for _, tt := range []struct {
		name string
		key  func(int) (target, method string)
	}{
		{"methods", func(i int) (string, string) { return "one", fmt.Sprint("/s/", i) }},
		{"targets", func(i int) (string, string) { return fmt.Sprint(i), "/s/one" }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p, tell := told(t)
			for range 2 {
				for i := range 150 {
					target, method := tt.key(i)
					tell(failedCall(target, method, 2, "down", ""))
				}
			}
			s := p.Snapshot()
			last := s.Methods[len(s.Methods)-1]
			want(t, "methods", len(s.Methods), 101)
			want(t, "the last is of the others", fmt.Sprintf("%v %q %q %v", last.Others, last.Target, last.Method, last.Policy), `true "" "" <nil>`)
			want(t, "calls of others", last.Total.Calls, 100)
			want(t, "all calls", s.Total.Calls, 300)
			want(t, "kept calls of others", len(p.sources[0].others.kept), 50)
			wantIn(t, get(t, p, "").Body.String(), "all other targets and methods")
		})
	}
}

// The limit is of the page, however many retriers it has.
func TestMethodsAreLimitedOverAllRetriers(t *testing.T) {
	p := handler(t, retrier(t), retrier(t))
	for i := range 200 {
		e := failedCall("one", fmt.Sprint("/s/", i), 1, "down", "")
		p.sources[i%2].observe(t.Context(), e, callOf(e))
	}
	s := p.Snapshot()
	want(t, "methods", len(s.Methods), 102)
	want(t, "calls", s.Total.Calls, 200)
	want(t, "the others are the last of each retrier", fmt.Sprint(s.Methods[50].Others, s.Methods[101].Others), "true true")
}

func TestLastCallsAreKeptForEachMethod(t *testing.T) {
	bubble(t, func(t *testing.T) {
		p, tell := told(t)
		tell(failedCall("one", "/s/quiet", 2, "down", ""))
		for i := range 120 {
			time.Sleep(time.Second)
			tell(failedCall("one", "/s/loud", 2, fmt.Sprint("down ", i), ""))
		}
		calls := p.Snapshot().Calls
		want(t, "calls", len(calls), 50)
		want(t, "the newest", calls[0].Attempts[0].Message, "down 119")
		want(t, "the oldest", calls[49].Attempts[0].Message, "down 70")
		want(t, "calls of a method that is drowned out", len(getJSON(t, p, "method=/s/quiet").Calls), 1)
	})
}

func TestKeptCallsAreLimitedFairly(t *testing.T) {
	p, tell := told(t)
	tell(failedCall("one", "/s/quiet", 2, "down", ""))
	for range 60 {
		for i := range 40 {
			tell(failedCall("one", fmt.Sprint("/s/", i), 2, "down", ""))
		}
	}
	want(t, "kept", p.kept, maxKeptAll)
	total, least, most := 0, maxKeptAll, 0
	for r := range p.allRows {
		total += len(r.kept)
		if strings.HasPrefix(r.key.method, "/s/") && r.key.method != "/s/quiet" {
			least, most = min(least, len(r.kept)), max(most, len(r.kept))
		}
	}
	want(t, "kept of all methods", total, maxKeptAll)
	if least < 20 || most > 30 {
		t.Errorf("of 40 equal methods one keeps %d calls and another %d, want all to keep about 25", least, most)
	}
	want(t, "kept of the method with one", len(getJSON(t, p, "method=/s/quiet").Calls), 1)
}

func TestAttemptsOfACallAreLimited(t *testing.T) {
	for _, tt := range []struct {
		made int
		want []int
		more string
	}{
		{1, []int{1}, ""},
		{10, []int{1, 2, 3, 4, 5, 6, 7, 8, 9, 10}, ""},
		{11, []int{1, 3, 4, 5, 6, 7, 8, 9, 10, 11}, "1 attempt left out"},
		{5000, []int{1, 4992, 4993, 4994, 4995, 4996, 4997, 4998, 4999, 5000}, "4,990 attempts left out"},
	} {
		p, tell := told(t)
		tell(failedCall("one", "/s/m", tt.made, "down", ""))
		call := p.Snapshot().Calls[0]
		var got []int
		for _, a := range call.Attempts {
			got = append(got, a.Number)
		}
		want(t, fmt.Sprint("attempts of ", tt.made), got, tt.want)
		want(t, "attempts made", call.Made, tt.made)
		wantIn(t, get(t, p, "").Body.String(), tt.more)
	}
}

// grpcretry itself does not tell the first attempts of a very long call.
func TestACallWhoseFirstAttemptsAreNotTold(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := retrier(t, grpcretry.WithMaxAttempts(30), grpcretry.WithBackoff(grpcretry.Constant(time.Second)),
			grpcretry.WithPatience(0), unlimited)
		c := dial(t, r, "passthrough:///echo")
		p := handler(t, r)
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(19500*time.Millisecond, cancel) // in the wait after attempt 20
		c.Echo(ctx, &echov1.EchoRequest{Message: "down"})
		call := p.Snapshot().Calls[0]
		want(t, "attempts made", call.Made, 20)
		want(t, "number of the first that is told", call.Attempts[0].Number, 5)
		want(t, "its start", call.Attempts[0].StartMs, 4000.0)
		want(t, "end", call.Ended, time.Now())
	})
}

// Among the attempts of a hedged call, those that are not told may be the last.
func TestACallWhoseLastHedgesAreNotTold(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := retrier(t, grpcretry.WithMethod(echoMethod, grpcretry.WithMaxAttempts(20), grpcretry.WithHedging(grpcretry.Hedging{
			Delay: grpcretry.HedgeAfter(time.Second), Budget: grpcretry.Unlimited})))
		c := dial(t, r, "passthrough:///echo")
		p := handler(t, r)
		c.echo("30s:ok " + strings.Repeat("20s:hang ", 18) + "down") // the last hedge fails first
		want(t, "attempts made", p.Snapshot().Calls[0].Made, 20)
	})
}

func TestLongTextsAreCut(t *testing.T) {
	long := func(s string) string { return s + strings.Repeat("ä", 1000) }
	p, tell := told(t)
	tell(failedCall(long("target"), long("/s/"), 2, long("message"), long("peer")))
	s := getJSON(t, p, "")
	call := s.Calls[0]
	for _, tt := range []struct {
		what, text string
		bytes      int
	}{
		{"target", s.Methods[0].Target, 200},
		{"method", s.Methods[0].Method, 200},
		{"target of the call", call.Target, 200},
		{"method of the call", call.Method, 200},
		{"message", call.Attempts[0].Message, 120},
		{"peer", call.Attempts[0].Peer, 64},
	} {
		if n := len(tt.text); n > tt.bytes || n < tt.bytes-1 || !strings.HasSuffix(tt.text, "ä…") {
			t.Errorf("%s is %q, %d bytes, want it cut to %d", tt.what, tt.text, n, tt.bytes)
		}
	}
	want(t, "the row is found again", getJSON(t, p, "method="+s.Methods[0].Method).Total.Calls, 1)
	tell(failedCall(long("target"), long("/s/"), 2, "", ""))
	want(t, "methods", len(p.Snapshot().Methods), 1)
}

func TestBudgetsOverTheLimitHaveNoHistory(t *testing.T) {
	p, tell := told(t)
	for i := range 60 {
		b, err := grpcretry.NewConcurrencyBudget(i + 1)
		if err != nil {
			t.Fatal(err)
		}
		e := failedCall("one", fmt.Sprint("/s/", i), 1, "down", "")
		tell(e, b)
	}
	s := p.Snapshot()
	want(t, "budgets", len(s.Budgets), 50)
	without := 0
	for _, m := range s.Methods {
		if m.Budget == 0 {
			without++
		}
	}
	want(t, "methods without", without, 10)
	tell(failedCall("one", "/s/0", 1, "down", ""), grpcretry.Unlimited) // its budget has been replaced
	want(t, "the budget of a method whose new one is over the limit", getJSON(t, p, "method=/s/0").Methods[0].Budget, 0)
	get(t, p, "")
}

// TestMemoryIsBounded fills a page with the worst there is: everything long, and no two
// texts the same.
func TestMemoryIsBounded(t *testing.T) {
	if testing.Short() {
		t.Skip("it takes a second")
	}
	bubble(t, func(t *testing.T) {
		before := heap()
		p, tell := told(t)
		n := 0
		long := func(s string) string { n++; return fmt.Sprint(s, n, strings.Repeat("x", 500)) }
		var budgets []grpcretry.Budget
		for range 60 {
			b, err := grpcretry.NewConcurrencyBudget(1)
			if err != nil {
				t.Fatal(err)
			}
			budgets = append(budgets, b)
		}
		for i := range 120 {
			for range 10 {
				e := failedCall(longName("t", i), longName("/m", i), 12, "", "")
				for j := range e.Attempts {
					e.Attempts[j].Err = status.Error(codes.Unavailable, long("message"))
					e.Attempts[j].Peer = addressed{address: long("peer")}
				}
				tell(e)
			}
		}
		for range 600 { // ten minutes
			for i := range 120 {
				tell(grpcretry.Event{Kind: grpcretry.CallEnd, Target: longName("t", i),
					Attempt: grpcretry.Attempt{Method: longName("/m", i), Number: 1, Start: time.Now()}}, budgets[i%len(budgets)])
			}
			time.Sleep(time.Second)
		}
		used := heap() - before
		want(t, "kept", p.kept, maxKeptAll)
		t.Logf("a full page takes %d KiB", used>>10)
		if used > 5<<20 {
			t.Errorf("a full page takes %d bytes, want at most 5 MiB", used)
		}
		runtime.KeepAlive(p)
		runtime.KeepAlive(budgets)
	})
}

func longName(s string, i int) string { return fmt.Sprint(s, i, strings.Repeat("n", 500)) }

func heap() int {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int(m.HeapAlloc)
}

// A budget may be of a type that cannot be compared, or say what is no number.
type oddBudget struct {
	empty
	balance []float64
}

func (b oddBudget) Balance(time.Time) float64 { return b.balance[0] }

// A spyBudget counts how often it is looked at.
type spyBudget struct {
	empty
	looks int
}

func (b *spyBudget) Balance(time.Time) float64 { b.looks++; return float64(b.looks) }

func TestLevelOfABudget(t *testing.T) {
	bubble(t, func(t *testing.T) {
		b, err := grpcretry.NewRatioBudget(grpcretry.RatioBudget{Ratio: grpcretry.Nothing, Reserve: grpcretry.Nothing, MinPerSecond: 0.2,
			Window: 10 * time.Second})
		if err != nil {
			t.Fatal(err)
		}
		r := retrier(t, grpcretry.WithBudget(b), grpcretry.WithMaxAttempts(2), grpcretry.WithPatience(0))
		p := handler(t, r)
		c := dial(t, r, "passthrough:///echo")
		c.echo("down") // takes 1 of 2 at 1 s
		c.echo("down") // takes 1 of 1.2 at 2 s
		c.echo("down") // is refused: 0.2 are left
		s := getJSON(t, p, "")
		want(t, "stopped", s.Total.Stopped, map[string]int64{"exhausted": 2, "budget": 1})
		want(t, "kind", s.Budgets[0].Kind, "ratio budget: 0% of answered calls, a reserve of 0, plus 0.2 a second, over 10s")
		want(t, "levels", levels(s.Budgets[0]), "2 s: 2; 1 s: 1; 0 s: 0.2; now 0.2")
		wantIn(t, get(t, p, "").Body.String(), "1 call refused")
		time.Sleep(298 * time.Second)
		s = getJSON(t, p, "")
		want(t, "after five minutes", levels(s.Budgets[0]), "300 s: 2; 299 s: 1; 298 s: 0.2; 0 s: 2; now 2")
		time.Sleep(time.Minute)
		want(t, "after six minutes", levels(getJSON(t, p, "").Budgets[0]), "60 s: 2; 0 s: 2; now 2")
	})
}

// levels rounds to millionths of a retry, because budgets add up in floating point.
func levels(b Budget) string {
	s := ""
	for _, l := range b.Levels {
		s += fmt.Sprintf("%v s: %.6g; ", l.SecondsAgo, *l.Level)
	}
	return s + fmt.Sprintf("now %.6g", *b.Level)
}

func TestBudgetIsLookedAtOnceASecond(t *testing.T) {
	bubble(t, func(t *testing.T) {
		b := &spyBudget{}
		r := retrier(t, grpcretry.WithBudget(b))
		p := handler(t, r)
		c := dial(t, r, "passthrough:///echo")
		for range 10 {
			c.echo("ok")
		}
		want(t, "looks within a second", b.looks, 1)
		for range 600 {
			time.Sleep(time.Second)
			c.echo("ok")
		}
		want(t, "looks within ten minutes", b.looks, 601)
		want(t, "levels kept", len(p.Snapshot().Budgets[0].Levels), 301)
	})
}

func TestBudgetsThatAreNoNumbers(t *testing.T) {
	for _, tt := range []struct {
		name       string
		budget     grpcretry.Budget
		want, page string
	}{
		{"unlimited", grpcretry.Unlimited, "no limit, unlimited true, level null true", "<b>no limit</b>"},
		{"NaN", oddBudget{balance: []float64{math.NaN()}}, "debug.oddBudget, unlimited false, level null true", "<b>unknown</b>"},
		{"minus infinity", oddBudget{balance: []float64{math.Inf(-1)}}, "debug.oddBudget, unlimited false, level null true", "<b>unknown</b>"},
		{"huge", oddBudget{balance: []float64{1e300}}, "debug.oddBudget, unlimited false, level null false", "<b>1,000,000,000,000,000</b>"},
		{"negative", oddBudget{balance: []float64{-1e300}}, "debug.oddBudget, unlimited false, level null false",
			"<b>-1,000,000,000,000,000</b>"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p, tell := told(t)
			for range 2 {
				e := failedCall("one", "/s/m", 1, "down", "")
				tell(e, tt.budget)
			}
			s := getJSON(t, p, "")
			b := s.Budgets[0]
			want(t, "budget", fmt.Sprintf("%s, unlimited %v, level null %v", b.Kind, b.Unlimited, b.Level == nil), tt.want)
			wantIn(t, get(t, p, "").Body.String(), tt.page)
		})
	}
}

// A retrier told of more than two budgets of one type that cannot be compared keeps one.
func TestBudgetsThatCannotBeCompared(t *testing.T) {
	p, tell := told(t)
	for i := range 3 {
		e := failedCall("one", fmt.Sprint("/s/", i), 1, "down", "")
		tell(e, oddBudget{balance: []float64{float64(i)}})
	}
	want(t, "budgets", len(p.Snapshot().Budgets), 1)
}

// A call that succeeds at once may cost little, as nearly all calls do.
func TestCallThatSucceedsAtOnceAllocatesNothing(t *testing.T) {
	p, _ := told(t)
	b, err := grpcretry.NewConcurrencyBudget(1)
	if err != nil {
		t.Fatal(err)
	}
	e := grpcretry.Event{Kind: grpcretry.CallEnd, Target: "dns:///echo",
		Attempt: grpcretry.Attempt{Method: echoMethod, Number: 1, Start: time.Now()}}
	of := callOf(e)
	of.Budget = b
	if got := testing.AllocsPerRun(1000, func() { p.sources[0].observe(t.Context(), e, of) }); got > 0 {
		t.Errorf("a call that succeeds at once costs the page %v allocations, want none", got)
	}
	want(t, "calls", p.Snapshot().Total.FirstTry, 1001)
}

func BenchmarkFirstAttemptSucceeds(b *testing.B) {
	succeed := func(context.Context, string, any, any, *grpc.ClientConn, ...grpc.CallOption) error { return nil }
	for _, page := range []string{"none", "mounted"} {
		r := retrier(b)
		if page == "mounted" {
			handler(b, r)
		}
		intercept := r.UnaryClientInterceptor()
		call := func() {
			if err := intercept(context.Background(), echoMethod, nil, nil, nil, succeed); err != nil {
				b.Fatal(err)
			}
		}
		b.Run("page="+page, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				call()
			}
		})
		b.Run("cores=all/page="+page, func(b *testing.B) {
			b.ReportAllocs()
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					call()
				}
			})
		})
	}
}

// BenchmarkObserve is the cost of the page alone.
func BenchmarkObserve(b *testing.B) {
	p := handler(b, retrier(b))
	budget, err := grpcretry.NewConcurrencyBudget(1)
	if err != nil {
		b.Fatal(err)
	}
	first := grpcretry.Attempt{Method: echoMethod, Number: 1, Start: time.Now(), Duration: time.Millisecond}
	success := grpcretry.Event{Kind: grpcretry.CallEnd, Target: "dns:///echo", Attempt: first}
	failure := failedCall("dns:///echo", echoMethod, 4, "the database is down", "10.0.0.7:443")
	for _, bench := range []struct {
		name string
		e    grpcretry.Event
	}{
		{"start of an attempt", grpcretry.Event{Kind: grpcretry.AttemptStart, Attempt: first}},
		{"call that succeeds at once", success},
		{"call that gives up", failure},
	} {
		b.Run(bench.name, func(b *testing.B) {
			b.ReportAllocs()
			of := callOf(bench.e)
			of.Budget = budget
			for b.Loop() {
				p.sources[0].observe(context.Background(), bench.e, of)
			}
		})
	}
}
