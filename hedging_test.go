package grpcretry

import (
	"context"
	"errors"
	"log/slog"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// An outcome checks what a call returned after so many attempts.
type outcome func(t *testing.T, reply *echov1.EchoResponse, err error, attempts int)

// replied is a success with that reply.
func replied(message string) outcome {
	return func(t *testing.T, reply *echov1.EchoResponse, err error, _ int) {
		t.Helper()
		if err != nil || reply.GetMessage() != message {
			t.Errorf("Echo = %q, %v, want %q", reply.GetMessage(), err, message)
		}
	}
}

// ended is a failure with gRPC's own error.
func ended(code codes.Code) outcome {
	return func(t *testing.T, _ *echov1.EchoResponse, err error, _ int) {
		t.Helper()
		var e *Error
		if status.Code(err) != code || errors.As(err, &e) {
			t.Errorf("Echo = %v (%T), want gRPC's own %v", err, err, code)
		}
	}
}

// stopped is a failure with an *Error.
func stopped(code codes.Code, reason error) outcome {
	return func(t *testing.T, _ *echov1.EchoResponse, err error, attempts int) {
		t.Helper()
		wantStop(t, err, code, reason, attempts)
	}
}

// The five kinds of responses of gRFC A6, in many orders of arrival. Hedges are due each
// second; attempts are numbered as the server sees them.
func TestHedging(t *testing.T) {
	pushedBack := func(ms string) answer { return unavailable().pushback(ms) }
	never := says("never").after(time.Hour)
	for _, tt := range []struct {
		name    string
		attempt int // MaxAttempts
		delay   time.Duration
		script  []answer
		opts    []Option
		timeout time.Duration
		refuse  bool // the budgets do

		times   []time.Duration // when the server sees attempts
		want    outcome
		elapsed time.Duration // at the end of the call
	}{
		// 1. Success.
		{name: "a response before the delay", attempt: 3, delay: second, script: []answer{says("a").after(second / 2)},
			times: []time.Duration{0}, want: replied("a"), elapsed: second / 2},
		{name: "the hedge wins", attempt: 3, delay: second, script: []answer{never, says("b").after(second / 10)},
			times: []time.Duration{0, second}, want: replied("b"), elapsed: 11 * second / 10},
		{name: "the first wins after all", attempt: 3, delay: second, script: []answer{says("a").after(3 * second / 2), never},
			times: []time.Duration{0, second}, want: replied("a"), elapsed: 3 * second / 2},
		{name: "no more than MaxAttempts", attempt: 2, delay: second, script: []answer{says("a").after(9 * second), never},
			times: []time.Duration{0, second}, want: replied("a"), elapsed: 9 * second},
		{name: "delay 0 sends all at once", attempt: 3, delay: 0, script: []answer{never, never, says("c").after(second)},
			times: []time.Duration{0, 0, 0}, want: replied("c"), elapsed: second},

		// 2. Fatal.
		{name: "a fatal status of a hedge ends the call", attempt: 3, delay: second,
			script: []answer{never, fail(codes.NotFound, "x").after(second / 10)},
			times:  []time.Duration{0, second}, want: ended(codes.NotFound), elapsed: 11 * second / 10},
		{name: "a fatal status after a retryable one", attempt: 3, delay: second,
			script: []answer{unavailable(), fail(codes.NotFound, "x").after(second / 10)},
			times:  []time.Duration{0, second}, want: stopped(codes.NotFound, ErrNotRetryable), elapsed: 11 * second / 10},

		// 3. Retryable.
		{name: "the backoff after a failure, then the delay again", attempt: 4, delay: second,
			script: []answer{unavailable().after(3 * second / 10), never, never, says("d")},
			times:  []time.Duration{0, 13 * second / 10, 23 * second / 10, 33 * second / 10}, want: replied("d"), elapsed: 33 * second / 10},
		{name: "a hedge fails, the next is sent after the delay", attempt: 3, delay: second,
			script: []answer{never, unavailable().after(second / 10), says("c").after(second / 10)},
			times:  []time.Duration{0, second, 2 * second}, want: replied("c"), elapsed: 21 * second / 10},
		{name: "the last failure is followed by the backoff", attempt: 3, delay: second,
			script: []answer{unavailable().after(3 * second / 2), unavailable(), says("c")},
			times:  []time.Duration{0, second, 5 * second / 2}, want: replied("c"), elapsed: 5 * second / 2},
		{name: "all fail, the first last", attempt: 2, delay: second, script: []answer{overloaded().after(5 * second), unavailable()},
			times: []time.Duration{0, second}, want: stopped(codes.ResourceExhausted, ErrAttemptsExhausted), elapsed: 5 * second},

		// 4. Pushback: stop.
		{name: "a stop from a hedge, the first may still win", attempt: 3, delay: second,
			script: []answer{says("a").after(5 * second), pushedBack("-1")},
			times:  []time.Duration{0, second}, want: replied("a"), elapsed: 5 * second},
		{name: "after a stop, a failure sends none", attempt: 4, delay: second,
			script: []answer{overloaded().after(5 * second), pushedBack("-1")},
			times:  []time.Duration{0, second}, want: stopped(codes.ResourceExhausted, ErrPushback), elapsed: 5 * second},

		// 5. Pushback: wait.
		{name: "a wait, then the delay again", attempt: 4, delay: second, script: []answer{never, pushedBack("3000"), never, says("d")},
			times: []time.Duration{0, second, 4 * second, 5 * second}, want: replied("d"), elapsed: 5 * second},
		{name: "a wait, then a failure without: the wait holds for the call", attempt: 4, delay: second,
			script: []answer{unavailable().after(2 * second), pushedBack("9000"), says("c")},
			times:  []time.Duration{0, second, 10 * second}, want: replied("c"), elapsed: 10 * second},
		{name: "a wait past the deadline sends no more", attempt: 3, delay: second, timeout: 6 * second,
			script: []answer{says("a").after(5 * second), pushedBack("5000")},
			times:  []time.Duration{0, second}, want: replied("a"), elapsed: 5 * second},

		// Limits.
		{name: "the deadline", attempt: 9, delay: second, timeout: 5 * second / 2, script: []answer{never, never, never},
			times: []time.Duration{0, second, 2 * second}, want: stopped(codes.DeadlineExceeded, context.DeadlineExceeded),
			elapsed: 5 * second / 2},
		{name: "the attempt timeout of each", attempt: 3, delay: second,
			opts:   []Option{WithAttemptTimeout(3 * second / 2), WithBackoff(Constant(second / 2))},
			script: []answer{hang(), hang(), says("c")},
			times:  []time.Duration{0, second, 2 * second}, want: replied("c"), elapsed: 2 * second},
		{name: "an empty budget ends nothing", attempt: 3, delay: second, refuse: true, script: []answer{says("a").after(9 * second)},
			times: []time.Duration{0}, want: replied("a"), elapsed: 9 * second},
		{name: "an empty budget with nothing in flight", attempt: 3, delay: second, refuse: true, opts: []Option{WithPatience(0)},
			script: []answer{unavailable().after(3 * second)},
			times:  []time.Duration{0}, want: stopped(codes.Unavailable, ErrBudgetExhausted), elapsed: 3 * second},

		// Codes.
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, script(tt.script...))
				budget, hedges := &aBudget{refuse: tt.refuse}, &aBudget{refuse: tt.refuse}
				events := &hedgeEvents{}
				client := server.fixed(t, 0.5, append([]Option{steady, WithBudget(budget), WithObserver(events.observe),
					hedged(tt.attempt, Hedging{Delay: HedgeAfter(tt.delay), Budget: hedges})}, tt.opts...)...)
				ctx := t.Context()
				if tt.timeout > 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, tt.timeout)
					defer cancel()
				}
				reply, err := client.Echo(ctx, request())
				if got := time.Since(server.start); got != tt.elapsed {
					t.Errorf("Echo took %v, want %v", got, tt.elapsed)
				}
				wantTimes(t, server, tt.times...)
				tt.want(t, reply, err, len(tt.times))
				events.check(t, err)
				wantAccounts(t, budget, hedges, len(tt.times))
			})
		})
	}
}

