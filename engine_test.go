package grpcretry

import (
	"context"
	"errors"
	"math"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"
)

// noon is a time for tests that need one; the engine has no clock of its own.
var noon = time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)

// aBudget says what it is told to and remembers what it heard.
type aBudget struct {
	mu       sync.Mutex
	refuse   bool
	heard    []Outcome
	asked    []time.Time
	refunded int
}

func (b *aBudget) Deposit(o Outcome) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.heard = append(b.heard, o)
}

func (b *aBudget) Withdraw(now time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.asked = append(b.asked, now)
	return !b.refuse
}

func (b *aBudget) Refund() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.refunded++
}

func (b *aBudget) Balance(now time.Time) float64 { return 1 }

func policyOf(t testing.TB, opts ...Option) *policy {
	t.Helper()
	r, err := New(opts...)
	if err != nil {
		t.Fatal(err)
	}
	return r.policies.all.policy
}

func failureOf(number int, code codes.Code, details ...protoadapt.MessageV1) Failure {
	return Failure{Attempt: Attempt{Number: number, Err: fail(code, "x", details...).err}}
}

func (f Failure) saying(pushback ...string) Failure {
	f.Attempt.Trailer = metadata.MD{pushbackKey: pushback}
	return f
}

func (f Failure) with(change func(*Failure)) Failure { change(&f); return f }

