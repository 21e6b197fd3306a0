package grpcretry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"
	"google.golang.org/grpc/status"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

const echoMethod = "/grpcretry.test.v1.EchoService/Echo"

// hedged hedges the method Echo.
// hedged hedges the calls of a test. Unless the test is about the budget of hedges, there is none:
// a new client could not send any.
func hedged(h Hedging) Option {
	if h.Budget == nil {
		h.Budget = Unlimited
	}
	return WithMethod(echoMethod, WithHedging(h))
}

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
		{name: "a wait, then a failure without: the wait holds for the call", attempt: 4, delay: second,
			script: []answer{unavailable().after(2 * second), pushedBack("9000"), says("c")},
			times:  []time.Duration{0, second, 10 * second}, want: "c", elapsed: 10 * second},
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
			line += " " + e.Outcome()
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

// While an observer takes its time, others wait in the order in which they came.
func TestASlowObserverHoldsUpButReordersNothing(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(says("a").after(22*second/10), fail(codes.NotFound, "x").after(14*second/10), hang()))
		events := &hedgeEvents{}
		slow := WithObserver(func(_ context.Context, e Event) {
			if e.Kind == AttemptStart && e.Attempt.Number == 3 {
				time.Sleep(second)
			}
		})
		client := server.client(t, WithObserver(events.observe), slow, hedged(Hedging{MaxAttempts: 3, Delay: HedgeAfter(second)}))
		reply, err := client.Echo(t.Context(), request())
		if reply.GetMessage() != "a" || err != nil {
			t.Errorf("Echo = %v, %v, want a, which came before the failure", reply, err)
		}
		if got := time.Since(server.start); got != 3*second {
			t.Errorf("Echo took %v, want 3s", got)
		}
		events.check(t, err)
	})
}

// While an observer takes its time, the delay of the next attempt may pass: what is decided
// then counts, and from then on.
func TestASlowObserverMovesTheDelay(t *testing.T) {
	slow := WithObserver(func(_ context.Context, e Event) {
		if e.Kind == Decision {
			time.Sleep(second)
		}
	})
	for _, tt := range []struct {
		name   string
		script []answer
		want   []time.Duration
	}{
		{"a failure sends the next now", []answer{unavailable().after(second / 2), hang(), ok()}, []time.Duration{0, 3 * second / 2, 5 * second / 2}},
		{"a failure asks for a wait", []answer{unavailable().after(second / 2).pushback("2000"), ok()}, []time.Duration{0, 5 * second / 2}},
		{"a failure forbids more", []answer{ok().after(9 * second), unavailable().after(second / 2).pushback("-1")}, []time.Duration{0, second}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, script(tt.script...))
				events := &hedgeEvents{}
				client := server.client(t, WithObserver(events.observe), slow, hedged(Hedging{MaxAttempts: 3, Delay: HedgeAfter(second)}))
				_, err := client.Echo(t.Context(), request())
				events.check(t, err)
				wantTimes(t, server, tt.want...)
				for _, e := range events.events {
					if got := e.Attempt.Start.Sub(server.start); got != tt.want[e.Attempt.Number-1] {
						t.Errorf("%v of attempt %d says that it was sent after %v, want %v", e.Kind, e.Attempt.Number, got, tt.want[e.Attempt.Number-1])
					}
				}
			})
		})
	}
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

