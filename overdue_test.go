package grpcretry

import (
	"context"
	"errors"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// hangs opens a stream without a deadline to a server that never responds, whose attempts are overdue after a second.
func hangs(t *testing.T, desc *grpc.StreamDesc, header bool, opts ...Option) grpc.ClientStream {
	t.Helper()
	server := serveStreams(t, func(_ int, stream grpc.ServerStream) error {
		if header {
			time.Sleep(100 * time.Millisecond)
			_ = stream.SendHeader(nil)
		}
		<-stream.Context().Done()
		return nil
	})
	cc := server.conn(t, DialOptions(append(opts, WithAttemptTimeout(second), WithBackoff(Constant(second)))...)...)
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	stream, err := cc.NewStream(ctx, desc, "/streams/Expand")
	if err != nil {
		t.Fatal(err)
	}
	return stream
}

// A call without a deadline ends after the attempt timeout, also if the attempt that was to follow is not sent.
func TestAnAttemptWithoutADeadlineDoesNotHang(t *testing.T) {
	t.Run("the stream is committed while it waits for another attempt", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			stream := hangs(t, bidiStream, false)
			time.AfterFunc(1500*time.Millisecond, func() { stream.Context() })
			wantTimeoutAfter(t, 1500*time.Millisecond, stream)
		})
	})
	t.Run("Header returns beside the race of a hedged stream", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			stream := hangs(t, serverStream, true, WithMethod("/streams/Expand", WithMaxAttempts(2),
				WithHedging(Hedging{Delay: HedgeAfter(time.Hour)})))
			if err := stream.SendMsg(request()); err != nil {
				t.Fatal(err)
			}
			go stream.Header()
			synctest.Wait()
			wantTimeoutAfter(t, 3*second, stream)
		})
	})
	t.Run("a hedge is told not to retry", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			server := serve(t, script(hang(), unavailable().pushback("-1").after(900*time.Millisecond)))
			client := server.client(t, WithMethod(echoMethod, WithAttemptTimeout(second), WithBackoff(Constant(time.Minute)),
				WithHedging(Hedging{Delay: HedgeAfter(600 * time.Millisecond), Budget: Unlimited})))
			_, err := client.Echo(t.Context(), request())
			if took := time.Since(server.start); took != 1500*time.Millisecond || !errors.Is(err, ErrPushback) {
				t.Errorf("%v after %v, want ErrPushback after 1.5s", err, took)
			}
		})
	})
}

func wantTimeoutAfter(t *testing.T, d time.Duration, stream grpc.ClientStream) {
	t.Helper()
	start := time.Now()
	err := stream.RecvMsg(&echov1.EchoResponse{})
	if took := time.Since(start); took != d || !errors.Is(err, ErrAttemptTimeout) {
		t.Errorf("RecvMsg returned %v after %v, want ErrAttemptTimeout after %v", err, took, d)
	}
}

// A server has the whole timeout to answer, however long the connection took, and is then overdue.
func TestTheAttemptTimeoutIsTheServers(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(hang(), ok()))
		cc := server.conn(t, append(DialOptions(WithAttemptTimeout(2*second), WithBackoff(Constant(second))),
			grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
				time.Sleep(3 * second)
				return server.listener.DialContext(ctx)
			}))...)
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		if _, err := echov1.NewEchoServiceClient(cc).Echo(ctx, request()); err != nil {
			t.Error(err)
		}
		wantTimes(t, server, 3*second, 7*second) // looked at after 2 and 4 s, overdue after 6
	})
}

// If the call returns the status of an earlier attempt, because its later ones were cut, trailer and peer are those of
// that attempt, which need not be among the latest that Error.Attempts has.
func TestTrailerAndPeerAreThoseOfTheStatus(t *testing.T) {
	for _, attempts := range []int{2, maxKept + 2} {
		bubble(t, func(t *testing.T) {
			server := serve(t, func(n int) answer {
				if n == 1 {
					return unavailable().withTrailer("from", "1")
				}
				return hang()
			})
			client := server.client(t, WithAttemptTimeout(second), WithMaxAttempts(attempts), WithBudget(Unlimited), WithPatience(time.Hour))
			var trailer metadata.MD
			var reached peer.Peer
			_, err := client.Echo(t.Context(), request(), grpc.Trailer(&trailer), grpc.Peer(&reached))
			if got := trailer.Get("from"); status.Code(err) != codes.Unavailable || len(got) != 1 {
				t.Errorf("got %v with the trailer %v, want UNAVAILABLE with that of attempt 1", err, trailer)
			}
			if reached.Addr == nil || reached.LocalAddr == nil || reached.AuthInfo == nil {
				t.Errorf("peer = %+v, want all that gRPC knows of it", reached)
			}
		})
	}
}

