package grpcretry

import (
	"context"
	"io"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// A client stream that ends with OK and without a response is a failure. Header, which finds the end
// first, does not know that.
func TestAnEndWithoutAResponseThatHeaderFinds(t *testing.T) {
	for _, tt := range []struct {
		name   string
		opts   []Option
		server string
		app    string
	}{
		{"Header", nil, "recv a; recv EOF", "send a; close; no header; recv INTERNAL; recv INTERNAL"},
		{"Header, committed", []Option{WithBufferLimit(1)}, "recv a; recv EOF", "send a; close; no header; recv INTERNAL; recv INTERNAL"},
		{"Context after Header", nil, "recv a; recv EOF", "send a; close; no header; context; recv INTERNAL"},
		{"at the attempt timeout", []Option{WithAttemptTimeout(second), WithMaxAttempts(2)}, "recv a; recv EOF; wait 999999999ns",
			"send a; close; no header; recv INTERNAL; recv INTERNAL"},
		{"while nobody waits", []Option{WithAttemptTimeout(second)}, "recv a; recv EOF; wait 1005ms",
			"send a; close; wait 3s; recv INTERNAL; recv INTERNAL"},
		{"while nobody waits, committed", []Option{WithAttemptTimeout(second), WithBufferLimit(1)}, "recv a; recv EOF; wait 1005ms",
			"send a; close; wait 3s; recv INTERNAL; recv INTERNAL"},
		{"while nobody waits, and then Context", []Option{WithAttemptTimeout(second)}, "recv a; recv EOF; wait 1005ms",
			"send a; close; wait 3s; context; recv INTERNAL; recv INTERNAL"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				reported := &record{}
				app, err := serveScripts(t, tt.server).openStream(t, clientStream, append(reported.options(), tt.opts...), reported.onFinish())
				if err != nil {
					t.Fatal(err)
				}
				app.play(t, tt.app)
				reported.want(t, app.err)
			})
		})
	}
}

// headless is a stream from an interceptor below that returns no headers.
type headless struct{ grpc.ClientStream }

func (headless) Header() (metadata.MD, error) { return nil, nil }

// Then there is nothing to wait for, although attempts of a hedged stream are in flight.
func TestHeaderOfAHedgedStreamThatReturnsNothing(t *testing.T) {
	bubble(t, func(t *testing.T) {
		hedging := WithMethod("/streams/", WithHedging(Hedging{Delay: HedgeAfter(10 * second)}))
		cc := serveScripts(t, "recv a; header; wait 5s; send 1").conn(t, append(DialOptions(steady, hedging),
			grpc.WithChainStreamInterceptor(func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string,
				streamer grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
				stream, err := streamer(ctx, desc, cc, method, opts...)
				return headless{stream}, err
			}))...)
		app := openOn(t, cc, serverStream)
		app.play(t, "send a; close")
		start := time.Now()
		go func() {
			time.Sleep(second / 2)
			app.play(t, "no header; no header")
			if waited := time.Since(start); waited != second/2+overGrace {
				t.Errorf("Header returned after %v, want %v", waited, second/2+overGrace)
			}
		}()
		app.play(t, "recv 1; recv EOF")
	})
}

// blocked is a stream of gRPC's whose RecvMsg has returned a false end, and then waits forever.
type blocked struct {
	grpc.ClientStream
	finish  func(error)
	waiting chan struct{}
	ended   bool
}

func (*blocked) SendMsg(any) error            { return nil }
func (*blocked) CloseSend() error             { return nil }
func (*blocked) Header() (metadata.MD, error) { return metadata.MD{}, nil }
func (*blocked) Trailer() metadata.MD         { return nil }
func (*blocked) Context() context.Context     { return context.Background() }

func (b *blocked) RecvMsg(any) error {
	if b.ended {
		<-b.waiting
		return nil
	}
	b.ended = true
	b.finish(nil)
	return io.EOF
}