// wantAccounts: both budgets have heard of each attempt once, and one of them has paid for each but the first.
func wantAccounts(t *testing.T, own, hedges *aBudget, attempts int) {
	t.Helper()
	paid := []int{1}
	for name, b := range map[string]*aBudget{"budget": own, "budget of hedges": hedges} {
		before := len(paid)
		for _, o := range b.heard {
			if o.Attempt > 1 {
				paid = append(paid, o.Attempt)
			}
		}
		if taken := len(b.asked) - b.refunded; len(b.heard) != attempts || !b.refuse && taken != len(paid)-before {
			t.Errorf("%s has paid for %d attempts, and heard %v, want all of %d", name, taken, b.heard, attempts)
		}
	}
	slices.Sort(paid)
	for i, number := range paid {
		if number != i+1 || len(paid) != attempts {
			t.Errorf("the budgets have paid for the attempts %v, want each of %d once", paid, attempts)
		}
	}
}

// Each attempt starts from the caller's metadata and tells the server how many were sent.
func TestServerIsToldOfHedges(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(says("x").after(5*second/2)))
		ctx := metadata.AppendToOutgoingContext(t.Context(), "who", "me")
		server.client(t, hedged(3, Hedging{Delay: HedgeAfter(second)})).Echo(ctx, request())
		for i, a := range server.attempts() {
			if a.previous != i || first(a.metadata["who"]) != "me" {
				t.Errorf("attempt %d says %d attempts before it and has metadata %v", i+1, a.previous, a.metadata)
			}
		}
		if got := len(server.attempts()); got != 3 {
			t.Errorf("%d attempts, want 3", got)
		}
	})
}

