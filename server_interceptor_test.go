package grpcretry

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	"github.com/grpcretry/grpcretry/internal/layers"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// These tests put a service between a client and a scripted server: its handler calls the latter, and
// the server interceptors watch.

// serveHandler starts a server whose unary and stream handlers call handle.
func serveHandler(t *testing.T, handle func(context.Context) error, opts ...grpc.ServerOption) *fixture {
	t.Helper()
	return serveService(t, &handler{handle: handle}, opts...)
}

func serveService(t *testing.T, service echov1.EchoServiceServer, opts ...grpc.ServerOption) *fixture {
	t.Helper()
	f := &fixture{listener: bufconn.Listen(1 << 20), server: grpc.NewServer(opts...)}
	echov1.RegisterEchoServiceServer(f.server, service)
	served := make(chan struct{})
	go func() {
		defer close(served)
		if err := f.server.Serve(f.listener); err != nil && !errors.Is(err, grpc.ErrServerStopped) {
			t.Errorf("Serve: %v", err)
		}
	}()
	t.Cleanup(func() { f.server.Stop(); <-served })
	return f
}

// A downstream is what the service calls: the last server's script, and the service's policy for it.
type downstream struct {
	script func(int) answer
	opts   []Option
}

// call makes an RPC to the service, without retries, for each kind of RPC. handle is the service's
// handler, with a function that calls the last server.
func (d downstream) call(t *testing.T, header metadata.MD, serverOpts []ServerOption,
	handle func(ctx context.Context, call func(context.Context) error) error,
	check func(t *testing.T, last *fixture, trailer metadata.MD, err error)) {
	for kind, send := range kinds {
		t.Run(kind, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				last := serve(t, d.script)
				client := last.client(t, append([]Option{steady}, d.opts...)...)
				call := func(ctx context.Context) error { _, err := client.Echo(ctx, request()); return err }
				service := serveHandler(t, func(ctx context.Context) error { return handle(ctx, call) }, serverOptions(serverOpts...)...)
				trailer, err := send(metadata.NewOutgoingContext(t.Context(), header), echov1.NewEchoServiceClient(service.conn(t)))
				check(t, last, trailer, err)
			})
		})
	}
}

// calls is a handler that makes one call and returns its error.
func calls(ctx context.Context, call func(context.Context) error) error { return call(ctx) }

// exhausted is a call that uses up its attempts.
var exhausted = downstream{always(unavailable()), []Option{WithMaxAttempts(2)}}

func TestGivingUpForbidsTheCallerToRetry(t *testing.T) {
	told := unavailable().pushback("-1")
	for _, tt := range []struct {
		name string
		downstream
		forbids bool
	}{
		{"attempts used up", exhausted, true},
		{"no budget",
			downstream{always(unavailable()), []Option{WithRatioBudget(RatioBudget{Ratio: Nothing, Reserve: 1}), WithPatience(0)}}, true},
		{"no budget in the end", downstream{always(unavailable()), []Option{WithRatioBudget(RatioBudget{Ratio: Nothing, Reserve: 1})}}, true},
		{"no time left within MaxElapsed", downstream{always(unavailable()), []Option{WithMaxElapsed(2 * second)}}, true},
		{"told not to retry", downstream{script(told), nil}, true},
		{"told to wait too long", downstream{script(unavailable().pushback("600000")), nil}, true},
		{"told, with a code that is not retried", downstream{script(fail(codes.NotFound, "gone").pushback("-1")), nil}, true},
		{"told, in a call that passes through", downstream{script(told), []Option{Disable()}}, true},
		{"not retryable", downstream{script(fail(codes.NotFound, "gone")), nil}, false},
		{"not retryable after a retry", downstream{script(unavailable(), fail(codes.NotFound, "gone")), nil}, false},
		{"without retries", downstream{always(unavailable()), []Option{WithMaxAttempts(1)}}, false},
		{"may have run", downstream{always(unavailable()), []Option{WithUnsentOnly(true)}}, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.call(t, nil, nil, calls, func(t *testing.T, _ *fixture, trailer metadata.MD, err error) {
				if got := slices.Equal(trailer[pushbackKey], []string{"-1"}); got != tt.forbids || err == nil {
					t.Errorf("trailer %v with error %v, want -1: %t", trailer, err, tt.forbids)
				}
			})
		})
	}
}

