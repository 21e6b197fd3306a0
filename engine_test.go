package grpcretry

import (
	"context"
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

// aBudget gives a fixed decision and records the calls to it.
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
	switch {
	case o.Result != Unsent:
		b.heard = append(b.heard, o)
	case o.Attempt > 1:
		b.refunded++
	}
}

func (b *aBudget) Withdraw(now time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.asked = append(b.asked, now)
	return !b.refuse
}

func (b *aBudget) Balance(now time.Time) float64 {
	if b.refuse {
		return 0
	}
	return 1
}

func policyOf(t testing.TB, opts ...Option) *policy {
	t.Helper()
	r := retrierOf(t, opts...)
	return r.settings.current().of("").policy
}

func failureOf(number int, code codes.Code, details ...protoadapt.MessageV1) failure {
	return failure{Attempt: Attempt{Number: number, Err: fail(code, "x", details...).err}}
}

func (f failure) saying(pushback ...string) failure {
	f.Attempt.Trailer = metadata.MD{pushbackKey: pushback}
	return f
}

func (f failure) with(change func(*failure)) failure { change(&f); return f }

// judged is a verdict, and the result that is reported to the budget.
type judged struct {
	verdict
	result Result
}

// before describes a call before the failure that is tested.
type before struct {
	Start    time.Time
	Deadline time.Time
	Retry    int
	Prev     time.Duration
}

// plan returns the plan of such a call, whose attempt with that number is in flight.
func (b before) plan(p *policy, budget Budget, number int) *plan {
	plan := new(plan)
	plan.begin(p, budget, nil, &target{all: newTargets(nil)}, instantOf(b.Start), instantOf(b.Deadline))
	plan.made, plan.open, plan.ledger.freeAttempt = int32(number), 1, 1
	plan.progress = progress{b.Retry, b.Prev}
	return plan
}

type negative struct{}

func (negative) Delay(int, time.Duration, float64) time.Duration { return -time.Second }