func TestEngine(t *testing.T) {
	var (
		canceled  = func(f *Failure) { f.CtxErr = context.Canceled }
		closed    = func(f *Failure) { f.Closed = true }
		committed = func(f *Failure) { f.Committed = true }
		timedOut  = func(f *Failure) { f.TimedOut = true }
		sizeError = func(f *Failure) {
			f.Attempt.Err = status.Error(codes.ResourceExhausted, "grpc: received message larger than max (5 vs. 4)")
		}
		retries = func(context.Context, Attempt) Classification { return Retry }
		stops   = func(context.Context, Attempt) Classification { return Stop }
		leaves  = func(context.Context, Attempt) Classification { return Default }
		exact   = WithBackoff(Exponential{Jitter: NoJitter}) // 100 ms, 200 ms, … 5 s
	)
	deadlineIn := func(d time.Duration) History { return History{Start: noon, Deadline: noon.Add(d)} }
	stop := func(reason error, result Result) Verdict { return Verdict{Reason: reason, result: result} }
	again := func(wait time.Duration, source WaitSource) Verdict {
		return Verdict{Retry: true, Wait: wait, WaitSource: source, result: Failed}
	}

	// One row for each rule and each rule that it must come before. u is 0.5.
	for _, tt := range []struct {
		name    string
		opts    []Option
		history History
		failure Failure
		refuse  bool
		want    Verdict
	}{
		// 1. the caller's context, or the connection, has ended
		{name: "context ended", failure: failureOf(1, codes.Canceled).with(canceled), want: stop(context.Canceled, Ignored)},
		{name: "context ended, CANCELED in the code set", opts: []Option{WithCodes(codes.Canceled)},
			failure: failureOf(1, codes.Canceled).with(canceled), want: stop(context.Canceled, Ignored)},
		{name: "context ended, classifier says retry", opts: []Option{WithClassifier(retries)},
			failure: failureOf(1, codes.DeadlineExceeded).with(canceled), want: stop(context.Canceled, Ignored)},
		{name: "context ended while the server failed", failure: failureOf(1, codes.Unavailable).with(canceled),
			want: stop(context.Canceled, Failed)},
		{name: "context ended, before a server's stop", failure: failureOf(1, codes.Unavailable).saying("-1").with(canceled),
			want: stop(context.Canceled, Failed)},
		{name: "connection closed", failure: failureOf(1, codes.Unavailable).with(closed), want: stop(ErrConnClosed, Ignored)},
		{name: "connection closed, classifier says retry", opts: []Option{WithClassifier(retries)},
			failure: failureOf(1, codes.Canceled).with(closed), want: stop(ErrConnClosed, Ignored)},

		// 2. committed
		{name: "committed", failure: failureOf(1, codes.Unavailable).with(committed), want: stop(ErrCommitted, Failed)},
		{name: "committed, not retryable", failure: failureOf(1, codes.NotFound).with(committed), want: stop(ErrCommitted, Ignored)},
		{name: "committed, before a server's stop", failure: failureOf(1, codes.Unavailable).saying("-1").with(committed),
			want: stop(ErrCommitted, Failed)},

		// 3. the server said to stop
		{name: "pushback stop", failure: failureOf(1, codes.Unavailable).saying("-1"), want: stop(ErrPushback, Failed)},
		{name: "pushback malformed", failure: failureOf(1, codes.Unavailable).saying("1.5"), want: stop(ErrPushback, Failed)},
		{name: "pushback repeated", failure: failureOf(1, codes.Unavailable).saying("5", "5"), want: stop(ErrPushback, Failed)},
		{name: "pushback stop of a code that is not retryable", failure: failureOf(1, codes.NotFound).saying("-1"),
			want: stop(ErrPushback, Failed)},
		{name: "pushback stop, classifier says retry", opts: []Option{WithClassifier(retries)},
			failure: failureOf(1, codes.Unavailable).saying("-1"), want: stop(ErrPushback, Failed)},
		{name: "pushback stop, RetryInfo says wait", failure: failureOf(1, codes.Unavailable, retryInfoOf(time.Second)).saying("-1"),
			want: stop(ErrPushback, Failed)},

		// 4. classifier, else codes
		{name: "code not in the set", failure: failureOf(1, codes.Internal), want: stop(ErrNotRetryable, Ignored)},
		{name: "code in the set", opts: []Option{exact}, failure: failureOf(1, codes.Unavailable),
			want: again(100*time.Millisecond, WaitBackoff)},
		{name: "own code set", opts: []Option{exact, WithCodes(codes.Internal)}, failure: failureOf(1, codes.Internal),
			want: again(100*time.Millisecond, WaitBackoff)},
		{name: "own code set replaces the default", opts: []Option{WithCodes(codes.Internal)}, failure: failureOf(1, codes.Unavailable),
			want: stop(ErrNotRetryable, Ignored)},
		{name: "size error", failure: failureOf(1, codes.ResourceExhausted).with(sizeError), want: stop(ErrNotRetryable, Ignored)},
		{name: "size error, classifier says retry", opts: []Option{exact, WithClassifier(retries)},
			failure: failureOf(1, codes.ResourceExhausted).with(sizeError), want: again(100*time.Millisecond, WaitBackoff)},
		{name: "classifier says retry", opts: []Option{exact, WithClassifier(retries)}, failure: failureOf(1, codes.NotFound),
			want: again(100*time.Millisecond, WaitBackoff)},
		{name: "classifier says stop", opts: []Option{WithClassifier(stops)}, failure: failureOf(1, codes.Unavailable),
			want: stop(ErrNotRetryable, Ignored)},
		{name: "classifier leaves it to the codes", opts: []Option{exact, WithClassifier(leaves)}, failure: failureOf(1, codes.Unavailable),
			want: again(100*time.Millisecond, WaitBackoff)},
		{name: "attempt timeout", opts: []Option{exact}, failure: failureOf(1, codes.DeadlineExceeded).with(timedOut),
			want: again(100*time.Millisecond, WaitBackoff)},
		{name: "attempt timeout, classifier says stop", opts: []Option{WithClassifier(stops)},
			failure: failureOf(1, codes.DeadlineExceeded).with(timedOut), want: stop(ErrNotRetryable, Ignored)},
		{name: "a server's DEADLINE_EXCEEDED", failure: failureOf(1, codes.DeadlineExceeded), want: stop(ErrNotRetryable, Ignored)},
		{name: "a server's CANCELLED in the set", opts: []Option{exact, WithCodes(codes.Canceled)}, failure: failureOf(1, codes.Canceled),
			want: again(100*time.Millisecond, WaitBackoff)},
		{name: "pushback does not make a code retryable", failure: failureOf(1, codes.NotFound).saying("5"),
			want: stop(ErrNotRetryable, Ignored)},
		{name: "RetryInfo does not make a code retryable", failure: failureOf(1, codes.NotFound, retryInfoOf(time.Second)),
			want: stop(ErrNotRetryable, Ignored)},
		{name: "no gRPC status at all", failure: Failure{Attempt: Attempt{Number: 1, Err: errors.New("x")}},
			want: stop(ErrNotRetryable, Ignored)},

		// 5. attempts
		{name: "last attempt but one", opts: []Option{exact}, failure: failureOf(3, codes.Unavailable),
			want: again(100*time.Millisecond, WaitBackoff)},
		{name: "last attempt", failure: failureOf(4, codes.Unavailable), want: stop(ErrAttemptsExhausted, Failed)},
		{name: "last attempt, pushback says wait", failure: failureOf(4, codes.Unavailable).saying("5"),
			want: stop(ErrAttemptsExhausted, Failed)},
		{name: "last attempt and a wait too long", history: deadlineIn(time.Nanosecond), failure: failureOf(4, codes.Unavailable),
			want: stop(ErrAttemptsExhausted, Failed)},

		// 6. the wait
		{name: "second backoff", opts: []Option{exact}, history: History{Start: noon, Retry: 1}, failure: failureOf(2, codes.Unavailable),
			want: again(200*time.Millisecond, WaitBackoff)},
		{name: "default backoff has full jitter", failure: failureOf(1, codes.Unavailable), want: again(50*time.Millisecond, WaitBackoff)},
		{name: "overload has a longer backoff", failure: failureOf(1, codes.ResourceExhausted), want: again(500*time.Millisecond, WaitBackoff)},
		{name: "WithBackoff covers overload", opts: []Option{exact}, failure: failureOf(1, codes.ResourceExhausted),
			want: again(100*time.Millisecond, WaitBackoff)},
		{name: "WithOverloadBackoff", opts: []Option{exact, WithOverloadBackoff(Constant(7))}, failure: failureOf(1, codes.ResourceExhausted),
			want: again(7, WaitBackoff)},
		{name: "the retry number is the call's, also when the code changes", history: History{Start: noon, Retry: 2},
			opts:    []Option{exact, WithOverloadBackoff(Exponential{Base: time.Second, Max: time.Minute, Jitter: NoJitter})},
			failure: failureOf(3, codes.ResourceExhausted), want: again(4*time.Second, WaitBackoff)},
		{name: "the wait before is the call's", history: History{Start: noon, Retry: 1, Prev: time.Second},
			opts:    []Option{WithBackoff(Decorrelated{})}, // 0.1 s + 0.5 × (3 s − 0.1 s)
			failure: failureOf(2, codes.Unavailable), want: again(1550*time.Millisecond, WaitBackoff)},
		{name: "a backoff below zero", opts: []Option{WithBackoff(negative{})}, failure: failureOf(1, codes.Unavailable),
			want: again(0, WaitBackoff)},
		{name: "pushback is exact", failure: failureOf(1, codes.Unavailable).saying("7001"), want: again(7001*time.Millisecond, WaitPushback)},
		{name: "pushback of zero", failure: failureOf(1, codes.Unavailable).saying("0"), want: again(0, WaitPushback)},
		{name: "RetryInfo with jitter on top", failure: failureOf(1, codes.Unavailable, retryInfoOf(10*time.Second)),
			want: again(11*time.Second, WaitRetryInfo)},
		{name: "RetryInfo of zero says nothing", opts: []Option{exact}, failure: failureOf(1, codes.Unavailable, retryInfoOf(0)),
			want: again(100*time.Millisecond, WaitBackoff)},
		{name: "negative RetryInfo says nothing", opts: []Option{exact}, failure: failureOf(1, codes.Unavailable, retryInfoOf(-1)),
			want: again(100*time.Millisecond, WaitBackoff)},
		{name: "pushback wins over RetryInfo", failure: failureOf(1, codes.Unavailable, retryInfoOf(10*time.Second)).saying("5"),
			want: again(5*time.Millisecond, WaitPushback)},
		{name: "pushback of five minutes", failure: failureOf(1, codes.Unavailable).saying("300000"), want: again(5*time.Minute, WaitPushback)},
		{name: "pushback over five minutes", failure: failureOf(1, codes.Unavailable).saying("300001"),
			want: Verdict{Reason: ErrPushback, result: Failed, Wait: 300001 * time.Millisecond, WaitSource: WaitPushback}},
		{name: "RetryInfo over five minutes", failure: failureOf(1, codes.Unavailable, retryInfoOf(5*time.Minute+1)),
			want: Verdict{Reason: ErrPushback, result: Failed, Wait: 5*time.Minute + 1, WaitSource: WaitRetryInfo}},
		{name: "pushback over MaxServerDelay", opts: []Option{WithMaxServerDelay(time.Second)},
			failure: failureOf(1, codes.Unavailable).saying("1001"), want: Verdict{Reason: ErrPushback, result: Failed, Wait: 1001 * time.Millisecond, WaitSource: WaitPushback}},
		{name: "no MaxServerDelay", opts: []Option{WithMaxServerDelay(-1)}, failure: failureOf(1, codes.Unavailable).saying("2147483647"),
			want: again(math.MaxInt32*time.Millisecond, WaitPushback)},
		{name: "RetryInfo of centuries", opts: []Option{WithMaxServerDelay(-1)},
			failure: failureOf(1, codes.Unavailable, retryInfoOf(math.MaxInt64)), want: again(math.MaxInt64, WaitRetryInfo)},

		// 7. deadline and MaxElapsed
		{name: "wait ends before the deadline", opts: []Option{exact}, history: deadlineIn(100*time.Millisecond + 1),
			failure: failureOf(1, codes.Unavailable), want: again(100*time.Millisecond, WaitBackoff)},
		{name: "wait ends at the deadline", opts: []Option{exact}, history: deadlineIn(100 * time.Millisecond),
			failure: failureOf(1, codes.Unavailable),
			want:    Verdict{Reason: ErrDeadline, result: Failed, Wait: 100 * time.Millisecond, WaitSource: WaitBackoff}},
		{name: "pushback beyond the deadline", history: deadlineIn(time.Second), failure: failureOf(1, codes.Unavailable).saying("2000"),
			want: Verdict{Reason: ErrDeadline, result: Failed, Wait: 2 * time.Second, WaitSource: WaitPushback}},
		{name: "wait ends before MaxElapsed", opts: []Option{exact, WithMaxElapsed(time.Second)},
			history: History{Start: noon.Add(-900*time.Millisecond + 1)}, failure: failureOf(1, codes.Unavailable),
			want: again(100*time.Millisecond, WaitBackoff)},
		{name: "wait ends at MaxElapsed", opts: []Option{exact, WithMaxElapsed(time.Second)},
			history: History{Start: noon.Add(-900 * time.Millisecond)}, failure: failureOf(1, codes.Unavailable),
			want: Verdict{Reason: ErrMaxElapsed, result: Failed, Wait: 100 * time.Millisecond, WaitSource: WaitBackoff}},
		{name: "pushback beyond MaxElapsed", opts: []Option{WithMaxElapsed(time.Second)}, history: History{Start: noon},
			failure: failureOf(1, codes.Unavailable).saying("1000"),
			want:    Verdict{Reason: ErrMaxElapsed, result: Failed, Wait: time.Second, WaitSource: WaitPushback}},
		{name: "deadline, before the budget", opts: []Option{exact}, history: deadlineIn(1), refuse: true,
			failure: failureOf(1, codes.Unavailable),
			want:    Verdict{Reason: ErrDeadline, result: Failed, Wait: 100 * time.Millisecond, WaitSource: WaitBackoff}},

		// 8. the budget
		{name: "budget refuses", opts: []Option{exact}, refuse: true, failure: failureOf(1, codes.Unavailable),
			want: Verdict{Reason: ErrBudgetExhausted, result: Failed, Wait: 100 * time.Millisecond, WaitSource: WaitBackoff}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			budget := &aBudget{refuse: tt.refuse}
			if tt.history.Start.IsZero() {
				tt.history.Start = noon
			}
			before := tt.history
			got := policyOf(t, tt.opts...).judge(t.Context(), budget, &tt.history, &tt.failure, noon, 0.5)
			got.untouched, got.Fatal = false, false // matters of the error and of hedging, tested with the interceptors
			if got != tt.want {
				t.Errorf("judge = %+v, want %+v", got, tt.want)
			}
			if tt.history != before {
				t.Errorf("judge changed the history to %+v", tt.history)
			}
			if want := (Outcome{Attempt: tt.failure.Attempt.Number, Result: tt.want.result}); len(budget.heard) != 1 || budget.heard[0] != want {
				t.Errorf("budget heard %v, want %v once", budget.heard, want)
			}
			if asked := tt.want.Retry || tt.want.Reason == ErrBudgetExhausted; asked != (len(budget.asked) == 1) {
				t.Errorf("budget was asked at %v, want asked: %v", budget.asked, asked)
			}
		})
	}
}

