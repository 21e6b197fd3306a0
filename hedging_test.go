package grpcretry

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

const echoMethod = "/grpcretry.test.v1.EchoService/Echo"

// hedged hedges the method Echo.
func hedged(h Hedging) Option { return WithMethod(echoMethod, WithHedging(h)) }

// says is a success that names itself.
func says(name string) answer { return answer{reply: name} }

// The five kinds of answers of gRFC A6, in many orders of arrival. Hedges are due each
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
		refuse  bool // the budget does

		times   []time.Duration
		want    string     // the reply
		code    codes.Code // or the failure
		reason  error      // and its reason, nil if it is gRPC's own
		elapsed time.Duration
	}{
		// 1. Success.
		{name: "an answer before the delay", attempt: 3, delay: second, script: []answer{says("a").after(second / 2)},
			times: []time.Duration{0}, want: "a", elapsed: second / 2},
		{name: "an answer at the delay is too late not to hedge", attempt: 2, delay: second, script: []answer{says("a").after(second + 1), says("b")},
			times: []time.Duration{0, second}, want: "b", elapsed: second},
		{name: "the hedge wins", attempt: 3, delay: second, script: []answer{never, says("b").after(second / 10)},
			times: []time.Duration{0, second}, want: "b", elapsed: 11 * second / 10},
		{name: "the first wins after all", attempt: 3, delay: second, script: []answer{says("a").after(3 * second / 2), never},
			times: []time.Duration{0, second}, want: "a", elapsed: 3 * second / 2},
		{name: "the third wins", attempt: 3, delay: second, script: []answer{never, never, says("c").after(second / 10)},
			times: []time.Duration{0, second, 2 * second}, want: "c", elapsed: 21 * second / 10},
		{name: "no more than MaxAttempts", attempt: 2, delay: second, script: []answer{says("a").after(9 * second), never},
			times: []time.Duration{0, second}, want: "a", elapsed: 9 * second},
		{name: "delay 0 sends all at once", attempt: 3, delay: 0, script: []answer{never, never, says("c").after(second)},
			times: []time.Duration{0, 0, 0}, want: "c", elapsed: second},

		// 2. Fatal.
		{name: "a fatal status of the first", attempt: 3, delay: second, script: []answer{fail(codes.NotFound, "x")},
			times: []time.Duration{0}, code: codes.NotFound},
		{name: "a fatal status of a hedge ends the call", attempt: 3, delay: second, script: []answer{never, fail(codes.NotFound, "x").after(second / 10)},
			times: []time.Duration{0, second}, code: codes.NotFound, elapsed: 11 * second / 10},
		{name: "a fatal status after a non-fatal one", attempt: 3, delay: second,
			script: []answer{unavailable(), fail(codes.NotFound, "x").after(second / 10)},
			times:  []time.Duration{0, 0}, code: codes.NotFound, reason: ErrNotRetryable, elapsed: second / 10},
		{name: "a fatal status that also forbids more", attempt: 3, delay: second,
			script: []answer{never, fail(codes.NotFound, "x").pushback("-1")},
			times:  []time.Duration{0, second}, code: codes.NotFound, elapsed: second},

		// 3. Non-fatal.
		{name: "a failure sends the next now, later ones resume at the delay", attempt: 4, delay: second,
			script: []answer{unavailable().after(3 * second / 10), never, never, says("d")},
			times:  []time.Duration{0, 3 * second / 10, 13 * second / 10, 23 * second / 10}, want: "d", elapsed: 23 * second / 10},
		{name: "a hedge fails fast, the first answers later", attempt: 2, delay: second,
			script: []answer{says("a").after(2 * second), unavailable()},
			times:  []time.Duration{0, second}, want: "a", elapsed: 2 * second},
		{name: "a hedge fails, the next is sent now", attempt: 3, delay: second,
			script: []answer{never, unavailable().after(second / 10), says("c").after(second / 10)},
			times:  []time.Duration{0, second, 11 * second / 10}, want: "c", elapsed: 12 * second / 10},
		{name: "all fail at once", attempt: 3, delay: second, script: []answer{unavailable(), unavailable(), unavailable()},
			times: []time.Duration{0, 0, 0}, code: codes.Unavailable, reason: ErrAttemptsExhausted},
		{name: "all fail, the first last", attempt: 2, delay: second, script: []answer{overloaded().after(5 * second), unavailable()},
			times: []time.Duration{0, second}, code: codes.ResourceExhausted, reason: ErrAttemptsExhausted, elapsed: 5 * second},
		{name: "all fail, with delay 0", attempt: 3, delay: 0, script: []answer{unavailable().after(second), unavailable().after(second), unavailable().after(second)},
			times: []time.Duration{0, 0, 0}, code: codes.Unavailable, reason: ErrAttemptsExhausted, elapsed: second},

		// 4. Pushback: stop.
		{name: "a stop from a hedge, the first may still win", attempt: 3, delay: second,
			script: []answer{says("a").after(5 * second), pushedBack("-1")},
			times:  []time.Duration{0, second}, want: "a", elapsed: 5 * second},
		{name: "a stop from the first", attempt: 3, delay: second, script: []answer{pushedBack("-1")},
			times: []time.Duration{0}, code: codes.Unavailable, reason: ErrPushback},
		{name: "after a stop, a failure sends none", attempt: 4, delay: second,
			script: []answer{overloaded().after(5 * second), pushedBack("-1")},
			times:  []time.Duration{0, second}, code: codes.ResourceExhausted, reason: ErrPushback, elapsed: 5 * second},
		{name: "a stop takes back what was to come", attempt: 4, delay: second,
			script: []answer{pushedBack("-1").after(2 * second), pushedBack("9000")},
			times:  []time.Duration{0, second}, code: codes.Unavailable, reason: ErrPushback, elapsed: 2 * second},

		// 5. Pushback: wait.
		{name: "a wait, then the delay again", attempt: 4, delay: second, script: []answer{never, pushedBack("3000"), never, says("d")},
			times: []time.Duration{0, second, 4 * second, 5 * second}, want: "d", elapsed: 5 * second},
		{name: "a wait with nothing under way", attempt: 3, delay: second, script: []answer{pushedBack("3000"), says("b")},
			times: []time.Duration{0, 3 * second}, want: "b", elapsed: 3 * second},
		{name: "a wait shorter than the delay", attempt: 3, delay: 9 * second, script: []answer{pushedBack("1000"), never, says("c")},
			times: []time.Duration{0, second, 10 * second}, want: "c", elapsed: 10 * second},
		{name: "a wait, then a failure without: now", attempt: 4, delay: second,
			script: []answer{unavailable().after(2 * second), pushedBack("9000"), says("c")},
			times:  []time.Duration{0, second, 2 * second}, want: "c", elapsed: 2 * second},
		{name: "two waits: the newer word counts", attempt: 4, delay: second,
			script: []answer{pushedBack("1500").after(2 * second), pushedBack("9000"), says("c")},
			times:  []time.Duration{0, second, 7 * second / 2}, want: "c", elapsed: 7 * second / 2},
		{name: "the first wins in a wait", attempt: 3, delay: second,
			script: []answer{says("a").after(3 * second), pushedBack("60000")},
			times:  []time.Duration{0, second}, want: "a", elapsed: 3 * second},
		{name: "a wait of the last attempt", attempt: 2, delay: second, script: []answer{pushedBack("0"), pushedBack("1000")},
			times: []time.Duration{0, 0}, code: codes.Unavailable, reason: ErrAttemptsExhausted},
		{name: "a wait over MaxServerDelay sends no more", attempt: 3, delay: second,
			script: []answer{says("a").after(5 * second), pushedBack("300001")},
			times:  []time.Duration{0, second}, want: "a", elapsed: 5 * second},
		{name: "a wait past the deadline sends no more", attempt: 3, delay: second, timeout: 6 * second,
			script: []answer{says("a").after(5 * second), pushedBack("5000")},
			times:  []time.Duration{0, second}, want: "a", elapsed: 5 * second},
		{name: "RetryInfo is a wait, spread", attempt: 3, delay: second,
			script: []answer{fail(codes.Unavailable, "x", retryInfoOf(10*second)), says("b")},
			times:  []time.Duration{0, 11 * second}, want: "b", elapsed: 11 * second},

		// Limits.
		{name: "the deadline", attempt: 9, delay: second, timeout: 5 * second / 2, script: []answer{never, never, never},
			times: []time.Duration{0, second, 2 * second}, code: codes.DeadlineExceeded, reason: context.DeadlineExceeded, elapsed: 5 * second / 2},
		{name: "MaxElapsed", attempt: 9, delay: second, opts: []Option{WithMaxElapsed(2 * second)},
			script: []answer{says("a").after(9 * second), never},
			times:  []time.Duration{0, second}, want: "a", elapsed: 9 * second},
		{name: "the attempt timeout of each", attempt: 3, delay: second, opts: []Option{WithAttemptTimeout(3 * second / 2)},
			script: []answer{hang(), hang(), says("c")},
			times:  []time.Duration{0, second, 3 * second / 2}, want: "c", elapsed: 3 * second / 2},
		{name: "an empty budget ends nothing", attempt: 3, delay: second, refuse: true, script: []answer{says("a").after(9 * second)},
			times: []time.Duration{0}, want: "a", elapsed: 9 * second},
		{name: "an empty budget with nothing under way", attempt: 3, delay: second, refuse: true, script: []answer{unavailable().after(3 * second)},
			times: []time.Duration{0}, code: codes.Unavailable, reason: ErrBudgetExhausted, elapsed: 3 * second},

		// Codes.
		{name: "own non-fatal codes", attempt: 2, delay: second, script: []answer{fail(codes.Internal, "x"), says("b")},
			opts:  []Option{hedged(Hedging{Delay: HedgeAfter(second), NonFatalCodes: []codes.Code{codes.Internal}})},
			times: []time.Duration{0, 0}, want: "b"},
		{name: "own non-fatal codes replace those of the policy", attempt: 2, delay: second, script: []answer{unavailable()},
			opts:  []Option{hedged(Hedging{Delay: HedgeAfter(second), NonFatalCodes: []codes.Code{codes.Internal}})},
			times: []time.Duration{0}, code: codes.Unavailable},
		{name: "no non-fatal codes at all", attempt: 2, delay: second, script: []answer{unavailable()},
			opts:  []Option{hedged(Hedging{Delay: HedgeAfter(second), NonFatalCodes: []codes.Code{}})},
			times: []time.Duration{0}, code: codes.Unavailable},
		{name: "a classifier", attempt: 2, delay: second, script: []answer{fail(codes.NotFound, "x"), says("b")},
			opts:  []Option{WithClassifier(func(context.Context, Attempt) Classification { return Retry })},
			times: []time.Duration{0, 0}, want: "b"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, script(tt.script...))
				budget := &aBudget{refuse: tt.refuse}
				events := &hedgeEvents{}
				client := server.fixed(t, 0.5, append([]Option{steady, WithBudget(budget), WithObserver(events.observe),
					hedged(Hedging{MaxAttempts: tt.attempt, Delay: HedgeAfter(tt.delay)})}, tt.opts...)...)
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
				switch {
				case tt.want != "" && (err != nil || reply.GetMessage() != tt.want):
					t.Errorf("Echo = %q, %v, want %q", reply.GetMessage(), err, tt.want)
				case tt.want != "":
				case tt.reason == nil:
					wantUntouched(t, err, tt.code, status.Convert(err).Message())
				default:
					wantStop(t, err, tt.code, tt.reason, len(tt.times))
				}
				events.check(t, err)
				wantAccounts(t, budget, len(tt.times))
			})
		})
	}
}

