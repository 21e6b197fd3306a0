package grpcretry

import (
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// The tests here are of interceptors below that do more with a stream than pass it on. Plain gRPC serves them, too.

// An interceptor may hold a lock while it receives, or sends, and take the same lock to tell what the stream has left. gRPC
// reports the stream's end while that lock is held.
func TestAnInterceptorBelowMayHoldALockThroughout(t *testing.T) {
	for _, tt := range []struct {
		name    string
		desc    *grpc.StreamDesc
		servers []string
		app     string
		finish  codes.Code
	}{
		{"the end", serverStream, []string{"recv a; send 1; send 2"}, "send a; close; recv 1; recv 2; recv EOF", codes.OK},
		{"the end, and a retry before", serverStream, []string{"recv a; fail UNAVAILABLE", "recv a; send 1; send 2"},
			"send a; close; recv 1; recv 2; recv EOF", codes.OK},
		{"a failure after messages", bidiStream, []string{"recv a; send 1; send 2; fail DATA_LOSS"}, "send a; recv 1; recv 2; recv DATA_LOSS",
			codes.DataLoss},
		{"the end of the context", bidiStream, []string{"recv a; send 1; hang"}, "send a; recv 1; cancel", codes.Canceled},
		{"a first message that cannot be sent", bidiStream, []string{"hang"}, "unsendable", codes.Internal},
		{"a later message that cannot be sent", bidiStream, []string{"recv a; send 1; hang"}, "send a; recv 1; unsendable", codes.Internal},
	} {
		for name, opts := range map[string][]grpc.DialOption{"plain": nil, "retried": DialOptions(steady)} {
			t.Run(tt.name+"/"+name, func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					server := serveScripts(t, tt.servers...)
					if len(tt.servers) > 1 && name == "plain" {
						server = serveScripts(t, tt.servers[1:]...)
					}
					cc := server.conn(t, append(opts, below(func(s grpc.ClientStream) grpc.ClientStream { return &lockingStream{ClientStream: s} }))...)
					finished := "not"
					app := openOn(t, cc, tt.desc, grpc.OnFinish(func(err error) { finished = status.Code(err).String() }))
					app.play(t, tt.app)
					synctest.Wait()
					if finished != tt.finish.String() {
						t.Errorf("OnFinish: %s, want %v", finished, tt.finish)
					}
				})
			})
		}
	}
}

// A lockingStream holds one lock while it receives and another while it sends, and both for everything else.
type lockingStream struct {
	grpc.ClientStream
	receiving, sending sync.Mutex
}

func (s *lockingStream) RecvMsg(m any) error {
	s.receiving.Lock()
	defer s.receiving.Unlock()
	return s.ClientStream.RecvMsg(m)
}

func (s *lockingStream) SendMsg(m any) error {
	s.sending.Lock()
	defer s.sending.Unlock()
	return s.ClientStream.SendMsg(m)
}

func (s *lockingStream) Header() (metadata.MD, error) {
	s.receiving.Lock()
	defer s.receiving.Unlock()
	return s.ClientStream.Header()
}

func (s *lockingStream) Trailer() metadata.MD {
	s.receiving.Lock()
	defer s.receiving.Unlock()
	s.sending.Lock()
	defer s.sending.Unlock()
	return s.ClientStream.Trailer()
}

// An interceptor may receive ahead of the application. What it keeps back is the call's response until the application receives it, or
// cancels.
func TestAnInterceptorBelowMayReceiveAheadOfTheApplication(t *testing.T) {
	for _, tt := range []struct {
		desc *grpc.StreamDesc
		app  string
		want string // what the call ends with, and when; the response comes at once
	}{
		{clientStream, "send a; close; wait 1s; recv 1", "OK after 1s"},
		{clientStream, "send a; context; close; wait 1s; recv 1", "OK after 1s"},
		{clientStream, "send a; context; close; wait 1s; cancel", "Canceled after 1s"},
		{serverStream, "send a; close; wait 1s; recv 1; recv EOF", "OK after 1s"},
		{serverStream, "send a; context; close; wait 1s; recv 1; recv EOF", "OK after 0s"},
	} {
		t.Run(tt.desc.StreamName+"/"+tt.app, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serveScripts(t, "recv a; recv EOF; send 1")
				cc := server.conn(t, append(DialOptions(steady),
					below(func(s grpc.ClientStream) grpc.ClientStream { return &aheadStream{ClientStream: s} }))...)
				got, start := "no end", time.Now()
				app := openOn(t, cc, tt.desc, grpc.OnFinish(func(err error) {
					got = fmt.Sprintf("%v after %v", status.Code(err), time.Since(start))
				}))
				app.play(t, tt.app)
				synctest.Wait()
				if got != tt.want {
					t.Errorf("the call has ended with %s, want %s", got, tt.want)
				}
			})
		})
	}
}

// An aheadStream receives everything after CloseSend, and keeps it for the application.
type aheadStream struct {
	grpc.ClientStream
	kept chan *echov1.EchoResponse
	err  error // set before kept is closed
}

func (s *aheadStream) CloseSend() error {
	err := s.ClientStream.CloseSend()
	s.kept = make(chan *echov1.EchoResponse, 8)
	go func() {
		defer close(s.kept)
		for s.err == nil {
			m := &echov1.EchoResponse{}
			if s.err = s.ClientStream.RecvMsg(m); s.err == nil {
				s.kept <- m
			}
		}
	}()
	return err
}

func (s *aheadStream) RecvMsg(m any) error {
	kept, ok := <-s.kept
	if !ok {
		return s.err
	}
	proto.Merge(m.(proto.Message), kept)
	return nil
}