// A channel may lose its connection while an attempt goes on there, as when a server shuts
// down in peace: then a hedge is what connects it again.
func TestAHedgeWakesAnIdleChannel(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(says("a").after(3*second)))
		events := &hedgeEvents{}
		cc := server.conn(t, grpc.WithChainUnaryInterceptor(UnaryClientInterceptor(
			WithObserver(events.observe), hedged(2, Hedging{Delay: HedgeAfter(second)}))))
		time.AfterFunc(second/2, server.server.GracefulStop)
		reply, err := echov1.NewEchoServiceClient(cc).Echo(t.Context(), request())
		if reply.GetMessage() != "a" || err != nil {
			t.Errorf("Echo = %v, %v, want a", reply, err)
		}
		var sent []time.Duration
		for _, e := range events.events {
			if e.Kind == AttemptStart {
				sent = append(sent, e.Attempt.Start.Sub(server.start))
			}
		}
		if !slices.Equal(sent, []time.Duration{0, second}) {
			t.Errorf("attempts were sent at %v, want a hedge after 1s", sent)
		}
	})
}

// hedgeEvents checks that the events of one call are as documented.
type hedgeEvents struct {
	events []Event // no lock: observers are called one at a time, which -race proves
}

func (h *hedgeEvents) observe(_ context.Context, e Event) { h.events = append(h.events, e) }

func (h *hedgeEvents) check(t *testing.T, err error) {
	t.Helper()
	state := map[int]EventKind{}
	ended := 0
	for i, e := range h.events {
		last, seen := state[e.Attempt.Number]
		good := false
		switch e.Kind {
		case AttemptStart:
			good = !seen
		case AttemptEnd:
			good = seen && last == AttemptStart
			ended++
		case Decision:
			good = seen && last == AttemptEnd && !errors.Is(e.Attempt.Err, ErrHedgeLost)
		case CallEnd:
			good = i == len(h.events)-1 && ended == len(state) && e.Err == err
			if len(state) > 1 && len(e.Attempts) != len(state) {
				t.Errorf("%d attempts at the end of the call, want %d", len(e.Attempts), len(state))
			}
			for i, a := range e.Attempts {
				if a.Number != i+1 {
					t.Errorf("attempts at the end are %v, want them in order", e.Attempts)
				}
			}
		}
		if !good {
			t.Errorf("event %d of %d is %v of attempt %d, which was at %v", i+1, len(h.events), e.Kind, e.Attempt.Number, last)
		}
		state[e.Attempt.Number] = e.Kind
	}
	if len(h.events) == 0 || h.events[len(h.events)-1].Kind != CallEnd {
		t.Error("the last event is not the end of the call")
	}
}