// wantAccounts: the budget has heard each attempt once, and got back what was not sent.
func wantAccounts(t *testing.T, b *aBudget, attempts int) {
	t.Helper()
	var heard []int
	for _, o := range b.heard {
		heard = append(heard, o.Attempt)
	}
	slices.Sort(heard)
	for i, number := range heard {
		if number != i+1 {
			t.Errorf("budget heard of the attempts %v, want each of %d once", heard, attempts)
			break
		}
	}
	granted := len(b.asked) - b.refunded
	if b.refuse {
		granted = 0
	}
	if len(heard) != attempts || granted != attempts-1 {
		t.Errorf("budget heard of %d attempts and paid for %d, want %d and %d", len(heard), granted, attempts, attempts-1)
	}
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
			good = seen && last == AttemptEnd && !errors.Is(e.Attempt.Err, ErrHedgeLost) && e.Retry == (e.Reason == nil)
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

// lines is one line for each event.
func (h *hedgeEvents) lines() []string {
	var lines []string
	for _, e := range h.events {
		line := fmt.Sprintf("%s #%d", e.Kind, e.Attempt.Number)
		switch e.Kind {
		case AttemptStart:
			line += fmt.Sprintf(" hedge=%v after %v of %s", e.Attempt.Hedge, e.Attempt.Wait, e.Attempt.WaitSource)
		case AttemptEnd:
			line += fmt.Sprintf(" %s lost=%v", codeName(e.Attempt.Code()), errors.Is(e.Attempt.Err, ErrHedgeLost))
		case Decision:
			line += fmt.Sprintf(" retry=%v", e.Retry)
		case CallEnd:
			line += " " + OutcomeName(e)
		}
		lines = append(lines, line)
	}
	return lines
}

func TestEventsOfAHedgedCall(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(says("a").after(time.Hour), unavailable().after(second/10), says("c").after(second/10)))
		events := &hedgeEvents{}
		server.client(t, WithObserver(events.observe), hedged(Hedging{MaxAttempts: 3, Delay: HedgeAfter(second)})).
			Echo(t.Context(), request())
		want := []string{
			"attempt_start #1 hedge=false after 0s of none",
			"attempt_start #2 hedge=true after 1s of hedge_delay",
			"attempt_end #2 UNAVAILABLE lost=false",
			"decision #2 retry=true",
			"attempt_start #3 hedge=true after 0s of non_fatal",
			"attempt_end #1 CANCELLED lost=true",
			"attempt_end #3 OK lost=false",
			"call_end #3 hedge_won",
		}
		if got := events.lines(); !slices.Equal(got, want) {
			t.Errorf("events are\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
	})
}

