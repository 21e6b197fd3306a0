package grpcretry

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/balancer"
	"google.golang.org/grpc/balancer/base"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry/internal/conns"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// A restart is survived by every call that has time to wait, at no charge.
func TestARestartIsSurvived(t *testing.T) {
	const calls = 50
	for _, kind := range []struct {
		name string
		opts []Option
		call func(context.Context, echov1.EchoServiceClient) error
	}{
		{"unary", nil, echo},
		{"hedged", []Option{hedged(2, Hedging{Delay: HedgeAfter(20 * second)})}, echo},
		{"server stream", nil, expand},
	} {
		for _, tt := range []struct{ away, back time.Duration }{ // gRPC dials at 0, 1, 2.6, 5.16 and 9.256 s
			{100 * time.Millisecond, second},
			{second - 1, second},
			{5 * second / 2, 2600 * time.Millisecond},
			{5 * second, 5160 * time.Millisecond},
		} {
			t.Run(fmt.Sprintf("%s, away for %v", kind.name, tt.away), func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					server := serve(t, always(ok()))
					budget := &tally{}
					opts := append([]Option{WithBackoff(Constant(second)), WithBudget(budget)}, kind.opts...)
					link, cc := server.linked(t, DialOptions(opts...)...)
					link.cut()
					time.AfterFunc(tt.away, link.mend)
					synctest.Wait()
					var group sync.WaitGroup
					for range calls {
						group.Go(func() {
							ctx, cancel := context.WithTimeout(t.Context(), 10*second)
							defer cancel()
							if err := kind.call(ctx, echov1.NewEchoServiceClient(cc)); err != nil {
								t.Error(err)
							}
						})
					}
					group.Wait()
					if got := time.Since(server.start); got != tt.back+second {
						t.Errorf("the calls were done after %v, want %v: the connection, and the backoff", got, tt.back+second)
					}
					if got := len(server.attempts()); kind.name != "server stream" && got != calls {
						t.Errorf("the server saw %d attempts of %d calls", got, calls)
					}
					if budget.withdrawn != 0 || budget.refunded != 0 || budget.told[Failed] != 0 ||
						budget.told[Succeeded]+budget.told[Answered] != calls || budget.highest != 1 {
						t.Errorf("the budget gave %d and took %d back, was told of %v, the highest number is %d, want only %d successes of attempt 1",
							budget.withdrawn, budget.refunded, budget.told, budget.highest, calls)
					}
				})
			})
		}
	}
}

func echo(ctx context.Context, client echov1.EchoServiceClient) error {
	_, err := client.Echo(ctx, request())
	return err
}

func expand(ctx context.Context, client echov1.EchoServiceClient) error {
	stream, err := client.Expand(ctx, request())
	if err != nil {
		return err
	}
	_, err = stream.Recv()
	if status.Code(err) == codes.Unimplemented { // the server has no stream, and has answered
		return nil
	}
	return err
}

