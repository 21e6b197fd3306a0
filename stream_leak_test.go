package grpcretry

import (
	"context"
	"testing"
	"testing/synctest"

	"google.golang.org/grpc"
)

// The caller's context may live for ever: nothing of a call may stay registered with it.
func TestNothingStaysWithTheCallersContext(t *testing.T) {
	for _, tt := range []struct {
		name    string
		scripts []string
		app     string
	}{
		{"success", []string{"recv a; send 1"}, "send a; close; recv 1; recv EOF"},
		{"failure", []string{"recv a; fail NOT_FOUND"}, "send a; close; recv NOT_FOUND"},
		{"failure when committed", []string{"recv a; send 1; fail UNAVAILABLE"}, "send a; close; recv 1; recv UNAVAILABLE"},
		{"a retry", []string{"fail UNAVAILABLE", "recv a; send 1"}, "send a; close; recv 1; recv EOF"},
		{"a timeout while the application is elsewhere", []string{"recv a; hang", "recv a; send 1"},
			"send a; close; wait 20s; recv 1; recv EOF"},
		{"a timeout that was committed to", []string{"recv a; hang"}, "send a; close; context; wait 20s; recv DEADLINE_EXCEEDED"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serveStreams(t, func(n int, stream grpc.ServerStream) error { return playServer(t, n, tt.scripts[n-1], stream) })
				cc := server.conn(t, DialOptions(steady, WithAttemptTimeout(5*second))...)
				ctx := &countingContext{Context: context.WithoutCancel(t.Context())}
				stream, err := cc.NewStream(ctx, serverStream, "/s/m")
				if err != nil {
					t.Fatal(err)
				}
				if ctx.number() == 0 {
					t.Fatal("nobody waits for the context's end")
				}
				(&application{stream: stream}).play(t, tt.app)
				synctest.Wait()
				if got := ctx.number(); got != 0 {
					t.Errorf("%d functions wait for the end of the caller's context after the call", got)
				}
			})
		})
	}
}