// A caller that asks for only one of header, trailer and peer: no hedge is given the caller's
// own, and the caller gets the winner's.
func TestHedgesAreNotGivenWhatIsTheCallers(t *testing.T) {
	var header, trailer metadata.MD
	var at peer.Peer
	for _, tt := range []struct {
		name string
		opt  grpc.CallOption
		got  func() string
	}{
		{"header", grpc.Header(&header), func() string { return first(header["of"]) }},
		{"trailer", grpc.Trailer(&trailer), func() string { return first(trailer["of"]) }},
		{"peer", grpc.Peer(&at), func() string { return at.Addr.String() }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				invoker := func(ctx context.Context, _ string, _, _ any, _ *grpc.ClientConn, opts ...grpc.CallOption) error {
					a, _ := AttemptFromContext(ctx)
					if a.Number == 1 {
						<-ctx.Done()
						fill(opts, "loser")
						return ctx.Err()
					}
					if slices.Contains(opts, tt.opt) {
						t.Errorf("attempt %d was given the caller's own", a.Number)
					}
					fill(opts, "winner")
					return nil
				}
				err := UnaryClientInterceptor(hedged(Hedging{Delay: HedgeAfter(second)}))(
					t.Context(), echoMethod, request(), &echov1.EchoResponse{}, nil, invoker, tt.opt)
				if err != nil || tt.got() != "winner" {
					t.Errorf("the caller got that of the %s, %v, want that of the winner", tt.got(), err)
				}
			})
		})
	}
}

// fill does what gRPC does with what is asked for.
func fill(opts []grpc.CallOption, of string) {
	for _, opt := range opts {
		switch opt := opt.(type) {
		case grpc.HeaderCallOption:
			*opt.HeaderAddr = metadata.Pairs("of", of)
		case grpc.TrailerCallOption:
			*opt.TrailerAddr = metadata.Pairs("of", of)
		case grpc.PeerCallOption:
			*opt.PeerAddr = peer.Peer{Addr: named(of)}
		case *attempt:
			*opt.PeerAddr = peer.Peer{Addr: named(of)}
		}
	}
}

// named is an address.
type named string

func (named) Network() string  { return "" }
func (n named) String() string { return string(n) }

// hedgedEcho is a call of Echo for tests that need more control of
// the attempts than a server has: run is attempt number n.
func hedgedEcho(ctx context.Context, run func(ctx context.Context, n int) error, opts ...Option) error {
	invoker := func(ctx context.Context, _ string, _, _ any, _ *grpc.ClientConn, _ ...grpc.CallOption) error {
		a, _ := AttemptFromContext(ctx)
		return run(ctx, a.Number)
	}
	return UnaryClientInterceptor(opts...)(ctx, echoMethod, request(), &echov1.EchoResponse{}, nil, invoker)
}

// To a unary call io.EOF, of an interceptor below, is a failure as any other.
func TestEOFIsNoSuccessOfAHedgedUnaryCall(t *testing.T) {
	bubble(t, func(t *testing.T) {
		for _, after := range []time.Duration{0, 2 * second} { // alone, and beside a hedge
			events := &hedgeEvents{}
			err := hedgedEcho(t.Context(), func(ctx context.Context, n int) error {
				if n == 1 {
					time.Sleep(after)
					return io.EOF
				}
				<-ctx.Done()
				return ctx.Err()
			}, WithObserver(events.observe), hedged(Hedging{Delay: HedgeAfter(second)}))
			if err != io.EOF {
				t.Errorf("a call whose first attempt returned io.EOF after %v returned %v", after, err)
			}
			events.check(t, err)
		}
	})
}

