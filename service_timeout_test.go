package grpcretry

import (
	"context"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"
	"google.golang.org/grpc/status"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// resolveAfter dials a server whose address and service config the resolver finds after d.
func (f *fixture) resolveAfter(t *testing.T, d time.Duration, config string, opts ...grpc.DialOption) *grpc.ClientConn {
	t.Helper()
	found := manual.NewBuilderWithScheme("echo")
	found.BuildCallback = func(_ resolver.Target, cc resolver.ClientConn, _ resolver.BuildOptions) {
		time.AfterFunc(d, func() {
			_ = cc.UpdateState(resolver.State{Addresses: []resolver.Address{{Addr: "echo"}}, ServiceConfig: cc.ParseServiceConfig(config)})
		})
	}
	return f.connTo(t, "echo:///echo", append(opts, grpc.WithResolvers(found))...)
}

const oneSecond = `{"methodConfig":[{"name":[{}],"timeout":"1s"}]}`

// With its own retries, gRPC ends a call after the timeout of its service config.
func TestTheServiceConfigsTimeoutIsTheCalls(t *testing.T) {
	const tenth = second / 10
	slow := always(unavailable().after(8 * tenth))
	waits := []Option{WithBackoff(Constant(tenth)), WithBudget(Unlimited)}
	hedging := []Option{WithPolicy(Policy{MaxAttempts: 4,
		Hedging: &Hedging{Delay: HedgeAfter(3 * tenth), AllMethodsAreSafe: true, Budget: Unlimited},
		Codes:   []codes.Code{codes.DeadlineExceeded}}), WithBudget(Unlimited)}
	for _, tt := range []struct {
		name   string
		script func(int) answer
		opts   []Option
		limit  time.Duration // of the caller; 0 for none
		want   []time.Duration
		ends   time.Duration
	}{
		{"retried", slow, waits, 0, []time.Duration{0, 9 * tenth}, second},
		{"with a deadline that is later", slow, waits, time.Hour, []time.Duration{0, 9 * tenth}, second},
		{"with a deadline that is earlier", slow, waits, 95 * second / 100, []time.Duration{0, 9 * tenth}, 95 * second / 100},
		{"with an attempt timeout", always(hang()), append(waits, WithAttemptTimeout(6*tenth)), 0, []time.Duration{0, 7 * tenth}, second},
		{"with a code for it", always(hang()), append(waits, WithCodes(codes.DeadlineExceeded)), 0, []time.Duration{0}, second},
		{"hedged", always(hang()), hedging, 0, []time.Duration{0, 3 * tenth, 6 * tenth, 9 * tenth}, second},
	} {
		for _, kind := range []string{"unary", "stream"} {
			t.Run(tt.name+", "+kind, func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					server := serve(t, tt.script)
					cc := server.resolveAfter(t, 0, oneSecond, DialOptions(tt.opts...)...)
					connect(t, cc)
					ctx := t.Context()
					if tt.limit > 0 {
						limited, cancel := context.WithTimeout(ctx, tt.limit)
						defer cancel()
						ctx = limited
					}
					err := echoOnce(ctx, cc, kind)
					if got := time.Since(server.start); got != tt.ends || status.Code(err) != codes.DeadlineExceeded {
						t.Errorf("the call ended after %v with %v, want DEADLINE_EXCEEDED after %v", got, err, tt.ends)
					}
					if e := asError(t, err); !errors.Is(err, context.DeadlineExceeded) || len(e.Attempts) != len(tt.want) {
						t.Errorf("err = %v of %d attempts, want %d and context.DeadlineExceeded", err, len(e.Attempts), len(tt.want))
					}
					wantTimes(t, server, tt.want...)
				})
			})
		}
	}
}

// echoOnce makes a call to its end, of the kind given.
func echoOnce(ctx context.Context, cc *grpc.ClientConn, kind string, opts ...grpc.CallOption) error {
	if kind == "unary" {
		_, err := echov1.NewEchoServiceClient(cc).Echo(ctx, request(), opts...)
		return err
	}
	stream, err := cc.NewStream(ctx, serverStream, echov1.EchoService_Echo_FullMethodName, opts...)
	if err != nil {
		return err
	}
	if err := stream.SendMsg(request()); err != nil {
		return err
	}
	for err == nil {
		err = stream.RecvMsg(&echov1.EchoResponse{})
	}
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

// As with a deadline of the caller, no wait is started that would reach the end.
func TestAWaitThatReachesTheServiceConfigsTimeoutIsNotStarted(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(unavailable()))
		cc := server.resolveAfter(t, 0, oneSecond, DialOptions(WithBackoff(Constant(second)))...)
		err := echoOnce(t.Context(), cc, "unary")
		wantStop(t, err, codes.Unavailable, ErrDeadline, 1)
		if !strings.Contains(err.Error(), "db-down") {
			t.Errorf("err = %v, want the server's last word", err)
		}
		wantTimes(t, server, 0)
	})
}

// A stream that the application abandons ends with the timeout, if not before.
func TestAnAbandonedStreamEndsWithTheServiceConfigsTimeout(t *testing.T) {
	for _, tt := range []struct {
		name   string
		script func(int) answer
		header bool // the application asks for headers before it goes
	}{
		{"first attempt", always(hang()), false},
		{"first attempt, which has failed", always(unavailable()), false},
		{"second attempt", script(unavailable(), answer{do: headThenHang}), true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, tt.script)
				cc := server.resolveAfter(t, 0, oneSecond, DialOptions(WithBackoff(Constant(0)))...)
				var finished time.Duration
				stream, err := cc.NewStream(t.Context(), serverStream, echov1.EchoService_Echo_FullMethodName, grpc.OnFinish(func(error) {
					finished = time.Since(server.start)
				}))
				if err != nil {
					t.Fatal(err)
				}
				if err := stream.SendMsg(request()); err != nil {
					t.Fatal(err)
				}
				if tt.header {
					if md, err := stream.Header(); err != nil || md == nil {
						t.Errorf("Header = %v, %v, want some", md, err)
					}
				}
				time.Sleep(2 * second)
				synctest.Wait()
				if finished != second {
					t.Errorf("OnFinish ran after %v, want 1s", finished)
				}
			})
		})
	}
}

// headThenHang sends headers, and then nothing until the client goes away.
func headThenHang(ctx context.Context) error {
	if err := grpc.SendHeader(ctx, metadata.Pairs("k", "v")); err != nil {
		return err
	}
	<-ctx.Done()
	return status.FromContextError(ctx.Err()).Err()
}
