package grpcretry

import (
	"context"
	"slices"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

func TestNestedInterceptorsDoNotMultiply(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(unavailable()))
		cc := server.conn(t, grpc.WithChainUnaryInterceptor(
			UnaryClientInterceptor(WithBackoff(Constant(second)), WithMaxAttempts(3)),
			UnaryClientInterceptor(WithBackoff(Constant(second)), WithMaxAttempts(5))))
		_, err := echov1.NewEchoServiceClient(cc).Echo(t.Context(), request())
		wantStop(t, err, codes.Unavailable, ErrAttemptsExhausted, 3)
		wantTimes(t, server, 0, 1*second, 2*second)
	})
}

func TestNestedStreamInterceptorsDoNotMultiply(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serveScripts(t, slices.Repeat([]string{"fail UNAVAILABLE"}, 3)...)
		cc := server.conn(t, grpc.WithChainStreamInterceptor(
			StreamClientInterceptor(WithMaxAttempts(3), WithBackoff(Constant(0))), StreamClientInterceptor(WithMaxAttempts(5))))
		openOn(t, cc, serverStream).play(t, "send a; close; recv UNAVAILABLE")
		wantTimes(t, server, 0, 0, 0)
	})
}

func TestACallMadeBelowOnAnotherConnectionIsItsOwn(t *testing.T) {
	bubble(t, func(t *testing.T) {
		tokens := serve(t, script(unavailable(), ok(), unavailable(), ok()))
		server := serve(t, script(unavailable(), ok()))
		r := retrierOf(t, WithBackoff(Constant(second)))
		tokenConn := tokens.conn(t, r.DialOptions()...)
		// The careless way: the context and even the options of the outer call.
		below := func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker,
			opts ...grpc.CallOption) error {
			if _, err := echov1.NewEchoServiceClient(tokenConn).Put(ctx, request(), opts...); err != nil {
				t.Errorf("token: %v", err)
			}
			return invoker(ctx, method, req, reply, cc, opts...)
		}
		cc := server.conn(t, append(r.DialOptions(), grpc.WithChainUnaryInterceptor(below))...)
		if _, err := echov1.NewEchoServiceClient(cc).Echo(t.Context(), request()); err != nil {
			t.Error(err)
		}
		wantTimes(t, tokens, 0, 1*second, 2*second, 3*second)
		wantTimes(t, server, 1*second, 3*second)
	})
}

// A call that gRPC must not retry says so to gRPC, and to no call that is made with its options on another connection.
func TestACallBelowOneThatGRPCMustNotRetryIsRetried(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serveScripts(t, "fail UNAVAILABLE", "send a")
		other := server.conn(t, DialOptions(WithBackoff(Constant(second)))...)
		elsewhere := func(ctx context.Context, desc *grpc.StreamDesc, _ *grpc.ClientConn, method string, _ grpc.Streamer,
			opts ...grpc.CallOption) (grpc.ClientStream, error) {
			return other.NewStream(ctx, desc, method, opts...)
		}
		outer := retrierOf(t, WithUnsentOnly(true)) // on a channel without a connection, which may get a policy
		cc := server.conn(t, append(outer.onlyInterceptors(), grpc.WithChainStreamInterceptor(elsewhere))...)
		openOn(t, cc, serverStream).play(t, "send a; close; recv a; recv EOF")
		wantTimes(t, server, 0, second)
	})
}

// The same holds if the call below passes through, for unary calls and streams.
func TestACallBelowThatPassesThroughIsItsOwn(t *testing.T) {
	for kind, send := range map[string]func(ctx context.Context, client echov1.EchoServiceClient, opts ...grpc.CallOption) error{
		"unary": func(ctx context.Context, client echov1.EchoServiceClient, opts ...grpc.CallOption) error {
			_, err := client.Echo(ctx, request(), opts...)
			return err
		},
		"stream": func(ctx context.Context, client echov1.EchoServiceClient, opts ...grpc.CallOption) error {
			stream, err := client.Expand(ctx, request(), opts...)
			if err == nil {
				_, err = stream.Recv()
			}
			return err
		},
	} {
		t.Run(kind, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				asked := 0
				tokens := serveHandler(t, func(context.Context) error {
					asked++
					return status.Error(codes.NotFound, "no token")
				})
				server := serve(t, script(unavailable(), unavailable()))
				tokenClient := tokens.client(t, Disable())
				below := func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker,
					opts ...grpc.CallOption) error {
					send(ctx, tokenClient, opts...)
					return invoker(ctx, method, req, reply, cc, opts...)
				}
				dial := append(DialOptions(WithBackoff(Constant(second)), WithMaxAttempts(2)), grpc.WithChainUnaryInterceptor(below))
				_, err := echov1.NewEchoServiceClient(server.conn(t, dial...)).Echo(t.Context(), request())
				wantStop(t, err, codes.Unavailable, ErrAttemptsExhausted, 2)
				if asked != 2 {
					t.Errorf("%d tokens were asked for, want 2", asked)
				}
			})
		})
	}
}

// An interceptor below fails over to another connection, with a Retrier or none: the attempt has reached that one's server.
func TestAnAttemptThatFailsOverHasReachedAServer(t *testing.T) {
	for name, other := range map[string][]grpc.DialOption{
		"plain":   nil,
		"retried": DialOptions(WithMaxAttempts(2), WithBackoff(Constant(second)), WithBudget(Unlimited)),
		"off":     DialOptions(Disable()),
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				secondary := echov1.NewEchoServiceClient(serve(t, always(unavailable())).conn(t, other...))
				failover := func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker,
					opts ...grpc.CallOption) error {
					if err := invoker(ctx, method, req, reply, cc, opts...); status.Code(err) != codes.Unavailable {
						return err
					}
					_, err := secondary.Echo(ctx, request(), opts...)
					return err
				}
				down, primary := serve(t, always(ok())).linked(t, append(DialOptions(steady, WithMaxAttempts(3), WithBudget(Unlimited)),
					grpc.WithChainUnaryInterceptor(failover))...)
				down.cut()
				_, err := echov1.NewEchoServiceClient(primary).Echo(t.Context(), request())
				wantStop(t, err, codes.Unavailable, ErrAttemptsExhausted, 3)
				for _, a := range asError(t, err).Attempts {
					if a.Unsent || a.Peer == nil {
						t.Errorf("attempt %d has Unsent %v and peer %v, want a peer", a.Number, a.Unsent, a.Peer)
					}
				}
			})
		})
	}
}
