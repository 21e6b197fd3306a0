package debug

import (
	"context"
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc/codes"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/internal/reasons"
	"github.com/grpcretry/grpcretry/internal/reasons/probe"
)

func TestNumbersForPeople(t *testing.T) {
	for _, tt := range []struct{ got, want string }{
		{length(0), "0 ms"},
		{length(1500), "1.5 µs"},
		{length(999999), "1 ms"},
		{length(time.Millisecond), "1 ms"},
		{length(12345 * time.Microsecond), "12.3 ms"},
		{length(999 * time.Millisecond), "999 ms"},
		{length(999600 * time.Microsecond), "1 s"},
		{length(1234 * time.Millisecond), "1.23 s"},
		{length(59 * time.Second), "59 s"},
		{length(59960 * time.Millisecond), "1 min"},
		{length(125 * time.Second), "2 min 5 s"},
		{length(time.Hour), "1 h"},
		{length(25*time.Hour + 59*time.Minute), "1 day 2 h"},
		{length(72 * time.Hour), "3 days"},
		{length(math.MaxInt64), "106751 days 23 h"},
		{lengthMs(1e300), "53376 days"},
		{count(0), "0"},
		{count(999), "999"},
		{count(1000), "1,000"},
		{count(1234567), "1,234,567"},
		{plural(1, "retry", "retries"), "1 retry"},
		{plural(2000, "retry", "retries"), "2,000 retries"},
		{percent(0), "0 %"},
		{percent(0.0005), "< 0.1 %"},
		{percent(0.001), "0.1 %"},
		{percent(0.0994), "9.9 %"},
		{percent(0.0996), "10 %"},
		{percent(0.5), "50 %"},
		{percent(0.99), "99 %"},
		{percent(0.996), "99.6 %"},
		{percent(0.9999), "> 99.9 %"},
		{percent(1), "100 %"},
		{balance(0), "0"},
		{balance(0.96), "0.9"},
		{balance(9.99), "9.9"},
		{balance(1234.5), "1,234"},
		{balance(1 - 1e-15), "1"}, // five calls of 0.2 each
		{balance(3 * 0.9999999999999999), "3"},
		{balance(0.999999), "0.9"},
		{balance(-3), "-3"},
		{size(-1), "-1 bytes"},
		{size(1500), "1,500 bytes"},
		{size(256 << 10), "256 KiB"},
		{size(1 << 20), "1 MiB"},
		{ago(999 * time.Millisecond), "just now"},
		{ago(61900 * time.Millisecond), "1 min 1 s ago"},
		{width(2), "100.00%"},
		{width(math.NaN()), "0.00%"},
	} {
		if tt.got != tt.want {
			t.Errorf("got %q, want %q", tt.got, tt.want)
		}
	}
}

func TestUsageInWords(t *testing.T) {
	v := &view{}
	v.addUsage([]Retrier{
		{Number: 1, WaitingCalls: 1, OpenStreams: 10_000, ReplayMemory: 1536, ReplayLimit: 64 << 20},
		{Number: 2, WaitingCalls: 100_000, OpenStreams: 1, ReplayMemory: 3 << 30, ReplayLimit: 999, CommittedStreams: 1},
	})
	want := []usageView{
		{1, "1 call waits, 10,000 streams are open, and 1.5 KiB of 64 MiB are kept to replay streams.", ""},
		{2, "100,000 calls wait, 1 stream is open, and 3 GiB of 999 bytes are kept to replay streams.",
			"That was full: 1 stream has committed early."},
	}
	if !slices.Equal(v.Usage, want) {
		t.Errorf("got %+v\nwant %+v", v.Usage, want)
	}
}