func TestClosedConnectionEndsAHedgedCallAtOnce(t *testing.T) {
	for name, script := range map[string]func(int) answer{
		"attempts under way": always(hang()),
		"in a wait":          always(unavailable().pushback("60000")),
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, script)
				cc := server.conn(t, DialOptions(hedged(3, Hedging{Delay: HedgeAfter(second)}))...)
				time.AfterFunc(3*second/2, func() { cc.Close() })
				_, err := echov1.NewEchoServiceClient(cc).Echo(t.Context(), request())
				if !errors.Is(err, errConnClosed) && status.Code(err) != codes.Canceled {
					t.Errorf("Echo = %v, want the closed connection", err)
				}
				if got := time.Since(server.start); got != 3*second/2 {
					t.Errorf("Echo took %v, want 1.5s", got)
				}
			})
		})
	}
}

// What runs below an attempt that lost is told so.
func TestLosersAreToldByTheCause(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(says("a").after(time.Hour), says("b")))
		causes := map[int]error{}
		below := belowUnary(func(ctx context.Context, next func(context.Context) error) error {
			err := next(ctx)
			a, _ := AttemptFromContext(ctx)
			causes[a.Number] = context.Cause(ctx) // the losers end before the winner's caller goes on
			return err
		})
		cc := server.conn(t, append(DialOptions(hedged(2, Hedging{Delay: HedgeAfter(second)})),
			below)...)
		reply, err := echov1.NewEchoServiceClient(cc).Echo(t.Context(), request())
		if reply.GetMessage() != "b" || err != nil {
			t.Errorf("Echo = %v, %v, want b", reply, err)
		}
		if causes[1] != ErrHedgeLost || causes[2] != nil {
			t.Errorf("causes are %v, want ErrHedgeLost of the first only", causes)
		}
	})
}

// Once an attempt has won, no hedge is sent, although those that lose may take their time to end.
func TestNoHedgeFollowsTheWinner(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var mu sync.Mutex
		var sent []int
		start := time.Now()
		err := UnaryClientInterceptor(hedged(4, Hedging{Delay: HedgeAfter(second)}))(t.Context(), echoMethod, request(),
			&echov1.EchoResponse{}, nil,
			func(ctx context.Context, _ string, _, _ any, _ *grpc.ClientConn, _ ...grpc.CallOption) error {
				a, _ := AttemptFromContext(ctx)
				mu.Lock()
				sent = append(sent, a.Number)
				mu.Unlock()
				if a.Number == 2 {
					time.Sleep(second / 2)
					return nil
				}
				<-ctx.Done()
				time.Sleep(5 * second)
				return ctx.Err()
			})
		if took := time.Since(start); err != nil || took != 6500*time.Millisecond || !slices.Equal(sent, []int{1, 2}) {
			t.Errorf("the call returned %v after %v and the attempts %v, want success after 6.5s and the attempts 1 and 2", err, took, sent)
		}
	})
}

// Hedges are not saved up: what calls earn can be spent for a second, and one hedge is kept.
func TestDefaultHedgeBudget(t *testing.T) {
	b := newHedgeBudget()
	at := time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)
	answered := func(calls int, within time.Duration) {
		for range calls {
			b.Deposit(Outcome{Attempt: 1, Result: Succeeded})
		}
		at = at.Add(within)
	}
	for _, tt := range []struct {
		name        string
		calls       int
		within      time.Duration
		least, most float64
	}{
		{"at the start", 0, 0, 0, 0},
		{"nine calls", 9, time.Second, 0.9, 0.9},
		{"ten calls", 1, time.Second, 1, 1},
		{"an hour later", 0, time.Hour, 1, 1},
		{"a thousand calls in half a second", 1000, time.Second / 2, 100, 101},
		{"ten thousand in the next ten", 10_000, 10 * time.Second, 100, 106},
		{"a quiet second later", 0, 1100 * time.Millisecond, 1, 1},
	} {
		answered(tt.calls, tt.within)
		if got := b.Balance(at); got < tt.least-1e-6 || got > tt.most+1e-6 {
			t.Errorf("%s: balance %v, want %v to %v", tt.name, got, tt.least, tt.most)
		}
	}
}