func TestEngine(t *testing.T) {
	var (
		canceled  = func(f *failure) { f.CtxErr = context.Canceled }
		closed    = func(f *failure) { f.Closed = true }
		committed = func(f *failure) { f.Committed = true }
		timedOut  = func(f *failure) { f.TimedOut = true }
		notRun    = func(f *failure) { f.NotRun = true }
		sizeError = func(f *failure) {
			f.Attempt.Err = status.Error(codes.ResourceExhausted, "grpc: received message larger than max (5 vs. 4)")
		}
		retries = func(context.Context, Attempt) Classification { return Retry }
		stops   = func(context.Context, Attempt) Classification { return Stop }
		exact   = WithBackoff(Exponential{Jitter: NoJitter}) // 100 ms, 200 ms, … 5 s
		once    = WithUnsentOnly(true)
	)
	deadlineIn := func(d time.Duration) before { return before{Start: noon, Deadline: noon.Add(d)} }
	stop := func(reason error, result Result) judged { return judged{verdict{Reason: reason}, result} }
	again := func(wait time.Duration, source WaitSource) judged {
		return judged{verdict{Wait: wait, WaitSource: source}, Failed}
	}
	late := func(reason error, wait time.Duration, source WaitSource) judged {
		return judged{verdict{Reason: reason, Wait: wait, WaitSource: source}, Failed}
	}

	// There is one row for each rule, and for each pair of rules whose order matters. u is 0.5.
	for _, tt := range []struct {
		name    string
		opts    []Option
		history before
		failure failure
		refuse  bool
		want    judged
	}{
		// 1. the caller's context, or the connection, has ended
		{name: "context ended", failure: failureOf(1, codes.Canceled).with(canceled), want: stop(context.Canceled, Ignored)},
		{name: "context ended, CANCELED in the code set", opts: []Option{WithCodes(codes.Canceled)},
			failure: failureOf(1, codes.Canceled).with(canceled), want: stop(context.Canceled, Ignored)},
		{name: "context ended while the server failed", failure: failureOf(1, codes.Unavailable).with(canceled),
			want: stop(context.Canceled, Failed)},
		{name: "connection closed", failure: failureOf(1, codes.Unavailable).with(closed), want: stop(errConnClosed, Ignored)},

		// 2. committed
		{name: "committed", failure: failureOf(1, codes.Unavailable).with(committed), want: stop(ErrCommitted, Failed)},
		{name: "committed, not retryable", failure: failureOf(1, codes.NotFound).with(committed), want: stop(ErrCommitted, Answered)},

		// 3. the server said to stop
		{name: "pushback stop", failure: failureOf(1, codes.Unavailable).saying("-1"), want: stop(ErrPushback, Failed)},
		{name: "pushback stop of a code that is not retryable", failure: failureOf(1, codes.NotFound).saying("-1"),
			want: stop(ErrPushback, Failed)},

		// 4. classifier, else codes
		{name: "code not in the set", failure: failureOf(1, codes.Internal), want: stop(ErrNotRetryable, Ignored)},
		{name: "code in the set", opts: []Option{exact}, failure: failureOf(1, codes.Unavailable),
			want: again(100*time.Millisecond, WaitBackoff)},
		{name: "own code set", opts: []Option{exact, WithCodes(codes.Internal)}, failure: failureOf(1, codes.Internal),
			want: again(100*time.Millisecond, WaitBackoff)},
		{name: "size error", failure: failureOf(1, codes.ResourceExhausted).with(sizeError), want: stop(ErrNotRetryable, Ignored)},
		{name: "size error, classifier says retry", opts: []Option{exact, WithClassifier(retries)},
			failure: failureOf(1, codes.ResourceExhausted).with(sizeError), want: again(100*time.Millisecond, WaitBackoff)},
		{name: "classifier says retry", opts: []Option{exact, WithClassifier(retries)}, failure: failureOf(1, codes.NotFound),
			want: again(100*time.Millisecond, WaitBackoff)},
		{name: "an error that says OK, classifier says retry", opts: []Option{WithClassifier(retries)},
			failure: failureOf(1, codes.Unavailable).with(func(f *failure) { f.Attempt.Err = okError{} }), want: stop(ErrNotRetryable, Ignored)},
		{name: "classifier says stop", opts: []Option{WithClassifier(stops)}, failure: failureOf(1, codes.Unavailable),
			want: stop(ErrNotRetryable, Ignored)},
		{name: "attempt timeout", opts: []Option{exact}, failure: failureOf(1, codes.DeadlineExceeded).with(timedOut),
			want: again(100*time.Millisecond, WaitBackoff)},
		{name: "a server's DEADLINE_EXCEEDED", failure: failureOf(1, codes.DeadlineExceeded), want: stop(ErrNotRetryable, Ignored)},
		{name: "a server's CANCELLED in the set", opts: []Option{exact, WithCodes(codes.Canceled)}, failure: failureOf(1, codes.Canceled),
			want: again(100*time.Millisecond, WaitBackoff)},
		{name: "pushback does not make a code retryable", failure: failureOf(1, codes.NotFound).saying("5"),
			want: stop(ErrNotRetryable, Answered)},
		{name: "RetryInfo does not make a code retryable", failure: failureOf(1, codes.NotFound, retryInfoOf(time.Second)),
			want: stop(ErrNotRetryable, Answered)},

		// 5. unsent only
		{name: "unsent only: it may have run", opts: []Option{once}, failure: failureOf(1, codes.Unavailable), want: stop(ErrMayHaveRun, Failed)},
		{name: "unsent only: it has not run", opts: []Option{once, exact}, failure: failureOf(1, codes.Unavailable).with(notRun),
			want: again(100*time.Millisecond, WaitBackoff)},
		{name: "unsent only: pushback says wait", opts: []Option{once}, failure: failureOf(1, codes.Unavailable).saying("5"),
			want: again(5*time.Millisecond, WaitPushback)},
		{name: "unsent only: RetryInfo says wait", opts: []Option{once}, failure: failureOf(1, codes.Unavailable, retryInfoOf(time.Second)),
			want: again(1100*time.Millisecond, WaitRetryInfo)},
		{name: "unsent only: pushback stop", opts: []Option{once}, failure: failureOf(1, codes.Unavailable).saying("-1").with(notRun),
			want: stop(ErrPushback, Failed)},
		{name: "unsent only: classifier says retry", opts: []Option{once, WithClassifier(retries)}, failure: failureOf(1, codes.NotFound),
			want: stop(ErrMayHaveRun, Failed)},
		{name: "unsent only: attempt timeout", opts: []Option{once}, failure: failureOf(1, codes.DeadlineExceeded).with(timedOut),
			want: stop(ErrMayHaveRun, Failed)},

		// 7. attempts
		{name: "last attempt but one", opts: []Option{exact}, failure: failureOf(3, codes.Unavailable),
			want: again(100*time.Millisecond, WaitBackoff)},
		{name: "last attempt", failure: failureOf(4, codes.Unavailable), want: stop(ErrAttemptsExhausted, Failed)},

		// 8. the wait
		{name: "second backoff", opts: []Option{exact}, history: before{Start: noon, Retry: 1}, failure: failureOf(2, codes.Unavailable),
			want: again(200*time.Millisecond, WaitBackoff)},
		{name: "default backoff has equal jitter", failure: failureOf(1, codes.Unavailable), want: again(75*time.Millisecond, WaitBackoff)},
		{name: "overload has a longer backoff", failure: failureOf(1, codes.ResourceExhausted), want: again(500*time.Millisecond, WaitBackoff)},
		{name: "WithOverloadBackoff", opts: []Option{exact, WithOverloadBackoff(Constant(7))}, failure: failureOf(1, codes.ResourceExhausted),
			want: again(7, WaitBackoff)},
		{name: "the retry number is the call's, also when the code changes", history: before{Start: noon, Retry: 2},
			opts:    []Option{exact, WithOverloadBackoff(Exponential{Base: time.Second, Max: time.Minute, Jitter: NoJitter})},
			failure: failureOf(3, codes.ResourceExhausted), want: again(4*time.Second, WaitBackoff)},
		{name: "the wait before is the call's", history: before{Start: noon, Retry: 1, Prev: time.Second},
			opts:    []Option{WithBackoff(Decorrelated{})}, // 0.1 s + 0.5 × (3 s − 0.1 s)
			failure: failureOf(2, codes.Unavailable), want: again(1550*time.Millisecond, WaitBackoff)},
		{name: "a backoff below zero", opts: []Option{WithBackoff(negative{})}, failure: failureOf(1, codes.Unavailable),
			want: again(0, WaitBackoff)},
		{name: "pushback is exact", failure: failureOf(1, codes.Unavailable).saying("7001"), want: again(7001*time.Millisecond, WaitPushback)},
		{name: "pushback of zero", failure: failureOf(1, codes.Unavailable).saying("0"), want: again(0, WaitPushback)},
		{name: "RetryInfo with jitter on top", failure: failureOf(1, codes.Unavailable, retryInfoOf(10*time.Second)),
			want: again(11*time.Second, WaitRetryInfo)},
		{name: "negative RetryInfo says nothing", opts: []Option{exact}, failure: failureOf(1, codes.Unavailable, retryInfoOf(-1)),
			want: again(100*time.Millisecond, WaitBackoff)},
		{name: "pushback wins over RetryInfo", failure: failureOf(1, codes.Unavailable, retryInfoOf(10*time.Second)).saying("5"),
			want: again(5*time.Millisecond, WaitPushback)},
		{name: "pushback over five minutes", failure: failureOf(1, codes.Unavailable).saying("300001"),
			want: late(ErrPushback, 300001*time.Millisecond, WaitPushback)},
		{name: "pushback over MaxServerDelay", opts: []Option{WithMaxServerDelay(time.Second)},
			failure: failureOf(1, codes.Unavailable).saying("1001"), want: late(ErrPushback, 1001*time.Millisecond, WaitPushback)},
		{name: "RetryInfo of centuries", opts: []Option{WithMaxServerDelay(-1)},
			failure: failureOf(1, codes.Unavailable, retryInfoOf(math.MaxInt64)), want: again(math.MaxInt64, WaitRetryInfo)},

		// 8. deadline and MaxElapsed
		{name: "wait ends before the deadline", opts: []Option{exact}, history: deadlineIn(100*time.Millisecond + 1),
			failure: failureOf(1, codes.Unavailable), want: again(100*time.Millisecond, WaitBackoff)},
		{name: "wait ends at the deadline", opts: []Option{exact}, history: deadlineIn(100 * time.Millisecond),
			failure: failureOf(1, codes.Unavailable),
			want:    late(ErrDeadline, 100*time.Millisecond, WaitBackoff)},
		{name: "wait ends before MaxElapsed", opts: []Option{exact, WithMaxElapsed(time.Second)},
			history: before{Start: noon.Add(-900*time.Millisecond + 1)}, failure: failureOf(1, codes.Unavailable),
			want: again(100*time.Millisecond, WaitBackoff)},
		{name: "wait ends at MaxElapsed", opts: []Option{exact, WithMaxElapsed(time.Second)},
			history: before{Start: noon.Add(-900 * time.Millisecond)}, failure: failureOf(1, codes.Unavailable),
			want: late(ErrMaxElapsed, 100*time.Millisecond, WaitBackoff)},
		{name: "deadline, before the budget", opts: []Option{exact}, history: deadlineIn(1), refuse: true,
			failure: failureOf(1, codes.Unavailable),
			want:    late(ErrDeadline, 100*time.Millisecond, WaitBackoff)},

		// 9. the budget and the patience
		{name: "budget refuses now", opts: []Option{exact}, refuse: true, failure: failureOf(1, codes.Unavailable),
			want: again(100*time.Millisecond, WaitBackoff)},
		{name: "budget refuses, and there is no patience", opts: []Option{exact, WithPatience(0)}, refuse: true,
			failure: failureOf(1, codes.Unavailable), want: late(ErrBudgetExhausted, 100*time.Millisecond, WaitBackoff)},
		{name: "wait outlasts the patience", opts: []Option{exact, WithPatience(100*time.Millisecond - 1)},
			failure: failureOf(1, codes.Unavailable), want: late(ErrTargetDown, 100*time.Millisecond, WaitBackoff)},
		{name: "pushback may outlast the patience", opts: []Option{exact, WithPatience(time.Second)},
			failure: failureOf(1, codes.Unavailable).saying("7000"), want: again(7*time.Second, WaitPushback)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			budget := &aBudget{refuse: tt.refuse}
			if tt.history.Start.IsZero() {
				tt.history.Start = noon
			}
			plan := tt.history.plan(policyOf(t, tt.opts...), budget, tt.failure.Attempt.Number)
			got := judgedBy(plan, &tt.failure, noon, 0.5)
			want := tt.want.verdict
			switch {
			case !want.retries():
				want.do = doEnd
			case want.Wait == 0:
				want.do = doSend
			}
			if got != want {
				t.Errorf("Failed = %+v, want %+v", got, want)
			}
			wantDue := time.Time{}
			if tt.want.Wait > 0 && tt.want.retries() {
				wantDue = noon.Add(tt.want.Wait)
			}
			if due := plan.dueAt; due != instantOf(wantDue) {
				t.Errorf("due at %v, want %v", due, wantDue)
			}
			if want := (Outcome{Attempt: tt.failure.Attempt.Number, Result: tt.want.result}); len(budget.heard) != 1 || budget.heard[0] != want {
				t.Errorf("budget heard %v, want %v once", budget.heard, want)
			}
			if asked := want.do == doSend; asked != (len(budget.asked) == 1) {
				t.Errorf("budget was asked at %v, want asked: %v", budget.asked, asked)
			}
		})
	}
}

// An okError is an error whose status is OK.
type okError struct{}

func (okError) Error() string { return "no failure" }

func (okError) GRPCStatus() *status.Status { return status.New(codes.OK, "") }