// A panic of what a caller gives us, or of an attempt below, is the caller's where it
// happens on its goroutine, and nothing of the call is left then: the other attempts have
// ended, and what was paid for is given back.
func TestAPanicOfAHedgedCallIsTheCallers(t *testing.T) {
	during := func(kind EventKind) Option {
		return WithObserver(func(_ context.Context, e Event) {
			if e.Kind == kind && e.Attempt.Number == 1 {
				panic("drawn")
			}
		})
	}
	stop := func(context.Context, Attempt) Classification { panic("drawn") }
	for _, tt := range []struct {
		name  string
		first func() error
		opts  []Option
	}{
		{"an attempt", func() error { panic("drawn") }, nil},
		{"the classifier", func() error { return errUnavailable }, []Option{WithClassifier(stop)}},
		{"an observer of a failure", func() error { return errUnavailable }, []Option{during(AttemptEnd)}},
		{"an observer of a decision", func() error { return errUnavailable }, []Option{during(Decision)}},
		{"the delay", func() error { return nil }, []Option{hedged(Hedging{Delay: panickyDelay{HedgeAfter(second)}})}},
	} {
		for _, after := range []time.Duration{second / 2, second, 3 * second / 2} { // before the hedge, with it, and while it runs
			if tt.name != "an attempt" && after == second {
				continue // the panic may be the timer's, and end the program
			}
			t.Run(fmt.Sprint(tt.name, " after ", after), func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					budget := &aBudget{}
					var mu sync.Mutex
					open, hedges := 0, 0
					var first context.Context
					defer func() {
						if got := recover(); got != "drawn" {
							t.Errorf("recovered %v, want what was thrown", got)
						}
						mu.Lock()
						defer mu.Unlock()
						if open != 0 {
							t.Errorf("%d attempts run on after the call", open)
						}
						if first.Err() == nil {
							t.Error("the context of the first attempt is alive after the call")
						}
						if paid := len(budget.asked) - budget.refunded; paid != hedges {
							t.Errorf("%d hedges were sent and %d paid for", hedges, paid)
						}
						heard := 0
						for _, o := range budget.heard {
							if o.Attempt > 1 {
								heard++
								if o.Result != Ignored {
									t.Errorf("budget heard %v of a hedge, want Ignored", o.Result)
								}
							}
						}
						if heard != hedges {
							t.Errorf("budget heard of %d hedges, want %d", heard, hedges)
						}
					}()
					hedgedEcho(t.Context(), func(ctx context.Context, n int) error {
						if n == 1 {
							first = ctx
							time.Sleep(after)
							return tt.first()
						}
						mu.Lock()
						open++
						hedges++
						mu.Unlock()
						<-ctx.Done()
						time.Sleep(second) // it takes its time to end
						mu.Lock()
						defer mu.Unlock()
						open--
						return ctx.Err()
					}, append([]Option{WithBudget(budget), hedged(Hedging{Delay: HedgeAfter(second)})}, tt.opts...)...)
				})
			})
		}
	}
}

type panickyDelay struct{ HedgeDelay }

func (panickyDelay) Answered(string, time.Duration, bool, time.Time) { panic("drawn") }

// The contexts of all attempts end with the call, and nothing stays with the caller's.
func TestNothingOfAHedgedCallStays(t *testing.T) {
	retryPolicy := grpc.WithDefaultServiceConfig(`{"methodConfig":[{"name":[{}],"retryPolicy":{"maxAttempts":2,` +
		`"initialBackoff":"1s","maxBackoff":"1s","backoffMultiplier":1,"retryableStatusCodes":["ABORTED"]}}]}`)
	for _, tt := range []struct {
		name   string
		script func(int) answer
		dial   []grpc.DialOption
	}{
		{"success", script(ok()), nil},
		{"the hedge wins", script(hang(), ok()), nil},
		{"the first wins", script(ok().after(3*second/2), hang()), nil},
		{"a fatal failure", script(hang(), fail(codes.NotFound, "x")), nil},
		{"all fail", always(unavailable()), nil},
		{"left to gRPC", script(unavailable()), []grpc.DialOption{retryPolicy}},
		{"left to gRPC, and slow", script(unavailable().after(9 * second)), []grpc.DialOption{retryPolicy}},
		{"attempt timeouts", always(hang()), nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, tt.script)
				var mu sync.Mutex
				var attempts []*attempt
				note := func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
					mu.Lock()
					attempts = append(attempts, ctx.Value(attemptKey{}).(*attempt))
					mu.Unlock()
					return invoker(ctx, method, req, reply, cc, opts...)
				}
				cc := server.conn(t, append(tt.dial, grpc.WithChainUnaryInterceptor(UnaryClientInterceptor(
					WithAttemptTimeout(20*second), hedged(Hedging{Delay: HedgeAfter(second)})), note))...)
				ctx := &countingContext{Context: context.WithoutCancel(t.Context())}
				echov1.NewEchoServiceClient(cc).Echo(ctx, request())
				if got := ctx.number(); got != 0 {
					t.Errorf("%d functions wait for the end of the caller's context after the call", got)
				}
				for _, a := range attempts {
					if a.bounds.timer != nil && a.bounds.timer.Stop() {
						t.Errorf("the timer of attempt %d runs on", a.number)
					}
					if a.Err() == nil {
						t.Errorf("the context of attempt %d is alive", a.number)
					}
				}
				if len(attempts) == 0 {
					t.Error("no attempts")
				}
			})
		})
	}
}