// A retry that replaces an attempt is paid for when that is cut. The pushbacks of others may then move it, but not past MaxElapsed.
func TestAPaidRetryIsNotSentTooLate(t *testing.T) {
	const ms = time.Millisecond
	bubble(t, func(t *testing.T) {
		server := serve(t, script(hang(), unavailable().after(1100*ms).pushback("1000"), unavailable().after(1800*ms).pushback("2000"),
			hang(), ok()))
		slowToEnd := belowUnary(func(ctx context.Context, next func(context.Context) error) error {
			err := next(ctx)
			if a, _ := AttemptFromContext(ctx); a.Number == 1 {
				time.Sleep(500 * ms) // so that the first pushback comes before the end of the attempt that is cut
			}
			return err
		})
		hedges := newRatioBudget(RatioBudget{Ratio: Nothing, Reserve: 3, Window: second})
		retrier := retrierOf(t, WithBackoff(Constant(0)), WithBudget(Unlimited), WithPatience(0), WithMaxElapsed(3*second),
			WithMethod(echoMethod, WithMaxAttempts(5), WithAttemptTimeout(second),
				WithHedging(Hedging{Delay: HedgeAfter(100 * ms), Budget: hedges})))
		client := echov1.NewEchoServiceClient(server.conn(t, append(retrier.DialOptions(), slowToEnd)...))
		_, err := client.Echo(t.Context(), request())
		if !errors.Is(err, ErrMaxElapsed) {
			t.Errorf("error %v, want %v", err, ErrMaxElapsed)
		}
		wantTimes(t, server, 0, 100*ms, 200*ms, 300*ms)
	})
}

// While the retry that replaces one attempt waits for its backoff, the timeouts of the others wait until it is sent: those attempts
// may still respond, although the call has no deadline, and are replaced only after it.
func TestTheTimeoutsOfOthersWaitForAReplacement(t *testing.T) {
	const ms = time.Millisecond
	for _, tt := range []struct {
		name  string
		hedge answer
		took  time.Duration
		sent  []time.Duration
	}{
		{"the hedge responds meanwhile", ok().after(1400 * ms), 1700 * ms, []time.Duration{0, 300 * ms, 1500 * ms}},
		{"the hedge is replaced as well", hang(), 2000 * ms, []time.Duration{0, 300 * ms, 1500 * ms, 2000 * ms}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, script(hang(), tt.hedge, hang(), ok()))
				oneHedge := newRatioBudget(RatioBudget{Ratio: Nothing, Reserve: 1, Window: second})
				client := server.client(t, WithBackoff(Constant(500*ms)), WithBudget(Unlimited), WithMethod(echoMethod,
					WithAttemptTimeout(second), WithHedging(Hedging{Delay: HedgeAfter(300 * ms), Budget: oneHedge})))
				if _, err := client.Echo(t.Context(), request()); err != nil || time.Since(server.start) != tt.took {
					t.Errorf("%v after %v, want a response after %v", err, time.Since(server.start), tt.took)
				}
				wantTimes(t, server, tt.sent...)
			})
		})
	}
}

// An overdue hedge holds a slot of the hedges' budget. If the retries' budget allows no replacement, the hedge keeps
// it as long as it is in flight.
func TestAnOverdueHedgeThatIsNotReplacedKeepsItsSlot(t *testing.T) {
	bubble(t, func(t *testing.T) {
		retries, hedges := concurrencyBudgetOf(t, 1), concurrencyBudgetOf(t, 1)
		retries.Withdraw(time.Now()) // by another call
		server := serve(t, always(hang()))
		client := server.client(t, WithBudget(retries), WithAttemptTimeout(second),
			WithHedging(Hedging{Delay: HedgeAfter(100 * time.Millisecond), Budget: hedges, AllMethodsAreSafe: true}))
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		for range 2 {
			go client.Echo(ctx, request())
			time.Sleep(2 * time.Second)
		}
		if got, free := len(server.attempts()), hedges.Balance(time.Now()); got != 3 || free != 0 {
			t.Errorf("%d attempts with %v free slots, want the first of two calls and one hedge, which has the slot", got, free)
		}
	})
}

// A retry that replaces an overdue one takes over its slot: another call cannot get it in between.
func TestASlotIsTakenOver(t *testing.T) {
	bubble(t, func(t *testing.T) {
		slots, asked := concurrencyBudgetOf(t, 1), 0
		between := &askedBudget{onWithdraw: func() {
			if asked++; asked == 2 && slots.Withdraw(time.Now()) {
				t.Error("another call has got the slot of a retry in flight")
			}
		}}
		server := serve(t, script(unavailable(), hang(), ok()))
		client := server.client(t, WithBudget(AllBudgets(between, slots)), WithPatience(0), WithAttemptTimeout(second))
		if _, err := client.Echo(t.Context(), request()); err != nil || asked != 2 || slots.Balance(time.Now()) != 1 {
			t.Errorf("Echo = %v after %d retries, with %v free slots, want success after 2, with 1", err, asked, slots.Balance(time.Now()))
		}
	})
}