func TestHedgingThatCannotBeMeantIsRefused(t *testing.T) {
	const method = "/grpcretry.test.v1.EchoService/Echo"
	on := func(h Hedging) Option { return WithMethod(method, WithHedging(h)) }
	inMethod := " (in WithMethod " + method + ")"
	for _, tt := range []struct {
		name string
		opt  Option
		want string
	}{
		{"no delay", on(Hedging{}), "grpcretry: WithHedging: Delay is not set, want HedgeAfter or HedgeAtQuantile" + inMethod},
		{"negative delay", on(Hedging{Delay: HedgeAfter(-time.Second)}), "grpcretry: WithHedging: Delay: -1s is negative" + inMethod},
		{"quantile 0", on(Hedging{Delay: HedgeAtQuantile(0, 0, 0)}),
			"grpcretry: WithHedging: Delay: HedgeAtQuantile: q is 0, want between 0 and 1" + inMethod},
		{"quantile NaN", on(Hedging{Delay: HedgeAtQuantile(math.NaN(), 0, 0)}),
			"grpcretry: WithHedging: Delay: HedgeAtQuantile: q is NaN, want between 0 and 1" + inMethod},
		{"negative bound", on(Hedging{Delay: HedgeAtQuantile(0.9, -1, 0)}),
			"grpcretry: WithHedging: Delay: HedgeAtQuantile: bounds -1ns and 0s must not be negative" + inMethod},
		{"bounds crossed", on(Hedging{Delay: HedgeAtQuantile(0.9, time.Second, time.Millisecond)}),
			"grpcretry: WithHedging: Delay: HedgeAtQuantile: upper bound 1ms is below the lower bound 1s" + inMethod},
		{"in a policy", WithPolicy(Policy{Hedging: &Hedging{}}),
			"grpcretry: WithPolicy: Hedging: Delay is not set, want HedgeAfter or HedgeAtQuantile"},
		{"all methods", WithPolicy(Policy{MaxAttempts: 2, Hedging: &Hedging{Delay: HedgeAfter(0)}}),
			"grpcretry: WithHedging for all methods, without AllMethodsAreSafe: name the methods that are safe to run twice with WithMethod"},
		{"all methods, by a policy", WithPolicy(Policy{Hedging: &Hedging{Delay: HedgeAfter(0)}}),
			"grpcretry: WithHedging for all methods, without AllMethodsAreSafe: name the methods that are safe to run twice with WithMethod"},
		{"a client stream", WithMethod("/grpcretry.test.v1.EchoService/Collect",
			WithPolicy(Policy{MaxAttempts: 2, Hedging: &Hedging{Delay: HedgeAfter(0)}})),
			"grpcretry: WithHedging in WithMethod /grpcretry.test.v1.EchoService/Collect: a method with a client stream cannot be hedged"},
		{"a bidi stream", WithMethod("/grpcretry.test.v1.EchoService/Chat",
			WithPolicy(Policy{MaxAttempts: 2, Hedging: &Hedging{Delay: HedgeAfter(0)}})),
			"grpcretry: WithHedging in WithMethod /grpcretry.test.v1.EchoService/Chat: a method with a client stream cannot be hedged"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if _, err := New(tt.opt); err == nil || err.Error() != tt.want {
				t.Errorf("New = %v, want %s", err, tt.want)
			}
		})
	}
}

