package grpcretry

import (
	"context"
	"runtime"
	"testing"
	"time"

	"google.golang.org/grpc"
)

// A stream that the application abandons counts no longer than it lives, if an interceptor below drops
// call options, so that gRPC cannot report the end.
func TestUsageAfterStreamsWhoseEndIsHidden(t *testing.T) {
	for name, open := range map[string]grpc.StreamClientInterceptor{
		"options are dropped": func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string,
			streamer grpc.Streamer, _ ...grpc.CallOption) (grpc.ClientStream, error) {
			return streamer(ctx, desc, cc, method)
		},
	} {
		for _, desc := range []*grpc.StreamDesc{serverStream, clientStream, bidiStream} {
			t.Run(name+"/"+desc.StreamName, func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					r := retrierOf(t)
					server := serveStreams(t, func(n int, stream grpc.ServerStream) error {
						return playServer(t, n, map[bool]string{true: "fail INTERNAL", false: "hang"}[n == 1], stream)
					})
					cc := server.conn(t, append(r.DialOptions(), grpc.WithChainStreamInterceptor(open))...)
					openOn(t, cc, desc).play(t, "recv INTERNAL") // its end was hidden
					ctx, cancel := context.WithCancel(t.Context())
					for range 10 {
						stream, err := cc.NewStream(ctx, desc, "/s/m")
						if err != nil {
							t.Fatal(err)
						}
						_ = stream.SendMsg(request())
					}
					if u := r.Usage(); u.OpenStreams != 10 || u.ReplayMemory == 0 {
						t.Errorf("Usage with 10 streams = %+v", u)
					}
					cancel()
					for i := 0; i < 1000 && r.Usage() != (Usage{ReplayLimit: defaultReplayMemory}); i++ {
						runtime.GC()
						time.Sleep(time.Millisecond)
					}
					wantUsage(t, "when they are garbage", r, Usage{})
				})
			})
		}
	}
}