func TestPolicyInWords(t *testing.T) {
	throttle, err := grpcretry.NewThrottle(10, 0.1)
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name string
		opts []grpcretry.Option
		want []string
	}{
		{"defaults", nil, []string{
			"up to 4 attempts, retried after RESOURCE_EXHAUSTED or UNAVAILABLE",
			"wait: 100 ms growing by 4 to 5 s, equal jitter",
			"wait after RESOURCE_EXHAUSTED: 1 s doubling to 20 s, full jitter",
			"waits that the server asks for: up to 5 min",
			"calls wait for a target that is failing: up to 10 s",
			"a stream keeps up to 256 KiB for replay",
			"charged to: ratio budget: 20% of answered calls, a reserve of 3, over 10s, for each target",
		}},
		{"everything", []grpcretry.Option{
			grpcretry.WithMaxAttempts(7), grpcretry.WithCodes(codes.Aborted, codes.Canceled),
			grpcretry.WithClassifier(func(context.Context, grpcretry.Attempt) grpcretry.Classification { return grpcretry.Default }),
			grpcretry.WithBackoff(grpcretry.Exponential{Base: time.Second, Max: time.Minute, Multiplier: 1.5, Jitter: grpcretry.NoJitter}),
			grpcretry.WithMaxServerDelay(-1), grpcretry.WithAttemptTimeout(300 * time.Millisecond), grpcretry.WithMaxElapsed(time.Minute),
			grpcretry.WithBufferLimit(0), grpcretry.WithBudget(throttle), grpcretry.WithPatience(0),
			grpcretry.WithUnsentOnly(true),
		}, []string{
			"up to 7 attempts, retried after CANCELLED or ABORTED",
			"a classifier of this program is asked before the codes",
			"wait: 1 s growing by 1.5 to 1 min, no jitter",
			"waits that the server asks for: without a limit",
			"calls do not wait for a target that is failing",
			"an attempt ends after 300 ms, if another one follows",
			"no attempt starts later than 1 min after the call",
			"streams pass through without retries",
			"no retry of what may have run, unless the server asks for it, and no hedging",
			"charged to: throttle: 10 tokens, 0.1 for a success",
		}},
		{"a service config whose backoff shrinks",
			[]grpcretry.Option{grpcretry.WithServiceConfig(`{"methodConfig": [{"name": [{}], "retryPolicy": {
			"maxAttempts": 4, "initialBackoff": "4s", "maxBackoff": "60s",
			"backoffMultiplier": 0.5, "retryableStatusCodes": ["UNAVAILABLE"]}}]}`)}, []string{
				"up to 4 attempts, retried after UNAVAILABLE",
				"wait: 4 s, then 0.5 times the last, at most 1 min, proportional jitter",
				"waits that the server asks for: up to 5 min",
				"calls wait for a target that is failing: up to 16.8 s",
				"a stream keeps up to 256 KiB for replay",
				"charged to: ratio budget: 20% of answered calls, a reserve of 3, over 10s, for each target",
			}},
		{"another backoff", []grpcretry.Option{
			grpcretry.WithBackoff(grpcretry.Decorrelated{}), grpcretry.WithOverloadBackoff(grpcretry.Constant(2 * time.Second)),
			grpcretry.WithBudget(grpcretry.Unlimited), grpcretry.WithBufferLimit(1000),
		}, []string{
			"up to 4 attempts, retried after RESOURCE_EXHAUSTED or UNAVAILABLE",
			"wait: 100 ms to 5 s, decorrelated jitter",
			"wait after RESOURCE_EXHAUSTED: always 2 s",
			"waits that the server asks for: up to 5 min",
			"calls wait for a target that is failing: up to 12 s",
			"a stream keeps up to 1,000 bytes for replay",
			"charged to: no limit",
		}},
		{"hedging",
			[]grpcretry.Option{grpcretry.WithMethod("/s/m", grpcretry.WithPolicy(grpcretry.Policy{MaxAttempts: 3, Hedging: &grpcretry.Hedging{
				Delay: grpcretry.HedgeAfter(50 * time.Millisecond)}}))}, []string{
				"up to 3 attempts, retried after RESOURCE_EXHAUSTED or UNAVAILABLE",
				"wait: 100 ms growing by 4 to 5 s, equal jitter",
				"wait after RESOURCE_EXHAUSTED: 1 s doubling to 20 s, full jitter",
				"waits that the server asks for: up to 5 min",
				"calls wait for a target that is failing: up to 10 s",
				"a stream keeps up to 256 KiB for replay",
				"hedged: while an attempt is slow, the next one after 50ms",
				"hedges are charged to: ratio budget: 10% of answered calls, a reserve of 1, over 1s, for each target",
				"charged to: ratio budget: 20% of answered calls, a reserve of 3, over 10s, for each target",
			}},
		{"a backoff and a budget of the program", []grpcretry.Option{
			grpcretry.WithBackoff(named{}), grpcretry.WithOverloadBackoff(unnamed{}), grpcretry.WithBudget(namedBudget{}),
		}, []string{
			"up to 4 attempts, retried after RESOURCE_EXHAUSTED or UNAVAILABLE",
			"wait: fibonacci",
			"wait after RESOURCE_EXHAUSTED: debug.unnamed",
			"waits that the server asks for: up to 5 min",
			"calls wait for a target that is failing: up to 10 s",
			"a stream keeps up to 256 KiB for replay",
			"charged to: one for the whole fleet",
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r, err := grpcretry.New(tt.opts...)
			if err != nil {
				t.Fatal(err)
			}
			want(t, "Text", strings.Join(describe(r.Policy("/s/m"), "/s/m", false).Text, "\n"), strings.Join(tt.want, "\n"))
		})
	}
}