// Without a delay, a call is as if there were no hedging, but it is measured.
func TestNoDelayNoHedge(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(unavailable(), says("b").after(5*second), says("c").after(3*second),
			says("d").after(time.Hour), says("e"), unavailable().after(2*second)))
		var on atomic.Bool
		delay := &recordedDelay{HedgeDelay: HedgeAfter(second)}
		client := server.client(t, steady, hedged(2, Hedging{Delay: switched{on.Load, delay}}))
		for i, step := range []struct {
			on      bool
			reply   string
			elapsed time.Duration
			told    []string
		}{
			{false, "b", 6 * second, nil},            // failed, waited its backoff, was slow
			{false, "c", 3 * second, []string{"3s"}}, // slow
			{true, "e", second, []string{"1s lost"}}, // hedged
			{true, "", 2 * second, []string{}},       // hedged, and failed twice
		} {
			on.Store(step.on)
			delay.told = nil
			start := time.Now()
			reply, _ := client.Echo(t.Context(), request())
			if got := time.Since(start); i < 3 && (reply.GetMessage() != step.reply || got != step.elapsed) {
				t.Errorf("call %d: %q after %v, want %q after %v", i+1, reply.GetMessage(), got, step.reply, step.elapsed)
			}
			if i < 3 && !slices.Equal(delay.told, step.told) {
				t.Errorf("call %d: the delay was told %q, want %q", i+1, delay.told, step.told)
			}
		}
	})
}

func TestWhatCannotBeHedgedIsSaidOnce(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(ok()))
		logs := &logRecorder{}
		cc := server.conn(t, DialOptions(WithLogger(slog.New(logs)),
			WithMethod("/grpcretry.test.v1.EchoService/",
				WithPolicy(Policy{MaxAttempts: 2, Hedging: &Hedging{Budget: Unlimited, Delay: HedgeAfter(second)}})))...)
		client := echov1.NewEchoServiceClient(cc)
		for range 3 {
			stream, err := client.Chat(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			stream.CloseSend()
			stream.Recv()
		}
		wantLines(t, logs, "WARN…not hedged, but retried: it has a client stream…method=/grpcretry.test.v1.EchoService/Chat")
		for range 3 {
			stream, err := cc.NewStream(t.Context(), serverStream, "/grpcretry.test.v1.EchoService/Expand", grpc.ForceCodec(oddCodec{}))
			if err != nil {
				t.Fatal(err)
			}
			(&application{stream: stream}).play(t, "send a; close")
			stream.RecvMsg(notAPointer{})
			stream.RecvMsg(notAPointer{})
		}
		wantLines(t, logs, "WARN…not hedged, but retried: no second message can be made…method=/grpcretry.test.v1.EchoService/Expand")
		for range 3 {
			cc.Invoke(t.Context(), "/grpcretry.test.v1.EchoService/Echo", request(), notAPointer{}, grpc.ForceCodec(oddCodec{}))
		}
		wantLines(t, logs, "WARN…not hedged, but retried: no second reply can be made…method=/grpcretry.test.v1.EchoService/Echo")
		cc = server.conn(t, DialOptions(WithLogger(slog.New(logs)), Disable(),
			WithMethod("/grpcretry.test.v1.EchoService/",
				WithPolicy(Policy{MaxAttempts: 2, Hedging: &Hedging{Budget: Unlimited, Delay: HedgeAfter(second)}})))...)
		for range 3 {
			stream, err := echov1.NewEchoServiceClient(cc).Chat(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			stream.CloseSend()
			stream.Recv()
		}
		wantLines(t, logs, "WARN…not hedged, but retried: it has a client stream…method=/grpcretry.test.v1.EchoService/Chat")
	})
}

// A server's throttle refuses hedges as well as retries, although the budget of hedges pays.
func TestAThrottleRefusesHedges(t *testing.T) {
	bubble(t, func(t *testing.T) {
		throttle := throttleOf(t, 2, 1)
		throttle.Deposit(Outcome{Attempt: 1, Result: Failed})
		server := serve(t, script(ok().after(5*second)))
		err := echo(t.Context(), server.client(t, WithBudget(throttle), hedged(2, Hedging{Delay: HedgeAfter(second)})))
		if err != nil {
			t.Error(err)
		}
		wantTimes(t, server, 0)
	})
}