// What ends the wait for a connection, and what the caller is told.
func TestTheWaitForAConnectionEnds(t *testing.T) {
	for _, tt := range []struct {
		name   string
		opts   []Option
		limit  time.Duration // the caller's deadline; 0 for none
		do     func(cancel context.CancelFunc, cc *grpc.ClientConn)
		code   codes.Code
		reason error
		want   time.Duration
	}{
		{"patience", nil, 0, nil, codes.Unavailable, ErrTargetDown, 10 * second},
		{"without patience", []Option{WithPatience(0)}, 0, nil, codes.Unavailable, ErrTargetDown, 0},
		{"without patience, by a policy", []Option{WithPolicy(Policy{Patience: -1})}, 0, nil, codes.Unavailable, ErrTargetDown, 0},
		{"the deadline, less the backoff", nil, 5 * second, nil, codes.Unavailable, ErrDeadline, 4 * second},
		{"MaxElapsed, less the backoff", []Option{WithMaxElapsed(7 * second)}, 0, nil, codes.Unavailable, ErrMaxElapsed, 6 * second},
		{"without a backoff, the deadline itself", []Option{WithBackoff(Constant(0))}, 5 * second, nil,
			codes.DeadlineExceeded, context.DeadlineExceeded, 5 * second},
		{"cancel", nil, 0, func(cancel context.CancelFunc, _ *grpc.ClientConn) { time.AfterFunc(3*second, cancel) },
			codes.Canceled, context.Canceled, 3 * second},
		{"close", nil, 0, func(_ context.CancelFunc, cc *grpc.ClientConn) { time.AfterFunc(3*second, func() { cc.Close() }) },
			codes.Unavailable, errConnClosed, 3 * second},
	} {
		for _, how := range []string{"unary", "hedged", "stream"} {
			t.Run(tt.name+", "+how, func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					server := serve(t, always(ok()))
					budget, events := &tally{}, &hedgeEvents{}
					opts := append([]Option{WithBackoff(Constant(second)), WithBudget(budget), WithObserver(events.observe)}, tt.opts...)
					call := echo
					switch how {
					case "hedged":
						opts = append(opts, hedged(2, Hedging{Delay: HedgeAfter(time.Hour)}))
					case "stream":
						call = expand
					}
					link, cc := server.linked(t, DialOptions(opts...)...)
					link.cut()
					synctest.Wait()
					ctx, cancel := context.WithCancel(t.Context())
					if tt.limit > 0 {
						ctx, cancel = context.WithTimeout(t.Context(), tt.limit)
					}
					defer cancel()
					if tt.do != nil {
						tt.do(cancel, cc)
					}
					err := call(ctx, echov1.NewEchoServiceClient(cc))
					e := wantStop(t, err, tt.code, tt.reason, 1)
					if got := time.Since(server.start); got != tt.want {
						t.Errorf("the call ended after %v, want %v", got, tt.want)
					}
					if !strings.Contains(err.Error(), errRefused.Error()) || !e.Attempts[0].Unsent {
						t.Errorf("%v of attempts %+v: want gRPC's last words, of an attempt that was not sent", err, e.Attempts)
					}
					if budget.counts != (counts{}) {
						t.Errorf("the budget was asked or told something: %+v", budget.counts)
					}
					events.check(t, err)
				})
			})
		}
	}
}

// A channel that is idle, or becomes idle while a call waits for it, is woken up.
func TestAnIdleChannelIsWoken(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(ok()))
		idle := server.conn(t)
		c := conns.New()
		ready, _, unwatch := c.Await(idle)
		<-ready
		unwatch()
		if got := idle.GetState(); got != connectivity.Ready {
			t.Errorf("the channel is %v, want READY", got)
		}
		link, cc := server.linked(t)
		closed, forget := c.Watch(cc, time.Hour) // somebody watches already, without a wish for a connection
		link.cut()
		synctest.Wait()
		if got := cc.GetState(); got != connectivity.Idle {
			t.Fatalf("the channel is %v after the loss of its connection, want IDLE", got)
		}
		link.mend()
		ready, _, unwatch = c.Await(cc)
		<-ready
		link.cut() // and again, while the call still waits
		synctest.Wait()
		link.mend()
		time.Sleep(2 * second)
		if got := cc.GetState(); got != connectivity.Ready {
			t.Errorf("the channel is %v, want READY", got)
		}
		unwatch()
		forget()
		select {
		case <-closed:
			t.Error("the channel is not closed")
		default:
		}
	})
}

// Patience counts from the call's first failure, whatever the call waits for.
func TestPatienceIsForTheWholeCall(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(ok()))
		var starts []time.Duration
		link, cc := server.linked(t, DialOptions(WithBackoff(Constant(second)), WithPatience(4*second),
			WithObserver(func(_ context.Context, e Event) {
				if e.Kind == AttemptStart {
					starts = append(starts, time.Since(server.start))
				}
			}))...)
		link.cut()
		synctest.Wait()
		time.AfterFunc(second/2, link.mend)  // connected at 1 s
		time.AfterFunc(3*second/2, link.cut) // in the backoff, which ends at 2 s
		err := echo(t.Context(), echov1.NewEchoServiceClient(cc))
		e := wantStop(t, err, codes.Unavailable, ErrTargetDown, 2)
		if want := []time.Duration{0, 2 * second}; !slices.Equal(starts, want) {
			t.Errorf("attempts started at %v, want %v", starts, want)
		}
		if got := time.Since(server.start); got != 4*second {
			t.Errorf("the call ended after %v, want 4s", got)
		}
		if a := e.Attempts[1]; a.Wait != 2*second || a.WaitSource != waitConnect {
			t.Errorf("attempt 2 came after %v of %v, want 2s of connect", a.Wait, a.WaitSource)
		}
	})
}