// Streams, hedged calls and calls left to gRPC give up, too.
func TestGivingUpInOtherKindsOfCalls(t *testing.T) {
	hedges := WithPolicy(Policy{MaxAttempts: 2, Hedging: &Hedging{Delay: HedgeAfter(second), Budget: Unlimited, AllMethodsAreSafe: true}})
	retryPolicy := grpc.WithDefaultServiceConfig(`{"methodConfig":[{"name":[{}],"retryPolicy":{"maxAttempts":2,` +
		`"initialBackoff":"1s","maxBackoff":"1s","backoffMultiplier":1,"retryableStatusCodes":["UNAVAILABLE"]}}]}`)
	const down, told = "recv a; fail UNAVAILABLE", "recv a; pushback -1; fail UNAVAILABLE"
	for _, tt := range []struct {
		name    string
		dial    []grpc.DialOption
		desc    *grpc.StreamDesc // nil for a unary call, which sends no message
		scripts []string
		forbids bool
	}{
		{"a stream", DialOptions(steady, WithMaxAttempts(2)), serverStream, []string{down, down}, true},
		{"a stream that was told", DialOptions(steady), serverStream, []string{told}, true},
		{"a committed stream", DialOptions(steady), serverStream, []string{"recv a; send b; fail UNAVAILABLE"}, false},
		{"a committed stream that was told", DialOptions(steady), serverStream, []string{"recv a; send b; pushback -1; fail UNAVAILABLE"}, true},
		{"a stream that passes through", DialOptions(steady, WithBufferLimit(0)), serverStream, []string{down}, false},
		{"a stream that passes through and was told", DialOptions(steady, WithBufferLimit(0)), serverStream,
			[]string{"recv a; send b; pushback -1; fail UNAVAILABLE"}, true},
		{"a client stream that was told", DialOptions(steady, Disable()), clientStream, []string{told}, true},
		{"a hedged stream", DialOptions(hedges), serverStream, []string{down, down}, true},
		{"a hedged call", DialOptions(hedges), nil, []string{"fail UNAVAILABLE", "fail UNAVAILABLE"}, true},
		{"a hedged call, told while another attempt is in flight", DialOptions(hedges),
			nil, []string{"wait 3s; fail UNAVAILABLE", "pushback -1; fail UNAVAILABLE"}, true},
		{"a call left to gRPC", []grpc.DialOption{retryPolicy, grpc.WithChainUnaryInterceptor(UnaryClientInterceptor())}, nil,
			[]string{"fail UNAVAILABLE", "pushback -1; fail UNAVAILABLE"}, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				last := serveScripts(t, tt.scripts...)
				cc := last.conn(t, tt.dial...)
				handle := func(ctx context.Context) error {
					if tt.desc == nil {
						return cc.Invoke(ctx, "/streams/Unary", request(), &echov1.EchoResponse{})
					}
					stream, err := cc.NewStream(ctx, tt.desc, "/streams/"+tt.desc.StreamName)
					if err != nil {
						return err
					}
					if err := errors.Join(stream.SendMsg(&echov1.EchoRequest{Message: "a"}), stream.CloseSend()); err != nil {
						return err
					}
					for err == nil {
						err = stream.RecvMsg(&echov1.EchoResponse{})
					}
					return errors.New("hidden")
				}
				var trailer metadata.MD
				echov1.NewEchoServiceClient(serveHandler(t, handle, serverOptions()...).conn(t)).Echo(t.Context(), request(), grpc.Trailer(&trailer))
				if got := slices.Equal(trailer[pushbackKey], []string{"-1"}); got != tt.forbids || len(last.attempts()) != len(tt.scripts) {
					t.Errorf("trailer %v after %d attempts, want -1: %t after %d", trailer, len(last.attempts()), tt.forbids, len(tt.scripts))
				}
			})
		})
	}
}

func TestGivingUpIsFoundWhateverTheHandlerDoes(t *testing.T) {
	type caller = func(context.Context) error
	for name, handle := range map[string]func(ctx context.Context, call caller) error{
		"returns the error":   calls,
		"wraps it":            func(ctx context.Context, call caller) error { return fmt.Errorf("cart: %w", call(ctx)) },
		"joins it":            func(ctx context.Context, call caller) error { return errors.Join(errors.New("a"), call(ctx)) },
		"returns a plain one": func(ctx context.Context, call caller) error { call(ctx); return errors.New("cart is down") },
		"hides it in a status": func(ctx context.Context, call caller) error {
			return status.Error(codes.Internal, call(ctx).Error())
		},
		"detaches the context, and hides it": func(ctx context.Context, call caller) error {
			call(context.WithoutCancel(ctx))
			return errors.New("cart is down")
		},
		"uses another context": func(_ context.Context, call caller) error { return call(context.Background()) },
		"has a deadline that leaves no time for a retry, and hides it": func(ctx context.Context, call caller) error {
			ctx, cancel := context.WithTimeout(ctx, second/2)
			defer cancel()
			call(ctx)
			return errors.New("cart is down")
		},
		"uses a goroutine, and hides it": func(ctx context.Context, call caller) error {
			done := make(chan struct{})
			go func() { defer close(done); call(ctx) }()
			<-done
			return errors.New("cart is down")
		},
		"has said so itself, twice, and made no call": func(ctx context.Context, _ caller) error {
			return errors.Join(errors.New("cart is down"), SetNoRetry(ctx), SetNoRetry(ctx))
		},
		"has said so itself, twice": func(ctx context.Context, call caller) error {
			if err := errors.Join(SetNoRetry(ctx), SetNoRetry(ctx)); err != nil {
				return err
			}
			return call(ctx)
		},
	} {
		t.Run(name, func(t *testing.T) {
			exhausted.call(t, nil, nil, handle, func(t *testing.T, _ *fixture, trailer metadata.MD, err error) {
				if got := trailer[pushbackKey]; !slices.Equal(got, []string{"-1"}) || err == nil {
					t.Errorf("trailer %v with error %v, want -1", trailer, err)
				}
			})
		})
	}
}