func TestEngineOfAPolicy(t *testing.T) {
	e, err := NewEngine(Policy{MaxAttempts: 7})
	if err != nil {
		t.Fatal(err)
	}
	p := e.Policy()
	if p.MaxAttempts != 7 || p.Backoff != (Exponential{Base: 100 * time.Millisecond, Max: 5 * time.Second, Multiplier: 2}) || p.Budget == nil {
		t.Errorf("policy is %+v, want 7 attempts and else the defaults", p)
	}
	f := failureOf(1, codes.Unavailable)
	v := e.Judge(t.Context(), p.Budget, &History{Start: noon}, &f, noon, 0.5)
	if !v.Retry || v.Wait != 50*time.Millisecond || v.WaitSource != WaitBackoff {
		t.Errorf("Judge = %+v, want a retry after 50ms of backoff", v)
	}
	_, err = NewEngine(Policy{MaxElapsed: -time.Second})
	if want := "grpcretry: NewEngine: MaxElapsed: -1s is negative"; err == nil || err.Error() != want {
		t.Errorf("NewEngine = %v, want %s", err, want)
	}
}

// What hedging changes in the engine: how many attempts, after which codes, and no wait.
func TestEngineOfAHedgedCall(t *testing.T) {
	hedging := &Hedging{MaxAttempts: 3, Delay: HedgeAfter(time.Second), NonFatalCodes: []codes.Code{codes.Internal}}
	e, err := NewEngine(Policy{MaxAttempts: 9, MaxElapsed: time.Minute, Hedging: hedging})
	if err != nil {
		t.Fatal(err)
	}
	internal, unavailable := failureOf(1, codes.Internal), failureOf(1, codes.Unavailable)
	late := failureOf(1, codes.Internal)
	late.Made = 3
	for _, tt := range []struct {
		name    string
		history History
		failure Failure
		want    Verdict
	}{
		{"non-fatal", History{Start: noon}, internal, Verdict{Retry: true, WaitSource: WaitNonFatal, result: Failed}},
		{"fatal", History{Start: noon}, unavailable, Verdict{Reason: ErrNotRetryable, result: Ignored, Fatal: true, untouched: true}},
		{"fatal, and the server says stop", History{Start: noon}, failureOf(1, codes.Unavailable).saying("-1"),
			Verdict{Reason: ErrPushback, result: Failed, Fatal: true, untouched: true}},
		{"the server says stop", History{Start: noon}, failureOf(1, codes.Internal).saying("-1"),
			Verdict{Reason: ErrPushback, result: Failed}},
		{"pushback", History{Start: noon}, failureOf(1, codes.Internal).saying("7"),
			Verdict{Retry: true, Wait: 7 * time.Millisecond, WaitSource: WaitPushback, result: Failed}},
		{"the connection is closed", History{Start: noon}, internal.with(func(f *Failure) { f.Closed = true }),
			Verdict{Reason: ErrConnClosed, result: Ignored, Fatal: true, untouched: true}},
		{"the caller is gone", History{Start: noon}, internal.with(func(f *Failure) { f.CtxErr = context.Canceled }),
			Verdict{Reason: context.Canceled, result: Failed, Fatal: true}},
		{"the caller and the connection are gone", History{Start: noon},
			internal.with(func(f *Failure) { f.CtxErr, f.Closed = context.Canceled, true }),
			Verdict{Reason: context.Canceled, result: Ignored, Fatal: true}},
		{"committed", History{Start: noon}, internal.with(func(f *Failure) { f.Committed = true }),
			Verdict{Reason: ErrCommitted, result: Failed, Fatal: true}},
		{"all are sent", History{Start: noon}, late, Verdict{Reason: ErrAttemptsExhausted, result: Failed}},
		{"stopped before", History{Start: noon, Stopped: ErrPushback}, internal, Verdict{Reason: ErrPushback, result: Failed}},
		{"stopped before, and fatal", History{Start: noon, Stopped: ErrPushback}, unavailable,
			Verdict{Reason: ErrNotRetryable, result: Ignored, Fatal: true, untouched: true}},
	} {
		if tt.want.Retry { // also without a token, where it is paid for
			paid := tt.history
			paid.Paid = true
			if got := e.Judge(t.Context(), &aBudget{refuse: true}, &paid, &tt.failure, noon, 0.5); got != tt.want {
				t.Errorf("%s, paid for: Judge = %+v, want %+v", tt.name, got, tt.want)
			}
		}
		if got := e.Judge(t.Context(), &aBudget{}, &tt.history, &tt.failure, noon, 0.5); got != tt.want {
			t.Errorf("%s: Judge = %+v, want %+v", tt.name, got, tt.want)
		}
	}
	for _, tt := range []struct {
		name    string
		history History
		made    int
		refuse  bool
		want    Verdict
	}{
		{"due", History{Start: noon}, 2, false, Verdict{Retry: true, WaitSource: WaitHedgeDelay}},
		{"all are sent", History{Start: noon}, 3, false, Verdict{Reason: ErrAttemptsExhausted, WaitSource: WaitHedgeDelay}},
		{"deadline", History{Start: noon, Deadline: noon}, 1, false, Verdict{Reason: ErrDeadline, WaitSource: WaitHedgeDelay}},
		{"MaxElapsed", History{Start: noon.Add(-time.Minute)}, 1, false, Verdict{Reason: ErrMaxElapsed, WaitSource: WaitHedgeDelay}},
		{"budget", History{Start: noon}, 1, true, Verdict{Reason: ErrBudgetExhausted, WaitSource: WaitHedgeDelay}},
	} {
		b := &aBudget{refuse: tt.refuse}
		if got := e.Due(b, &tt.history, tt.made, noon); got != tt.want {
			t.Errorf("%s: Due = %+v, want %+v", tt.name, got, tt.want)
		}
		if asked := tt.want.Retry || tt.refuse; asked != (len(b.asked) == 1) {
			t.Errorf("%s: budget was asked at %v, want asked: %v", tt.name, b.asked, asked)
		}
	}
}