// A call's first attempt that reaches a server is free, whatever the budget says: a throttle that refuses retries as well.
func TestTheFirstAttemptAtAServerIsFree(t *testing.T) {
	bubble(t, func(t *testing.T) {
		throttle := throttleOf(t, 2, 1)
		throttle.Deposit(Outcome{Attempt: 1, Result: Failed})
		server := serve(t, always(ok()))
		link, cc := server.linked(t, DialOptions(WithBackoff(Constant(second)), WithBudget(throttle))...)
		link.cut()
		synctest.Wait()
		time.AfterFunc(second/2, link.mend)
		if err := echo(t.Context(), echov1.NewEchoServiceClient(cc)); err != nil {
			t.Error(err)
		}
		wantTimes(t, server, 2*second) // gRPC connects again after 1 s, and then there is the backoff
	})
}

// An unsent retry returns its token, so the retry that takes its place is not paid for twice.
func TestAnUnsentRetryReturnsItsToken(t *testing.T) {
	for _, tt := range []struct {
		name   string
		script []answer
		mend   bool
		want   counts
		err    error
	}{
		{"a retry, which then succeeds", []answer{unavailable(), ok()}, true,
			counts{withdrawn: 2, refunded: 1, told: [5]int{Succeeded: 1, Failed: 1}, highest: 3}, nil},
		{"a retry that never reaches a server", []answer{unavailable()}, false,
			counts{withdrawn: 1, refunded: 1, told: [5]int{Failed: 1}, highest: 1}, ErrTargetDown},
		{"attempts that reached a server count", []answer{unavailable(), unavailable(), unavailable(), unavailable()}, true,
			counts{withdrawn: 4, refunded: 1, told: [5]int{Failed: 4}, highest: 5}, ErrAttemptsExhausted},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, script(tt.script...))
				budget := &tally{}
				link, cc := server.linked(t, DialOptions(WithBackoff(Constant(second)), WithBudget(budget), unmoved)...)
				time.AfterFunc(second/2, link.cut) // in the wait before the first retry
				if tt.mend {
					time.AfterFunc(3*second/2, link.mend)
				}
				err := echo(t.Context(), echov1.NewEchoServiceClient(cc))
				if !errors.Is(err, tt.err) {
					t.Errorf("err = %v, want %v", err, tt.err)
				}
				if budget.counts != tt.want {
					t.Errorf("budget is %+v, want %+v", budget.counts, tt.want)
				}
			})
		})
	}
}

// A dropper is a load-balancing policy that fails every pick once it has a connection.
type dropper struct{ err error }

func (d dropper) Build(info base.PickerBuildInfo) balancer.Picker {
	if len(info.ReadySCs) == 0 {
		return base.NewErrPicker(balancer.ErrNoSubConnAvailable)
	}
	return base.NewErrPicker(d.err)
}

// failing are per-RPC credentials that cannot be had.
type failing struct{}

func (failing) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return nil, status.Error(codes.Unavailable, "no token")
}
func (failing) RequireTransportSecurity() bool { return false }