// A retry after one that has taken over a slot takes a slot of its own.
func TestARetryAfterATakenSlotPays(t *testing.T) {
	bubble(t, func(t *testing.T) {
		slots := concurrencyBudgetOf(t, 2)
		slots.Withdraw(time.Now()) // by another call
		server := serve(t, script(unavailable(), hang(), unavailable(), ok()))
		client := server.client(t, WithBudget(slots), WithPatience(0), WithAttemptTimeout(second))
		if err := echo(t.Context(), client); err != nil || slots.Balance(time.Now()) != 1 {
			t.Errorf("Echo = %v, with %v free slots, want success, with 1", err, slots.Balance(time.Now()))
		}
		if n := len(server.attempts()); n != 4 {
			t.Errorf("%d attempts, want 4", n)
		}
	})
}

// An askedBudget allows everything, and says when it is asked.
type askedBudget struct {
	unlimited
	onWithdraw func()
}

func (b *askedBudget) Withdraw(time.Time) bool { b.onWithdraw(); return true }

// A response that crosses the cut of its attempt is a success all the same.
func TestAResponseThatCrossesTheCutIsASuccess(t *testing.T) {
	bubble(t, func(t *testing.T) {
		start := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		intercept := UnaryClientInterceptor(WithAttemptTimeout(second), WithBackoff(Constant(second)), WithBudget(Unlimited))
		err := invokeEcho(ctx, intercept, func(ctx context.Context, n int) error {
			<-ctx.Done() // attempt 1 is cut at 2 s, when attempt 2 is sent
			if n == 1 {
				return nil
			}
			return status.FromContextError(ctx.Err()).Err()
		})
		if took := time.Since(start); err != nil || took != 2*second {
			t.Errorf("the call returned %v after %v, want success after 2s", err, took)
		}
	})
}

// A stream's attempt that was not replaced, because a token was gone at the last moment, gives back its slot of a
// concurrency budget when it is overdue, and again when the application is bound to it: another call's slot.
func TestASlotIsGivenBackOnce(t *testing.T) {
	bubble(t, func(t *testing.T) {
		slots, err := NewConcurrencyBudget(2)
		if err != nil {
			t.Fatal(err)
		}
		slots.Withdraw(time.Now()) // by another call
		server := serveStreams(t, func(n int, stream grpc.ServerStream) error {
			if n == 1 {
				return errUnavailable
			}
			time.Sleep(5 * time.Second)
			return stream.SendMsg(&echov1.EchoResponse{})
		})
		cc := server.conn(t, DialOptions(unmoved, WithBudget(AllBudgets(slots, &oneToken{})), WithBackoff(Constant(time.Second)),
			WithAttemptTimeout(time.Second))...)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		stream, err := cc.NewStream(ctx, serverStream, "/streams/Expand")
		if err != nil {
			t.Fatal(err)
		}
		if err := stream.SendMsg(request()); err != nil {
			t.Fatal(err)
		}
		if err := stream.CloseSend(); err != nil {
			t.Fatal(err)
		}
		for err == nil {
			err = stream.RecvMsg(&echov1.EchoResponse{})
		}
		if got := slots.Balance(time.Now()); got != 1 {
			t.Errorf("%v slots are free, want 1: another call holds the other (%v, attempts at %v)", got, err, server.times())
		}
	})
}

// oneToken always shows a token, and has one.
type oneToken struct {
	unlimited
	asked int
}

func (b *oneToken) Withdraw(time.Time) bool { b.asked++; return b.asked == 1 }

func (b *oneToken) Balance(time.Time) float64 { return 1 }

// A trouble of which nothing was heard for longer than the patience is over, also for a call that has seen no failure yet: an
// overdue attempt is replaced.
func TestAnOverdueAttemptIsNotKeptByAnOldTrouble(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(unavailable(), hang(), ok()))
		r := retrierOf(t, unmoved, WithBackoff(Constant(tenth)), WithPatience(2*second), WithAttemptTimeout(second), WithBudget(Unlimited))
		client := newEchoClient(t, server, r)
		makeCalls(t, client, &timedCall{message: "a", opts: onlyOnce})
		time.Sleep(10 * second)
		ctx, cancel := context.WithTimeout(t.Context(), 10*second)
		defer cancel()
		err := echo(ctx, client)
		wantTimes(t, server, 0, 10*second, 11*second+tenth)
		if states := r.targets.states(time.Now()); err != nil || len(states) != 1 || states[0].GaveUp != 0 {
			t.Errorf("the call has ended with %v, and the targets are %+v; want success, and no call that gave up", err, states)
		}
	})
}