// What gRPC retries itself is not hedged: it gets one attempt, and its error as it comes.
func TestHedgedCallsLeftToGRPC(t *testing.T) {
	for _, tt := range []struct {
		name   string
		script func(int) answer
		code   codes.Code
		want   []time.Duration
		logs   bool // told to the logger, at the failure
	}{
		{"success", script(ok().after(5 * second)), codes.OK, []time.Duration{0}, false},
		{"a failure that gRPC does not retry", script(unavailable()), codes.Unavailable, []time.Duration{0}, true},
		{"a slow one", script(unavailable().after(5 * second)), codes.Unavailable, []time.Duration{0}, true},
		{"gRPC's own retries", script(fail(codes.Aborted, "x").pushback("1000"), fail(codes.NotFound, "x")), codes.NotFound, []time.Duration{0, second}, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, tt.script)
				budget, events, logs := &aBudget{}, &hedgeEvents{}, &logRecorder{}
				cc := server.conn(t, grpc.WithDefaultServiceConfig(`{"methodConfig":[{"name":[{}],"retryPolicy":{"maxAttempts":2,`+
					`"initialBackoff":"1s","maxBackoff":"1s","backoffMultiplier":1,"retryableStatusCodes":["ABORTED"]}}]}`),
					grpc.WithChainUnaryInterceptor(UnaryClientInterceptor(WithBudget(budget), WithObserver(events.observe), WithLogger(slog.New(logs)),
						hedged(Hedging{MaxAttempts: 9, Delay: HedgeAfter(second)}))))
				_, err := echov1.NewEchoServiceClient(cc).Echo(t.Context(), request())
				wantTimes(t, server, tt.want...)
				events.check(t, err)
				if tt.code != codes.OK {
					wantUntouched(t, err, tt.code, status.Convert(err).Message())
				}
				if status.Code(err) != tt.code || len(budget.asked) != 0 || len(budget.heard) != 1 {
					t.Errorf("Echo = %v, budget asked at %v and told %v, want %v, never and once", err, budget.asked, budget.heard, tt.code)
				}
				for _, e := range events.events {
					if (e.Kind == Decision || e.Kind == CallEnd && err != nil) && e.Reason != ErrLeftToGRPC {
						t.Errorf("%v has reason %v, want that it is left to gRPC", e.Kind, e.Reason)
					}
				}
				if tt.logs {
					wantLines(t, logs, "WARN…leaving it to gRPC")
				} else {
					wantLines(t, logs)
				}
			})
		})
	}
}