type negative struct{}

func (negative) Delay(int, time.Duration, float64) time.Duration { return -time.Second }

func TestHistoryCountsBackoffsAndRestartsOnHints(t *testing.T) {
	h := History{Start: noon}
	for _, step := range []struct {
		v         Verdict
		wantRetry int
		wantPrev  time.Duration
	}{
		{Verdict{Wait: 3, WaitSource: WaitBackoff}, 1, 3},
		{Verdict{Wait: 5, WaitSource: WaitBackoff}, 2, 5},
		{Verdict{Wait: 7, WaitSource: WaitPushback}, 0, 0},
		{Verdict{Wait: 9, WaitSource: WaitBackoff}, 1, 9},
		{Verdict{Wait: 11, WaitSource: WaitRetryInfo}, 0, 0},
	} {
		h.Retried(step.v)
		if h.Retry != step.wantRetry || h.Prev != step.wantPrev {
			t.Fatalf("after %v: retry %d, prev %d, want %d, %d", step.v, h.Retry, h.Prev, step.wantRetry, step.wantPrev)
		}
	}
}

func TestAHedgeIsPutOffForLongerEachTime(t *testing.T) {
	for _, tt := range []struct{ delay, first, second time.Duration }{
		{0, time.Millisecond, 2 * time.Millisecond},
		{time.Millisecond - 1, time.Millisecond, 2 * time.Millisecond},
		{time.Second, time.Second, 2 * time.Second},
	} {
		h := History{Start: noon}
		first, second, third := h.PutOff(tt.delay), h.PutOff(tt.delay), h.PutOff(tt.delay)
		if first != tt.first || second != tt.second || third != 2*tt.second {
			t.Errorf("a hedge of delay %v is put off by %v, %v, %v, want %v, %v, %v",
				tt.delay, first, second, third, tt.first, tt.second, 2*tt.second)
		}
	}
}