func TestHedgeDelayInWords(t *testing.T) {
	measured := grpcretry.HedgeAtQuantile(0.5, 0, 0)
	for range 100 {
		measured.Answered("/s/known", 40*time.Millisecond, false, time.Now())
	}
	for _, tt := range []struct {
		delay  grpcretry.HedgeDelay
		method string
		want   string
	}{
		{grpcretry.HedgeAfter(time.Second), "/s/m", "after 1s"},
		{measured, "/s/known", "after a measured time, now 4"}, // 40 ms, or up to 5 % more
		{measured, "/s/unknown", "after a measured time, not known yet"},
		{ownDelay{measured}, "/s/known", "after a time by debug.ownDelay"},
		{namedDelay{ownDelay{measured}}, "/s/known", "after the moon has risen"},
	} {
		if got := describeDelay(tt.delay, tt.method); !strings.HasPrefix(got, tt.want) {
			t.Errorf("describeDelay(%T, %s) = %q, want %q", tt.delay, tt.method, got, tt.want)
		}
	}
}

type ownDelay struct{ grpcretry.HedgeDelay }

func (ownDelay) Delay(string, time.Time) (time.Duration, bool) { panic("asked, but not for a call") }

type namedDelay struct{ ownDelay }

func (namedDelay) String() string { return "after the moon has risen" }

type unnamed struct{}

func (unnamed) Delay(int, time.Duration, float64) time.Duration { return 0 }

type named struct{ unnamed }

func (named) String() string { return "fibonacci" }

type namedBudget struct{ empty }

func (namedBudget) String() string { return "one for the whole fleet" }

func TestPolicyAsJSON(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := retrier(t, grpcretry.WithMethod(echoMethod, grpcretry.WithMaxAttempts(9), grpcretry.WithAttemptTimeout(time.Minute)))
		c := dial(t, r, "passthrough:///echo")
		p := handler(t, r)
		c.echo("ok")
		got := *getJSON(t, p, "").Methods[0].Policy
		got.Text = nil
		want(t, "Policy", got, Policy{
			MaxAttempts: 9, Codes: []string{"RESOURCE_EXHAUSTED", "UNAVAILABLE"},
			Backoff: "1 s doubling to 1 h, no jitter", OverloadBackoff: "1 s doubling to 1 h, no jitter",
			AttemptTimeoutMs: 60000, MaxServerDelayMs: 300000, PatienceMs: 510000, BufferLimitBytes: 262144,
		})
	})
}