func TestCancelEndsAHedgedCallAtOnce(t *testing.T) {
	for name, script := range map[string]func(int) answer{
		"attempts under way": always(hang()),
		"in a wait":          always(unavailable().pushback("60000")),
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, script)
				budget := &aBudget{}
				ctx, cancel := context.WithCancel(t.Context())
				time.AfterFunc(3*second/2, cancel)
				_, err := server.client(t, WithBudget(budget), hedged(Hedging{MaxAttempts: 3, Delay: HedgeAfter(second)})).Echo(ctx, request())
				if status.Code(err) != codes.Canceled || !errors.Is(err, context.Canceled) {
					t.Errorf("Echo = %v, want the cancellation", err)
				}
				if got := time.Since(server.start); got != 3*second/2 {
					t.Errorf("Echo took %v, want 1.5s", got)
				}
				wantAccounts(t, budget, len(server.attempts()))
			})
		})
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
				cc := server.conn(t, DialOptions(hedged(Hedging{MaxAttempts: 3, Delay: HedgeAfter(second)}))...)
				time.AfterFunc(3*second/2, func() { cc.Close() })
				_, err := echov1.NewEchoServiceClient(cc).Echo(t.Context(), request())
				if !errors.Is(err, ErrConnClosed) && status.Code(err) != codes.Canceled {
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
		below := func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
			err := invoker(ctx, method, req, reply, cc, opts...)
			a, _ := AttemptFromContext(ctx)
			causes[a.Number] = context.Cause(ctx) // the losers end before the winner's caller goes on
			return err
		}
		cc := server.conn(t, append(DialOptions(hedged(Hedging{Delay: HedgeAfter(second)})),
			grpc.WithChainUnaryInterceptor(below))...)
		reply, err := echov1.NewEchoServiceClient(cc).Echo(t.Context(), request())
		if reply.GetMessage() != "b" || err != nil {
			t.Errorf("Echo = %v, %v, want b", reply, err)
		}
		if causes[1] != ErrHedgeLost || causes[2] != nil {
			t.Errorf("causes are %v, want ErrHedgeLost of the first only", causes)
		}
	})
}

// Each attempt starts from the caller's metadata and tells the server how many were sent.
func TestServerIsToldOfHedges(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(says("x").after(5*second/2)))
		ctx := metadata.AppendToOutgoingContext(t.Context(), "who", "me")
		server.client(t, hedged(Hedging{MaxAttempts: 3, Delay: HedgeAfter(second)})).Echo(ctx, request())
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
