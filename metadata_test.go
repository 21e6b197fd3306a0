package grpcretry

import (
	"context"
	"reflect"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// What an earlier call has left in the variables of grpc.Header and grpc.Trailer says nothing
// about the next one: here of each kind, to a server that is not there.
func TestLeftoversOfAnEarlierCallDecideNothing(t *testing.T) {
	hedging := WithPolicy(Policy{MaxAttempts: 2, Hedging: &Hedging{Delay: HedgeAfter(0), AllMethodsAreSafe: true, Budget: Unlimited}})
	for name, opts := range map[string][]Option{
		"retried":                 nil,
		"with an observer":        {WithObserver(func(context.Context, Event) {})},
		"hedged":                  {hedging},
		"with an attempt timeout": {WithAttemptTimeout(time.Hour)},
		"hedging without a delay": {WithPolicy(Policy{MaxAttempts: 2,
			Hedging: &Hedging{Delay: HedgeAtQuantile(0.9, 0, 0), AllMethodsAreSafe: true}})},
		"with waits for the other": {WithPatience(0)},
	} {
		for _, kind := range []string{"unary", "stream"} {
			for _, leftover := range []string{"-1", "7000"} {
				t.Run(name+", "+kind+", "+leftover, func(t *testing.T) {
					bubble(t, func(t *testing.T) {
						var mu sync.Mutex
						var sent []time.Duration // guarded by mu, because hedges run at the same time
						start := time.Now()
						below := func(n int) error {
							mu.Lock()
							sent = append(sent, time.Since(start))
							mu.Unlock()
							if n == 1 {
								return errUnavailable // without having reached a server
							}
							return nil
						}
						header := metadata.Pairs("k", "of an earlier call")
						trailer := metadata.MD{pushbackKey: {leftover}}
						call := []grpc.CallOption{grpc.Header(&header), grpc.Trailer(&trailer)}
						opts := append([]Option{WithBackoff(Constant(second)), WithBudget(Unlimited)}, opts...)
						if err := oneCall(t, kind, opts, below, call...); err != nil {
							t.Errorf("the call ended with %v, want a success on the second attempt", err)
						}
						for i, at := range sent {
							if at > second {
								t.Errorf("attempt %d was sent after %v: the leftovers were read as pushback", i+1, at)
							}
						}
						if header != nil || trailer != nil {
							t.Errorf("header %v and trailer %v are left, want none", header, trailer)
						}
					})
				})
			}
		}
	}
}

// oneCall makes a call without a server, to its end. below is called for each attempt.
func oneCall(t *testing.T, kind string, opts []Option, below func(n int) error, call ...grpc.CallOption) error {
	return oneCallIn(t.Context(), t, kind, opts, below, call...)
}

func oneCallIn(ctx context.Context, t *testing.T, kind string, opts []Option, below func(n int) error, call ...grpc.CallOption) error {
	t.Helper()
	number := func(ctx context.Context) int {
		a, _ := AttemptFromContext(ctx)
		return a.Number
	}
	if kind == "unary" {
		return UnaryClientInterceptor(opts...)(ctx, brokenMethod, nil, &basket{}, nil,
			func(ctx context.Context, _ string, _, _ any, _ *grpc.ClientConn, _ ...grpc.CallOption) error {
				return below(number(ctx))
			}, call...)
	}
	stream, err := StreamClientInterceptor(opts...)(ctx, serverStream, nil, brokenMethod,
		func(ctx context.Context, _ *grpc.StreamDesc, _ *grpc.ClientConn, _ string, _ ...grpc.CallOption) (grpc.ClientStream, error) {
			if err := below(number(ctx)); err != nil {
				return nil, err
			}
			return &oneMessage{}, nil
		}, call...)
	if err != nil {
		return err
	}
	if err := stream.SendMsg(&echov1.EchoRequest{}); err != nil {
		return err
	}
	return stream.RecvMsg(&echov1.EchoResponse{})
}

// gRFC A6 #exposed-retry-metadata: the application sees in the response headers how many attempts
// were made before the one that it has the result of.
func TestTheApplicationSeesPreviousAttempts(t *testing.T) {
	headed := func(a answer) answer { return a.withHeader("k", "v") }
	for _, tt := range []struct {
		name   string
		script func(int) answer
		opts   []Option
		want   []string
	}{
		{"first attempt", script(headed(ok())), nil, nil},
		{"second attempt", script(unavailable(), headed(ok())), nil, []string{"1"}},
		{"third attempt", script(unavailable(), unavailable(), headed(ok())), nil, []string{"2"}},
		{"instead of a server's", script(unavailable(), ok().withHeader("k", "v", previousAttemptsKey, "17")), nil, []string{"1"}},
		{"a hedge", script(hang(), headed(ok())),
			[]Option{WithPolicy(Policy{MaxAttempts: 2, Hedging: &Hedging{Delay: HedgeAfter(second), AllMethodsAreSafe: true, Budget: Unlimited}})},
			[]string{"1"}},
		{"the first of two", script(headed(ok().after(2*second)), hang()),
			[]Option{WithPolicy(Policy{MaxAttempts: 2, Hedging: &Hedging{Delay: HedgeAfter(second), AllMethodsAreSafe: true, Budget: Unlimited}})},
			nil},
		{"with an observer", script(unavailable(), headed(ok())), []Option{WithObserver(func(_ context.Context, e Event) {
			if e.Attempt.Header[previousAttemptsKey] != nil {
				panic("the server's header of an attempt has what only the application sees")
			}
		})}, []string{"1"}},
		{"a failure with headers", script(unavailable(), headed(fail(codes.NotFound, "x"))), nil, []string{"1"}},
		{"a failure without headers", script(unavailable(), fail(codes.NotFound, "x")), nil, nil},
	} {
		for _, kind := range append(callKinds[:2:2], callKind{"Header of a stream", nil}) {
			if tt.name == "a hedge" && kind.name == "Header of a stream" {
				continue // hedges are sent when messages are received
			}
			t.Run(tt.name+", "+kind.name, func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					server := serve(t, tt.script)
					cc := server.conn(t, DialOptions(append(tt.opts, steady, WithBudget(Unlimited))...)...)
					var header metadata.MD
					if kind.name == "Header of a stream" {
						header = headerOfStream(t, cc)
					} else {
						_ = kind.call(t.Context(), cc, echoMethod, grpc.Header(&header))
					}
					if got := header[previousAttemptsKey]; !slices.Equal(got, tt.want) {
						t.Errorf("header has %s %v, want %v", previousAttemptsKey, got, tt.want)
					}
				})
			})
		}
	}
}

func headerOfStream(t *testing.T, cc *grpc.ClientConn) metadata.MD {
	stream, err := cc.NewStream(t.Context(), serverStream, echov1.EchoService_Echo_FullMethodName)
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.SendMsg(request()); err != nil {
		t.Fatal(err)
	}
	header, _ := stream.Header()
	for stream.RecvMsg(&echov1.EchoResponse{}) == nil {
		continue
	}
	again, _ := stream.Header()
	if !reflect.DeepEqual(header, again) {
		t.Errorf("Header returns %v at first and %v at the end", header, again)
	}
	return header
}