// Every budget of grpcretry has words, and every reason and code a count.
func TestNothingOfGrpcretryIsUnknown(t *testing.T) {
	ratio, err1 := grpcretry.NewRatioBudget(grpcretry.RatioBudget{})
	throttle, err2 := grpcretry.NewThrottle(10, 1)
	concurrency, err3 := grpcretry.NewConcurrencyBudget(1)
	if err := errors.Join(err1, err2, err3); err != nil {
		t.Fatal(err)
	}
	for _, b := range []grpcretry.Budget{ratio, throttle, concurrency, grpcretry.NewRateBudget(rate.NewLimiter(1, 1)),
		grpcretry.AllBudgets(ratio, throttle), grpcretry.PerTarget(func() grpcretry.Budget { return ratio }), grpcretry.Unlimited} {
		if kind := kindOf(b); strings.Contains(kind, "grpcretry.") {
			t.Errorf("kindOf(%T) = %q, want words", b, kind)
		}
	}
	if !slices.Contains(outcomes, "probe") || len(outcomes) > mostOutcomes {
		t.Errorf("%d outcomes with counters: %v, want probe among at most %d", len(outcomes), outcomes, mostOutcomes)
	}
	for _, reason := range []error{grpcretry.ErrTargetDown, probe.Err, context.DeadlineExceeded, context.Canceled} {
		e := grpcretry.Event{Err: reason, Reason: reason, Attempt: grpcretry.Attempt{Number: 1, Err: reason}}
		name := outcomes[outcomeCounter(&e)-firstOutcome]
		want := reasons.Of(reason).Word
		if name != want || stopWords[name].long == "" || stopWords[name].short == "" {
			t.Errorf("%v is counted as %q, want %q, and words for it", reason, name, want)
		}
	}
	if e := (grpcretry.Event{Err: probe.Err, Reason: probe.Err}); !worthKeeping(&e, 1) {
		t.Error("a call that ended for a new reason is not kept")
	}
	for source := grpcretry.WaitSource(0); !strings.HasPrefix(source.String(), "WaitSource("); source++ {
		_, counted := waitCounter(source)
		if between := source != 0 && source.String() != hedgeDelay && source.String() != "non_fatal"; counted != between {
			t.Errorf("a wait by %v is counted: %v, want %v", source, counted, between)
		}
	}
	for code := codes.OK; code <= codes.Unauthenticated; code++ {
		plain := strings.ToLower(strings.ReplaceAll(codeName(uint32(code)), "_", ""))
		if want := strings.ToLower(code.String()); plain != want && !(code == codes.Canceled && plain == "cancelled") {
			t.Errorf("codeName(%d) = %q, want %v", code, codeName(uint32(code)), code)
		}
	}
	want(t, "codes that a server makes up", codeName(17)+codeName(math.MaxUint32), "OTHEROTHER")
}

func TestTimelines(t *testing.T) {
	for _, tt := range []struct {
		name string
		call Call
		want string
	}{
		{"retries", Call{ElapsedMs: 100, Attempts: []Attempt{
			{Number: 1, DurationMs: 10, Decision: retry},
			{Number: 2, StartMs: 30, DurationMs: 20, Decision: retry, WaitSource: "backoff"},
			{Number: 3, StartMs: 90, DurationMs: 10, Decision: success, WaitSource: "pushback"},
		}}, "14 high: bad 0.00%–10.00% at 7, bad 30.00%–50.00% at 7, good 90.00%–100.00% at 7; " +
			"backoff 10.00%–30.00% at 7, pushback 50.00%–90.00% at 7"},
		{"hedges overlap", Call{ElapsedMs: 100, Attempts: []Attempt{
			{Number: 1, DurationMs: 100, Decision: beaten},
			{Number: 3, Hedge: true, StartMs: 50, DurationMs: 25, Decision: success},
			{Number: 2, Hedge: true, StartMs: 25, DurationMs: 25, Decision: retry},
		}}, "28 high: beaten 0.00%–100.00% at 7, bad 25.00%–50.00% at 21, good 50.00%–75.00% at 21; "},
		{"the caller goes away in a wait", Call{ElapsedMs: 100, Attempts: []Attempt{
			{Number: 1, DurationMs: 25, Decision: stop},
		}}, "14 high: bad 0.00%–25.00% at 7; none 25.00%–100.00% at 7"},
		{"a wait for a connection", Call{ElapsedMs: 100, Attempts: []Attempt{
			{Number: 1, Decision: retry},
			{Number: 2, StartMs: 90, DurationMs: 10, Decision: success, WaitMs: 90, WaitSource: "connect"},
		}}, "14 high: bad 0.00%–0.00% at 7, good 90.00%–100.00% at 7; connect 0.00%–90.00% at 7"},
		{"no connection", Call{ElapsedMs: 100, Outcome: "target_down", Attempts: []Attempt{
			{Number: 1, DurationMs: 10, Decision: stop, Reason: "target_down"},
		}}, "14 high: bad 0.00%–10.00% at 7; connect 10.00%–100.00% at 7"},
		{"no time at all", Call{Attempts: []Attempt{{Number: 1, Decision: stop}}}, "14 high: bad 0.00%–0.00% at 7; "},
		{"attempts end after the call", Call{ElapsedMs: 10, Attempts: []Attempt{{Number: 1, DurationMs: 40, Decision: stop}}},
			"14 high: bad 0.00%–100.00% at 7; "},
	} {
		t.Run(tt.name, func(t *testing.T) {
			line := newTimeline(&tt.call, scaleOf([]Call{tt.call}))
			strokes := func(all []stroke) string {
				var s []string
				for _, one := range all {
					s = append(s, fmt.Sprintf("%s %s–%s at %d", one.Class, one.From, one.To, one.Y))
				}
				return strings.Join(s, ", ")
			}
			want(t, "timeline", fmt.Sprintf("%d high: %s; %s", line.Height, strokes(line.Tries), strokes(line.Waits)), tt.want)
		})
	}
}