func TestACallThatDidNotMatterChangesNothing(t *testing.T) {
	handle := func(ctx context.Context, call func(context.Context) error) error { call(ctx); return nil }
	exhausted.call(t, nil, nil, handle, func(t *testing.T, last *fixture, trailer metadata.MD, _ error) {
		if got := trailer[pushbackKey]; got != nil || len(last.attempts()) != 2 {
			t.Errorf("trailer %v after %d attempts, want none after 2", trailer, len(last.attempts()))
		}
	})
}

func TestWorkForARetryMakesOneAttempt(t *testing.T) {
	const previous, callerRetries = "grpc-previous-rpc-attempts", "grpcretry-caller-retries"
	retried := metadata.Pairs(previous, "1")
	for _, tt := range []struct {
		name     string
		header   metadata.MD
		on       []ServerOption
		below    downstream
		attempts int
		told     bool // the last server sees that it is to do the same
	}{
		{"a first attempt", nil, nil, exhausted, 2, false},
		{"a retry", retried, nil, exhausted, 1, true},
		{"work for a retry", metadata.Pairs(callerRetries, "1"), nil, exhausted, 1, true},
		{"switched off", retried, []ServerOption{withMeasures(layers.Measures{StopsCallers: true})}, exhausted, 2, false},
		{"a hedged method", retried, nil, downstream{always(unavailable().after(5 * second)),
			[]Option{hedged(2, Hedging{Delay: HedgeAfter(second), Budget: Unlimited})}}, 1, true},
		{"a call that passes through", retried, nil, downstream{always(unavailable()), []Option{Disable()}}, 1, true},
		{"a first success", retried, nil, downstream{always(ok()), nil}, 1, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for how, detach := range map[string]func(context.Context) context.Context{
				"the handler's context": func(ctx context.Context) context.Context { return ctx },
				"a detached one":        context.WithoutCancel,
			} {
				t.Run(how, func(t *testing.T) {
					handle := func(ctx context.Context, call func(context.Context) error) error { return call(detach(ctx)) }
					tt.below.call(t, tt.header, tt.on, handle, func(t *testing.T, last *fixture, trailer metadata.MD, _ error) {
						seen := last.attempts()
						if len(seen) != tt.attempts {
							t.Fatalf("%d attempts, want %d", len(seen), tt.attempts)
						}
						for _, one := range seen {
							if got := slices.Equal(one.metadata[callerRetries], []string{"1"}); got != tt.told {
								t.Errorf("the last server sees %s %v, want 1: %t", callerRetries, one.metadata[callerRetries], tt.told)
							}
							if got := one.metadata[previous]; tt.told && got != nil {
								t.Errorf("the last server sees %s %v with a first attempt", previous, got)
							}
						}
						if forbidden := trailer[pushbackKey] != nil; forbidden != (tt.attempts > 1) && len(tt.on) == 0 {
							t.Errorf("trailer %v, want no -1 unless there were retries", trailer)
						}
					})
				})
			}
		})
	}
}