// What "reached no server" means, in the release of grpc-go that go.mod names. The code and the
// words are gRPC's; each row says what we make of them. With UnsentOnly gRPC must have refused the
// attempt itself.
func TestWhatReachedNoServer(t *testing.T) {
	refuse := grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) { return nil, errRefused })
	balance := func(name string, err error) grpc.DialOption {
		balancer.Register(base.NewBalancerBuilder(name, dropper{err}, base.Config{}))
		return grpc.WithDefaultServiceConfig(`{"loadBalancingConfig":[{"` + name + `":{}}]}`)
	}
	answerItself := func(context.Context, string, any, any, *grpc.ClientConn, grpc.UnaryInvoker, ...grpc.CallOption) error {
		return status.Error(codes.Unavailable, "circuit open")
	}
	const waits, plain, final, ran = "waits for a connection", "counts like any other", "is final", "may have run"
	for _, tt := range []struct {
		name      string
		dial      []grpc.DialOption
		target    string
		connected bool
		call      []grpc.CallOption
		words     string // part of gRPC's message
		want      string
		once      string // with UnsentOnly; empty if that makes no difference
	}{
		{name: "dial refused", dial: []grpc.DialOption{refuse}, words: "error while dialing", want: waits},
		{name: "name not resolved", target: "unresolved:///x", words: "no such host", want: waits},
		{name: "TLS handshake failed",
			dial:  []grpc.DialOption{grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{MinVersion: tls.VersionTLS13}))},
			words: "authentication handshake failed", want: waits},
		{name: "no ready backend, round_robin", dial: []grpc.DialOption{refuse,
			grpc.WithDefaultServiceConfig(`{"loadBalancingConfig":[{"round_robin":{}}]}`)},
			words: "error while dialing", want: waits},
		{name: "no addresses", target: "empty:///x", words: "produced zero addresses", want: waits},
		{name: "an interceptor below, on an idle channel", dial: []grpc.DialOption{grpc.WithChainUnaryInterceptor(answerItself)},
			words: "circuit open", want: plain, once: ran},
		{name: "an interceptor below, with a connection", dial: []grpc.DialOption{grpc.WithChainUnaryInterceptor(answerItself)},
			connected: true,
			words:     "circuit open", want: plain, once: ran},
		{name: "per-RPC credentials fail", call: []grpc.CallOption{grpc.PerRPCCredentials(failing{})}, connected: true,
			words: "no token", want: plain},
		{name: "dropped as by xDS", dial: []grpc.DialOption{balance("drops_xds", status.Error(codes.Unavailable, "RPC is dropped"))},
			connected: true,
			words:     "rpc is dropped", want: final},
		{name: "dropped as by grpclb", dial: []grpc.DialOption{balance("drops_grpclb",
			status.Error(codes.Unavailable, "request dropped by grpclb"))},
			connected: true, words: "request dropped by grpclb", want: final},
		{name: "dropped by a circuit breaker", connected: true, words: "max requests 7 exceeded on service x", want: final,
			dial: []grpc.DialOption{balance("drops_breaker", status.Error(codes.Unavailable, "max requests 7 exceeded on service x"))}},
		{name: "dropped in other words", dial: []grpc.DialOption{balance("drops_other", status.Error(codes.Unavailable, "not today"))},
			connected: true,
			words:     "not today", want: plain},
		{name: "a picker that fails with a connection", dial: []grpc.DialOption{balance("fails", errors.New("no subset"))}, connected: true,
			words: "no subset", want: plain},
	} {
		check := func(t *testing.T, want string, opts ...Option) {
			bubble(t, func(t *testing.T) {
				server := serve(t, always(ok()))
				unresolved := manual.NewBuilderWithScheme("unresolved")
				unresolved.BuildCallback = func(_ resolver.Target, cc resolver.ClientConn, _ resolver.BuildOptions) {
					cc.ReportError(errors.New("no such host"))
				}
				empty := manual.NewBuilderWithScheme("empty")
				empty.InitialState(resolver.State{})
				budget := &tally{}
				dial := append(DialOptions(append(opts, WithBackoff(Constant(second)), WithBudget(budget))...), redials,
					grpc.WithResolvers(unresolved, empty))
				cc := server.connTo(t, cmp.Or(tt.target, "passthrough:///echo"), append(dial, tt.dial...)...)
				if tt.connected {
					connect(t, cc)
				}
				client := echov1.NewEchoServiceClient(cc)
				ctx, cancel := context.WithTimeout(t.Context(), 20*second)
				defer cancel()
				_, err := client.Echo(ctx, request(), tt.call...)
				var e *Error
				errors.As(err, &e)
				var got string
				switch {
				case e == nil && budget.counts == counts{told: [5]int{Ignored: 1}, highest: 1}:
					got = final
				case errors.Is(err, ErrMayHaveRun) && budget.counts == counts{told: [5]int{Failed: 1}, highest: 1}:
					got = ran
				case e != nil && e.Attempts[0].Unsent && e.Attempts[0].Peer == nil:
					got = waits
				case e != nil && budget.withdrawn == 3 && budget.told[Failed] == 4:
					got = plain
				}
				if got != want || status.Code(err) != codes.Unavailable || !strings.Contains(strings.ToLower(err.Error()), tt.words) {
					t.Errorf("err = %v, budget %+v: such an attempt %q, want one that says %q and %q", err, budget.counts, got,
						tt.words, want)
				}
			})
		}
		t.Run(tt.name, func(t *testing.T) { check(t, tt.want) })
		t.Run(tt.name+", with UnsentOnly", func(t *testing.T) { check(t, cmp.Or(tt.once, tt.want), WithUnsentOnly(true)) })
	}
}