// Nothing is sent any more when the caller has gone, also while attempts take their time
// to notice.
func TestNoHedgeForACallerThatHasGone(t *testing.T) {
	for name, pushback := range map[string]string{"a hedge": "", "a retry": "1000"} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				budget := &aBudget{}
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				time.AfterFunc(3*second/2, cancel)
				var mu sync.Mutex
				sent := 0
				err := hedgedEcho(ctx, func(ctx context.Context, n int) error {
					mu.Lock()
					sent++
					mu.Unlock()
					if n == 2 && pushback != "" {
						return fail(codes.Unavailable, "x", retryInfoOf(second)).err
					}
					time.Sleep(5 * second) // deaf
					return ctx.Err()
				}, WithBudget(budget), hedged(Hedging{MaxAttempts: 9, Delay: HedgeAfter(second)}))
				if status.Code(err) != codes.Canceled || sent != 2 {
					t.Errorf("%d attempts, and %v, want 2 and the cancellation", sent, err)
				}
				wantAccounts(t, budget, 2)
			})
		})
	}
	t.Run("closed", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			server := serve(t, always(hang()))
			slow := func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
				defer time.Sleep(5 * second)
				return invoker(ctx, method, req, reply, cc, opts...)
			}
			events := &hedgeEvents{}
			cc := server.conn(t, append(DialOptions(WithObserver(events.observe), hedged(Hedging{MaxAttempts: 9, Delay: HedgeAfter(second)})),
				grpc.WithChainUnaryInterceptor(slow))...)
			time.AfterFunc(3*second/2, func() { cc.Close() })
			_, err := echov1.NewEchoServiceClient(cc).Echo(t.Context(), request())
			events.check(t, err)
			if got := len(events.events[len(events.events)-1].Attempts); got != 2 {
				t.Errorf("%d attempts, the last after the connection was closed, want 2", got)
			}
		})
	})
}

// tokens is a budget of a few retries.
type tokens struct {
	aBudget
	left int // guarded by mu
}

func (b *tokens) Withdraw(now time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.asked = append(b.asked, now)
	if b.left == 0 {
		return false
	}
	b.left--
	return true
}

func (b *tokens) Refund() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.left++
	b.refunded++
}

// An attempt that waits for what a server asked is paid for: when another attempt fails
// meanwhile, it needs no second token.
func TestTheLastTokenIsNotAskedForTwice(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(unavailable().after(2*second), unavailable().pushback("9000"), says("c")))
		budget, events := &tokens{left: 2}, &hedgeEvents{}
		reply, err := server.client(t, WithBudget(budget), WithObserver(events.observe),
			hedged(Hedging{MaxAttempts: 4, Delay: HedgeAfter(second)})).Echo(t.Context(), request())
		if reply.GetMessage() != "c" || err != nil {
			t.Errorf("Echo = %v, %v, want c", reply, err)
		}
		wantTimes(t, server, 0, second, 10*second)
		events.check(t, err)
		if budget.left != 0 || len(budget.asked) != 2 || budget.refunded != 0 {
			t.Errorf("budget has %d left, was asked %d times and got %d back, want 0, 2 and 0", budget.left, len(budget.asked), budget.refunded)
		}
	})
}

// A budget that is used up is asked again, for a call that goes on to be slow, but less and
// less often: it is used up by thousands of such calls at once.
func TestAnEmptyBudgetIsAskedLessAndLess(t *testing.T) {
	for _, tt := range []struct {
		delay time.Duration
		want  []time.Duration // when the budget is asked; it allows the last
	}{
		{second, []time.Duration{1 * second, 2 * second, 4 * second, 8 * second, 16 * second}},
		{0, []time.Duration{0, 1 * time.Millisecond, 3 * time.Millisecond, 7 * time.Millisecond, 15 * time.Millisecond}},
	} {
		bubble(t, func(t *testing.T) {
			server := serve(t, script(says("a").after(time.Hour), says("b")))
			budget := &tokens{}
			time.AfterFunc(tt.want[4]-1, budget.Refund)
			server.client(t, WithBudget(budget), hedged(Hedging{Delay: HedgeAfter(tt.delay)})).Echo(t.Context(), request())
			wantTimes(t, server, 0, tt.want[4])
			var asked []time.Duration
			for _, at := range budget.asked {
				asked = append(asked, at.Sub(server.start))
			}
			if !slices.Equal(asked, tt.want) {
				t.Errorf("with delay %v the budget was asked at %v, want %v", tt.delay, asked, tt.want)
			}
		})
	}
}