// An attempt that reached no server has multiplied nothing.
func TestWorkForARetryWaitsForAConnection(t *testing.T) {
	for kind, send := range kinds {
		t.Run(kind, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				made := 0
				last := serveHandler(t, func(context.Context) error { made++; return status.Error(codes.Unavailable, "down") })
				link, cc := last.linked(t, DialOptions(WithBackoff(Constant(second)))...)
				link.cut()
				time.AfterFunc(second/2, link.mend)
				synctest.Wait()
				start := time.Now()
				service := serveHandler(t, func(ctx context.Context) error {
					_, err := send(ctx, echov1.NewEchoServiceClient(cc))
					if e := asError(t, err); e.Reason != errCallerRetries || len(e.Attempts) != 2 || !e.Attempts[0].Unsent {
						t.Errorf("%v, attempts %+v; want one that was not sent, and one that was", err, e.Attempts)
					}
					return err
				}, serverOptions()...)
				retried := metadata.AppendToOutgoingContext(t.Context(), previousAttemptsKey, "1")
				send(retried, echov1.NewEchoServiceClient(service.conn(t)))
				if waited := time.Since(start); made != 1 || waited != 2*second { // gRPC connects again after 1 s
					t.Errorf("%d attempts after %v, want 1 after 2s", made, waited)
				}
			})
		})
	}
}

// Four services in a row, of which three make three attempts each; the last is down.
func TestLayersOfRetries(t *testing.T) {
	for _, tt := range []struct {
		name  string
		opts  []ServerOption
		plain bool
		want  int
	}{
		{"without the interceptors", nil, true, 27},
		{"a service that gave up stops its caller", []ServerOption{withMeasures(layers.Measures{StopsCallers: true})}, false, 3},
		{"one attempt for retries", []ServerOption{withMeasures(layers.Measures{OneAttempt: true})}, false, 7},
		{"both", nil, false, 3},
	} {
		for kind, send := range kinds {
			t.Run(tt.name+"/"+kind, func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					made := 0
					down := func(context.Context) error { made++; return status.Error(codes.Unavailable, "down") }
					next := serveHandler(t, down)
					opts := serverOptions(tt.opts...)
					if tt.plain {
						opts = nil
					}
					for range 2 {
						client := next.client(t, steady, WithMaxAttempts(3), WithBudget(Unlimited), WithPatience(0))
						next = serveHandler(t, func(ctx context.Context) error { _, err := send(ctx, client); return err }, opts...)
					}
					_, err := send(t.Context(), next.client(t, steady, WithMaxAttempts(3), WithBudget(Unlimited), WithPatience(0)))
					if status.Code(err) != codes.Unavailable || made != tt.want {
						t.Errorf("%d attempts at the last service, and %v, want %d", made, err, tt.want)
					}
				})
			})
		}
	}
}

func TestANilServerOptionPanics(t *testing.T) {
	for name, intercept := range map[string]func(...ServerOption){
		"UnaryServerInterceptor":  func(o ...ServerOption) { UnaryServerInterceptor(o...) },
		"StreamServerInterceptor": func(o ...ServerOption) { StreamServerInterceptor(o...) },
	} {
		func() {
			defer func() {
				if got, want := fmt.Sprint(recover()), "grpcretry: "+name+": option number 2 is nil"; got != want {
					t.Errorf("panic %q, want %q", got, want)
				}
			}()
			intercept(WithMeterProvider(nil), nil)
		}()
	}
}

// A program that drives a plan for a request tells the request how the call ended.
func TestAPlanForARequest(t *testing.T) {
	for _, tt := range []struct {
		name    string
		retry   bool
		trailer metadata.MD
		opts    []Option
		reason  error // nil: the call goes on
		gaveUp  bool
	}{
		{"a first attempt", false, nil, nil, nil, false},
		{"a retry", true, nil, nil, errCallerRetries, false},
		{"no time left", false, nil, []Option{WithMaxElapsed(second)}, ErrMaxElapsed, true},
		{"told not to retry", false, metadata.Pairs(pushbackKey, "-1"), nil, ErrPushback, true},
		{"a token awaited in vain", false, nil, []Option{WithBudget(stingy{})}, ErrTargetDown, true},
		{"without retries", false, nil, []Option{Disable()}, ErrAttemptsExhausted, false},
		{"without retries, and told", false, metadata.Pairs(pushbackKey, "-1"), []Option{Disable()}, ErrPushback, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := retrierOf(t, append([]Option{steady}, tt.opts...)...)
			request := layers.New(t.Context(), tt.retry)
			plan := r.drive(context.WithoutCancel(request), echoMethod, "", noon)
			a, _ := plan.Sent(noon)
			a.Err, a.Trailer = status.Error(codes.Unavailable, "down"), tt.trailer
			step := plan.Ended(a, noon, 0)
			for !step.End && tt.reason != nil { // it waits
				step = plan.Due(plan.DueAt())
			}
			if step.End != (tt.reason != nil) || step.Reason != tt.reason || request.GaveUp() != tt.gaveUp {
				t.Errorf("step %+v, and gave up: %t; want the reason %v, and %t", step, request.GaveUp(), tt.reason, tt.gaveUp)
			}
		})
	}
}