func TestAnEndThatGRPCDoesNotConfirm(t *testing.T) {
	for _, tt := range []struct {
		kind *grpc.StreamDesc
		opts []Option
		want error
	}{
		{serverStream, nil, nil},
		{serverStream, []Option{WithMethod("/s/", WithHedging(Hedging{Delay: HedgeAfter(time.Hour)}))}, nil},
		{clientStream, nil, nil},
		{bidiStream, nil, nil},
		{bidiStream, []Option{WithBufferLimit(1)}, errLost},
		{clientStream, []Option{WithBufferLimit(1)}, errNoResponse},
	} {
		t.Run(tt.kind.StreamName, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				waiting, attempts, start := make(chan struct{}), 0, time.Now()
				defer close(waiting)
				var finished []error
				intercept := StreamClientInterceptor(append(tt.opts, steady)...)
				stream, err := intercept(t.Context(), tt.kind, nil, "/s/m",
					func(_ context.Context, _ *grpc.StreamDesc, _ *grpc.ClientConn, _ string, opts ...grpc.CallOption) (grpc.ClientStream, error) {
						finish := opts[len(opts)-1].(grpc.OnFinishCallOption).OnFinish
						if attempts++; attempts == 1 {
							return &blocked{finish: finish, waiting: waiting}, nil
						}
						return &deaf{kind: tt.kind, messages: []string{"1"}, finish: finish}, nil
					}, grpc.OnFinish(func(err error) { finished = append(finished, err) }))
				if err != nil {
					t.Fatal(err)
				}
				if err := stream.SendMsg(&echov1.EchoRequest{Message: "more than the buffer holds"}); err != nil {
					t.Error(err)
				}
				stream.CloseSend()
				for range 2 {
					err = stream.RecvMsg(new(echov1.EchoResponse))
					if tt.want != nil && err != tt.want {
						t.Errorf("RecvMsg = %v, want %v", err, tt.want)
					}
					if tt.want == nil && err != nil && err != io.EOF {
						t.Errorf("RecvMsg = %v, want a message and the end", err)
					}
				}
				if waited := time.Since(start); waited < endGrace {
					t.Errorf("RecvMsg returned after %v, want %v or more", waited, endGrace)
				}
				if len(finished) != 1 || status.Code(finished[0]) != status.Code(tt.want) {
					t.Errorf("OnFinish got %v, want %v", finished, tt.want)
				}
			})
		})
	}
}

// beaten is a stream of gRPC's that ends well when its context ends: gRPC reports the latter, and
// RecvMsg returns the former.
type beaten struct {
	blocked
	ctx context.Context
}

func (*beaten) Trailer() metadata.MD { return metadata.MD{"content-type": {"application/grpc"}} }

func (b *beaten) RecvMsg(any) error {
	<-b.ctx.Done()
	b.finish(status.FromContextError(b.ctx.Err()).Err())
	return io.EOF
}

// The end of a stream without messages counts, although the attempt timeout comes at the same time.
func TestAnEmptyStreamThatEndsAtTheTimeout(t *testing.T) {
	for name, opts := range map[string][]Option{
		"retried": nil, "hedged": {WithMethod("/s/", WithHedging(Hedging{Delay: HedgeAfter(time.Hour)}))},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				reported := &record{}
				intercept := StreamClientInterceptor(append(append(opts, reported.options()...), steady, WithAttemptTimeout(second))...)
				stream, err := intercept(t.Context(), serverStream, nil, "/s/m",
					func(ctx context.Context, _ *grpc.StreamDesc, _ *grpc.ClientConn, _ string, opts ...grpc.CallOption) (grpc.ClientStream, error) {
						finish := opts[len(opts)-1].(grpc.OnFinishCallOption).OnFinish
						return &beaten{blocked{finish: finish}, ctx}, nil
					}, reported.onFinish())
				if err != nil {
					t.Fatal(err)
				}
				if err := stream.SendMsg(new(echov1.EchoRequest)); err != nil {
					t.Error(err)
				}
				for range 2 {
					if err := stream.RecvMsg(new(echov1.EchoResponse)); err != io.EOF {
						t.Errorf("RecvMsg = %v, want EOF", err)
					}
				}
				reported.want(t, nil)
			})
		})
	}
}