// A channel may lose its connection while an attempt goes on there, as when a server shuts
// down in peace: then a hedge is what connects it again.
func TestAHedgeWakesAnIdleChannel(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(says("a").after(3*second)))
		events := &hedgeEvents{}
		cc := server.conn(t, grpc.WithChainUnaryInterceptor(UnaryClientInterceptor(
			WithObserver(events.observe), hedged(Hedging{Delay: HedgeAfter(second)}))))
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

// Whether gRPC retries a method itself is known when the channel is ready: until then there
// is no hedge, which could not be sent anyway.
func TestNoHedgeBeforeTheServiceConfigIsKnown(t *testing.T) {
	for _, tt := range []struct {
		name   string
		config string
		want   []time.Duration
	}{
		{"left to gRPC", `{"methodConfig":[{"name":[{}],"retryPolicy":{"maxAttempts":2,"initialBackoff":"1s","maxBackoff":"1s",` +
			`"backoffMultiplier":1,"retryableStatusCodes":["ABORTED"]}}]}`, []time.Duration{3 * second / 2}},
		{"hedged", `{}`, []time.Duration{3 * second / 2, 2 * second}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, script(says("a").after(2*second), says("b").after(time.Hour)))
				slow := manual.NewBuilderWithScheme("slow")
				cc := server.connTo(t, "slow:///echo", grpc.WithResolvers(slow), grpc.WithDefaultServiceConfig(tt.config),
					grpc.WithChainUnaryInterceptor(UnaryClientInterceptor(hedged(Hedging{Delay: HedgeAfter(second)}))))
				time.AfterFunc(3*second/2, func() {
					slow.UpdateState(resolver.State{Addresses: []resolver.Address{{Addr: "echo"}}})
				})
				reply, err := echov1.NewEchoServiceClient(cc).Echo(t.Context(), request())
				if reply.GetMessage() != "a" || err != nil {
					t.Errorf("Echo = %v, %v, want a", reply, err)
				}
				wantTimes(t, server, tt.want...)
			})
		})
	}
}

// A service config that comes while attempts are under way, and leaves the method to gRPC,
// takes nothing away from a call that is hedged already.
func TestACallThatIsHedgedStaysSo(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(unavailable().after(3*second/2), says("b").after(second)))
		changing := manual.NewBuilderWithScheme("changing")
		addresses := []resolver.Address{{Addr: "echo"}}
		changing.InitialState(resolver.State{Addresses: addresses})
		cc := server.connTo(t, "changing:///echo", grpc.WithResolvers(changing),
			grpc.WithChainUnaryInterceptor(UnaryClientInterceptor(hedged(Hedging{Delay: HedgeAfter(second)}))))
		time.AfterFunc(5*second/4, func() {
			changing.UpdateState(resolver.State{Addresses: addresses, ServiceConfig: changing.CC().ParseServiceConfig(
				`{"methodConfig":[{"name":[{}],"retryPolicy":{"maxAttempts":2,"initialBackoff":"1s","maxBackoff":"1s",` +
					`"backoffMultiplier":1,"retryableStatusCodes":["ABORTED"]}}]}`)})
		})
		reply, err := echov1.NewEchoServiceClient(cc).Echo(t.Context(), request())
		if reply.GetMessage() != "b" || err != nil {
			t.Errorf("Echo = %v, %v, want b", reply, err)
		}
		wantTimes(t, server, 0, second)
		if cc.GetMethodConfig(echoMethod).RetryPolicy == nil {
			t.Error("the service config did not come: this shows nothing")
		}
	})
}