func TestChartOfABudget(t *testing.T) {
	level := func(secondsAgo, n float64) Level { return Level{secondsAgo, &n} }
	for _, tt := range []struct {
		name   string
		levels []Level
		want   string
	}{
		{"nothing", nil, " [] [] "},
		{"no number", []Level{{SecondsAgo: 1}}, " [] [] "},
		{"one look", []Level{level(0, 10)}, "10 [M300.0,0.0L300.0,0.0] [] M300.0,60.0L300.0,0.0L300.0,60.0Z"},
		{"looks nearby", []Level{level(2, 20), level(1, 10), level(0, 0)},
			"20 [M298.0,0.0L298.0,0.0L299.0,30.0L300.0,60.0] [] M298.0,60.0L298.0,0.0L299.0,30.0L300.0,60.0L300.0,60.0Z"},
		{"a gap", []Level{level(101, 1), level(100, 1), level(1, 1), level(0, 1)},
			"1 [M199.0,0.0L199.0,0.0L200.0,0.0 M299.0,0.0L300.0,0.0] [M200.0,0.0L299.0,0.0] " +
				"M199.0,60.0L199.0,0.0L200.0,0.0L299.0,0.0L300.0,0.0L300.0,60.0Z"},
		{"below zero", []Level{level(0, -5)}, "1 [M300.0,60.0L300.0,60.0] [] M300.0,60.0L300.0,60.0L300.0,60.0Z"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var c chart
			c.draw(tt.levels)
			want(t, "chart", fmt.Sprint(c.Top, " ", c.Solid, " ", c.Dashed, " ", c.Area), tt.want)
		})
	}
}

func TestAnswers(t *testing.T) {
	names := func(n ...any) map[string]int64 {
		m := map[string]int64{}
		for i := 0; i < len(n); i += 2 {
			m[n[i].(string)] = int64(n[i+1].(int))
		}
		return m
	}
	for _, tt := range []struct {
		name   string
		counts Counts
		want   []string // short, tone and line of each
	}{
		{"nothing", Counts{}, []string{
			"No calls quiet no calls", "– quiet no failed attempts", "– quiet no retry has ended", "– quiet no call failed"}},
		{"all is well", Counts{Calls: 3, FirstTry: 3, Attempts: 3}, []string{
			"No good 3 calls, no retries", "No failures good no failed attempts", "Not needed good no retry has ended",
			"Nothing good no call failed"}},
		{"only what is not retried",
			Counts{Calls: 3, FirstTry: 2, Attempts: 3, Failed: names("NOT_FOUND", 1), Stopped: names("not_retryable", 1)}, []string{
				"No good 3 calls, no retries", "NOT_FOUND warn 1 failed attempt", "– quiet no retry has ended",
				"Not retryable quiet 1 of 3 calls failed"}},
		{"retries help", Counts{Calls: 10, Rescued: 9, Wasted: 1, FailedRetried: 1, Attempts: 20, Retries: 10, RetryShare: 0.5,
			Failed:  names("UNAVAILABLE", 8, "ABORTED", 3),
			Stopped: names("exhausted", 1)}, []string{
			"Yes warn 10 retries in 20 attempts, 50 %", "UNAVAILABLE warn 11 failed attempts", "90 % good 9 of 10 retries succeeded",
			"Exhausted bad 1 of 10 calls failed"}},
		{"retries do not help", Counts{Calls: 100, Rescued: 1, Wasted: 29, FailedRetried: 9, Attempts: 130, Retries: 30, RetryShare: 30.0 / 130,
			Failed:  names("UNAVAILABLE", 129),
			Stopped: names("not_retryable", 70, "budget", 9)}, []string{
			"Yes warn 30 retries in 130 attempts, 23 %", "UNAVAILABLE warn 129 failed attempts", "3.3 % bad 1 of 30 retries succeeded",
			"Budget bad 79 of 100 calls failed"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for i, a := range answers(&Snapshot{Recent: tt.counts}, false) {
				want(t, a.Question, a.Short+" "+a.Tone+" "+a.Line, tt.want[i])
			}
		})
	}
}