// FuzzEngine asks for a verdict on anything: never a negative wait, never an attempt
// past a limit, never a retry that nobody allowed.
func FuzzEngine(f *testing.F) {
	f.Add(uint8(14), 1, "", int64(0), 0.5, int64(time.Second), int64(0), 0, int64(0), uint8(0))
	f.Add(uint8(8), 3, "2147483647", int64(0), 0.999, int64(0), int64(time.Minute), 7, int64(math.MaxInt64), uint8(1))
	f.Add(uint8(14), 2, "-1", int64(-5), 1.5, int64(-1), int64(5), -3, int64(-9), uint8(2))
	f.Add(uint8(14), 2, "", int64(math.MaxInt64), math.NaN(), int64(math.MaxInt64), int64(1), 1<<40, int64(1), uint8(16))
	backoffs := []Backoff{Exponential{}, Exponential{Jitter: ProportionalJitter, Max: math.MaxInt64}, Decorrelated{Max: math.MaxInt64}, Constant(0), negative{}}
	f.Fuzz(func(t *testing.T, code uint8, number int, pushback string, info int64, u float64,
		left, maxElapsed int64, retry int, prev int64, flags uint8) {
		p := policyOf(t, WithBackoff(backoffs[int(flags>>4)%len(backoffs)]), WithMaxAttempts(5),
			WithMaxElapsed(max(0, time.Duration(maxElapsed))), WithMaxServerDelay(-1))
		failed := failureOf(number, codes.Code(code%20)+1, retryInfoOf(time.Duration(info)))
		if pushback != "" {
			failed = failed.saying(pushback)
		}
		failed.TimedOut = flags&1 != 0
		failed.Committed = flags&2 != 0
		if flags&4 != 0 {
			failed.CtxErr = context.Canceled
		}
		h := History{Start: noon.Add(-time.Minute), Retry: retry, Prev: time.Duration(prev)}
		if left != 0 {
			h.Deadline = noon.Add(time.Duration(left))
		}
		budget := &aBudget{refuse: flags&8 != 0}
		v := p.judge(t.Context(), budget, &h, &failed, noon, u)
		switch {
		case v.Retry == (v.Reason != nil):
			t.Errorf("%+v neither retries nor says why not", v)
		case v.Wait < 0:
			t.Errorf("negative wait %v", v.Wait)
		case len(budget.heard) != 1:
			t.Errorf("budget heard %v", budget.heard)
		case !v.Retry:
		case failed.Attempt.Number >= 5 || budget.refuse || failed.CtxErr != nil || failed.Committed:
			t.Errorf("%+v retries past a limit", v)
		case !h.Deadline.IsZero() && !noon.Add(v.Wait).Before(h.Deadline):
			t.Errorf("%+v ends after the deadline", v)
		case maxElapsed > 0 && v.Wait >= time.Duration(maxElapsed)-time.Minute:
			t.Errorf("%+v ends after MaxElapsed", v)
		case v.result != Failed || v.WaitSource == WaitNone:
			t.Errorf("%+v retries what is no failure, or from nowhere", v)
		}
	})
}

// An engine says how long an attempt may take, as the interceptors obey it.
func TestEngineAttemptTimeout(t *testing.T) {
	for _, tt := range []struct {
		name     string
		timeout  time.Duration
		deadline time.Time
		number   int
		want     time.Duration
	}{
		{"no timeout in the policy", 0, noon, 1, 0},
		{"first attempt", time.Second, noon, 1, time.Second},
		{"last but one", time.Second, noon, 2, time.Second},
		{"the last gets all the time that is left", time.Second, noon, 3, 0},
		{"without a deadline the last has its timeout too", time.Second, time.Time{}, 3, time.Second},
	} {
		t.Run(tt.name, func(t *testing.T) {
			e, err := NewEngine(Policy{MaxAttempts: 3, AttemptTimeout: tt.timeout})
			if err != nil {
				t.Fatal(err)
			}
			if got := e.AttemptTimeout(&History{Deadline: tt.deadline}, tt.number); got != tt.want {
				t.Errorf("AttemptTimeout(attempt %d) = %v, want %v", tt.number, got, tt.want)
			}
		})
	}
}