// What happened before a panic, and waits to be handled, is not handled after it: it
// might panic again.
func TestAfterAPanicNobodyIsTold(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var mu sync.Mutex
		asked, events, open := 0, 0, 0
		defer func() {
			if got := recover(); got != "drawn" {
				t.Errorf("recovered %v, want what was thrown", got)
			}
			mu.Lock()
			defer mu.Unlock()
			if asked != 1 || open != 0 || events != 3 {
				t.Errorf("the classifier was asked %d times, %d attempts run on, and there were %d events, want 1, 0 and 3 starts", asked, open, events)
			}
		}()
		hedgedEcho(t.Context(), func(ctx context.Context, n int) error {
			mu.Lock()
			open++
			mu.Unlock()
			defer func() {
				mu.Lock()
				defer mu.Unlock()
				open--
			}()
			switch n {
			case 1:
				time.Sleep(5 * second / 2)
				return errUnavailable
			case 2:
				time.Sleep(2 * second) // fails while the classifier is asked about the first
				return errUnavailable
			}
			<-ctx.Done()
			return ctx.Err()
		}, WithObserver(func(context.Context, Event) { mu.Lock(); events++; mu.Unlock() }),
			WithClassifier(func(context.Context, Attempt) Classification {
				mu.Lock()
				asked++
				mu.Unlock()
				time.Sleep(second)
				panic("drawn")
			}), hedged(Hedging{MaxAttempts: 3, Delay: HedgeAfter(second)}))
	})
}

// The timer too ends with the call.
func TestTheTimerOfAHedgedCallEnds(t *testing.T) {
	bubble(t, func(t *testing.T) {
		for name, run := range map[string]func(n int) error{
			"the hedge wins": func(n int) error { time.Sleep(time.Duration(3-n) * second); return nil },
			"success":        func(int) error { return nil },
			"a fatal failure": func(n int) error {
				time.Sleep(time.Duration(3-n) * second)
				return io.EOF
			},
			"no more": func(n int) error { return fail(codes.Unavailable, "x", retryInfoOf(time.Hour)).err },
		} {
			r, err := New(hedged(Hedging{MaxAttempts: 3, Delay: HedgeAfter(3 * second / 4)}), WithMaxServerDelay(time.Minute))
			if err != nil {
				t.Fatal(err)
			}
			u := &hedgedUnary{reply: &echov1.EchoResponse{}, replies: typeOfReply(&echov1.EchoResponse{})}
			u.invoker = func(ctx context.Context, _ string, _, _ any, _ *grpc.ClientConn, _ ...grpc.CallOption) error {
				return run(int(ctx.(*attempt).number))
			}
			u.hedging.attempts, u.hedging.first, u.hedging.delay = u, &u.first, 3*second/4
			c := call{rpc: rpc{retrier: r, facts: facts{ctx: t.Context(), method: echoMethod, policy: r.policies.of(echoMethod).hedged}, delay: 3 * second / 4}}
			c.begin(&u.first)
			u.rpc = c.rpc
			u.hedging.run()
			if u.hedging.timer.Stop() {
				t.Errorf("%s: the timer runs on", name)
			}
		}
	})
}

// An attempt that never asks for its context's Done has none made; what it was ended by
// can be told all the same.
func TestTheContextOfAnAttemptIsMadeLate(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var mu sync.Mutex
		contexts := map[int]context.Context{}
		err := hedgedEcho(t.Context(), func(ctx context.Context, n int) error {
			mu.Lock()
			contexts[n] = ctx
			mu.Unlock()
			time.Sleep(time.Duration(4-2*n) * second) // the second is quicker
			return nil
		}, hedged(Hedging{Delay: HedgeAfter(second)}))
		if err != nil || len(contexts) != 2 {
			t.Fatalf("%d attempts, and %v", len(contexts), err)
		}
		for n, want := range map[int]error{1: ErrHedgeLost, 2: context.Canceled} {
			ctx := contexts[n]
			if ctx.Err() != context.Canceled || context.Cause(ctx) != want {
				t.Errorf("after the call, the context of attempt %d has ended with %v, because of %v, want %v", n, ctx.Err(), context.Cause(ctx), want)
			}
			select {
			case <-ctx.Done():
			default:
				t.Errorf("after the call, the context of attempt %d is not done", n)
			}
		}
	})
}
