package grpcretry

import (
	"context"
	"reflect"
	"slices"
	"strconv"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

func TestAttemptFromContextBelowTheInterceptor(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(unavailable(), unavailable().pushback("7000"), ok()))
		var got []Attempt
		below := func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker,
			opts ...grpc.CallOption) error {
			a, ok := AttemptFromContext(ctx)
			if !ok {
				t.Error("no attempt in the context")
			}
			got = append(got, a)
			return invoker(ctx, method, req, reply, cc, opts...)
		}
		cc := server.conn(t, append(DialOptions(steady, WithAttemptTimeout(time.Hour)), grpc.WithChainUnaryInterceptor(below))...)
		if _, err := echov1.NewEchoServiceClient(cc).Echo(t.Context(), request()); err != nil {
			t.Fatal(err)
		}
		const method = echov1.EchoService_Echo_FullMethodName
		want := []Attempt{
			{Method: method, Number: 1, Start: server.start},
			{Method: method, Number: 2, Start: server.start.Add(second), Wait: second, WaitSource: WaitBackoff},
			{Method: method, Number: 3, Start: server.start.Add(8 * second), Wait: 7 * second, WaitSource: WaitPushback},
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("attempts below are\n%+v, want\n%+v", got, want)
		}
		if _, ok := AttemptFromContext(t.Context()); ok {
			t.Error("an attempt outside of a call")
		}
	})
}

func TestServerIsToldOfPreviousAttempts(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(unavailable(), unavailable(), ok()))
		// The caller's own value is replaced in retries.
		ctx := metadata.AppendToOutgoingContext(t.Context(), "k", "v", "GRPC-previous-rpc-attempts", "17")
		for _, ctx := range []context.Context{t.Context(), ctx} {
			server.seen = nil
			if _, err := server.client(t, steady).Echo(ctx, request()); err != nil {
				t.Fatal(err)
			}
			for i, one := range server.attempts()[1:] {
				want := []string{strconv.Itoa(i + 1)}
				if got := one.metadata.Get(previousAttemptsKey); !slices.Equal(got, want) || one.previous != i+1 {
					t.Errorf("attempt %d carries %s %v, want %v", i+2, previousAttemptsKey, got, want)
				}
			}
		}
		if got := server.attempts()[2].metadata.Get("k"); !slices.Equal(got, []string{"v"}) {
			t.Errorf("the caller's metadata arrives as %v in attempt 3, want [v]", got)
		}
		server.seen = nil
		server.client(t).Echo(t.Context(), request())
		if got := server.attempts()[0].metadata.Get(previousAttemptsKey); got != nil {
			t.Errorf("a first attempt carries %v", got)
		}
	})
}

// The server may take as long as the caller lets it: an attempt timeout may not end the attempt.
func TestTheServerIsToldTheCallersDeadline(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(hang()))
		client := server.client(t, WithBackoff(Constant(second)), WithAttemptTimeout(2*second), WithMaxAttempts(3))
		ctx, cancel := context.WithTimeout(t.Context(), 20*second)
		defer cancel()
		client.Echo(ctx, request())
		var timeouts []time.Duration
		for _, one := range server.attempts() {
			timeouts = append(timeouts, one.timeout)
		}
		// Attempts at 0, 3 and 6 s.
		if want := []time.Duration{20 * second, 17 * second, 14 * second}; !slices.Equal(timeouts, want) {
			t.Errorf("the server saw timeouts %v, want %v", timeouts, want)
		}
	})
}

// The context of an attempt is not kept through the wait, which may be long.
func TestAttemptContextsEndBeforeTheWait(t *testing.T) {
	check := func(t *testing.T, contexts []context.Context) {
		for i, ctx := range contexts {
			if ctx.Err() == nil {
				t.Errorf("the context of attempt %d is alive in the wait after attempt %d", i+1, len(contexts))
			}
		}
	}
	t.Run("unary", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			server := serve(t, script(unavailable(), unavailable(), ok()))
			var contexts []context.Context
			below := func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker,
				opts ...grpc.CallOption) error {
				contexts = append(contexts, ctx)
				sofar := slices.Clone(contexts)
				time.AfterFunc(second/2, func() { check(t, sofar) })
				return invoker(ctx, method, req, reply, cc, opts...)
			}
			cc := server.conn(t, append(DialOptions(steady, WithAttemptTimeout(time.Hour)), grpc.WithChainUnaryInterceptor(below))...)
			if _, err := echov1.NewEchoServiceClient(cc).Echo(t.Context(), request()); err != nil {
				t.Error(err)
			}
			time.Sleep(second)
			wantTimes(t, server, 0, 1*second, 3*second)
		})
	})
}