func TestLastSaidIsOfTheWindow(t *testing.T) {
	now := time.Now()
	s := &Snapshot{Now: now, Calls: []Call{
		{Ended: now.Add(-6 * time.Minute), Attempts: []Attempt{{Message: "down", Peer: "10.0.0.7:443"}, {Code: "OK"}}},
	}}
	if got := lastSaid(s, false); got != nil {
		t.Errorf("lastSaid in five minutes = %+v, want nil", got)
	}
	want(t, "lastSaid ever", *lastSaid(s, true), said{"down", "10.0.0.7:443", "6 min ago"})
}

// What this library says of an attempt is not what a server has said.
func TestOurOwnWordsAreNotQuotedAsTheServers(t *testing.T) {
	for _, tt := range []struct {
		name    string
		message string
		opts    []grpcretry.Option
		want    string // said, and by whom
	}{
		{"a hedge lost", "hang ok", []grpcretry.Option{unlimited,
			grpcretry.WithMethod(echoMethod,
				grpcretry.WithPolicy(grpcretry.Policy{MaxAttempts: 2,
					Hedging: &grpcretry.Hedging{Delay: grpcretry.HedgeAfter(time.Second), Budget: grpcretry.Unlimited}}))}, ""},
		{"an attempt timeout", "hang ok", []grpcretry.Option{grpcretry.WithAttemptTimeout(time.Second)}, ""},
		{"before the words of the server", "down hang ok", []grpcretry.Option{grpcretry.WithAttemptTimeout(time.Second)},
			"db-down by 10.0.0.7:443"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				r := retrier(t, tt.opts...)
				page := handler(t, r)
				c := dialFrom(t, r, "passthrough:///echo", "10.0.0.7:443")
				want(t, "code", c.echo(tt.message), codes.OK)
				s := page.Snapshot()
				if len(s.Calls) != 1 {
					t.Fatalf("%d calls are kept, want 1", len(s.Calls))
				}
				got := ""
				if last := lastSaid(&s, true); last != nil {
					got = last.Words + " by " + last.Peer
				}
				want(t, "last said", got, tt.want)
			})
		})
	}
}

// A field that a later feature adds to a Policy is not forgotten here.
func TestEveryFieldOfAPolicyIsDescribed(t *testing.T) {
	base := grpcretry.Policy{MaxAttempts: 2, Backoff: grpcretry.Constant(1), OverloadBackoff: grpcretry.Constant(1)}
	samples := []any{7, 7 * time.Second, true, []codes.Code{codes.Aborted}, grpcretry.Constant(2), grpcretry.Unlimited,
		&grpcretry.Hedging{Delay: grpcretry.HedgeAfter(1), Budget: grpcretry.Unlimited},
		func(context.Context, grpcretry.Attempt) grpcretry.Classification { return grpcretry.Stop }}
	described := func(p grpcretry.Policy) string { return fmt.Sprintf("%+v", *describe(p, "/pkg.Service/Method", false)) }
	for _, field := range reflect.VisibleFields(reflect.TypeFor[grpcretry.Policy]()) {
		if !field.IsExported() {
			continue
		}
		i := slices.IndexFunc(samples, func(v any) bool { return reflect.TypeOf(v).AssignableTo(field.Type) })
		if i < 0 {
			t.Fatalf("there is no sample for the type of %s", field.Name)
		}
		changed := base
		reflect.ValueOf(&changed).Elem().FieldByIndex(field.Index).Set(reflect.ValueOf(samples[i]))
		if described(changed) == described(base) {
			t.Errorf("%s is not described", field.Name)
		}
	}
}
