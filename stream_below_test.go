package grpcretry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/grpcretry/grpcretry/internal/inside"
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

// Interceptors below see the end of an attempt, and may say what it is, also if the application asks for headers before it receives.
func TestAnInterceptorBelowTellsWhatAnEndIsAlsoIfHeadersAreAskedFor(t *testing.T) {
	for name, tt := range map[string]struct {
		servers []string
		app     string
		ends    []codes.Code
	}{
		"retryable": {
			[]string{"recv a; fail NOT_FOUND", "recv a; send 1"},
			"send a; close; header; recv 1; recv EOF",
			[]codes.Code{codes.NotFound, codes.OK},
		},
		"not retryable": {
			[]string{"recv a; fail UNAVAILABLE"},
			"send a; close; no headers; recv DATA_LOSS",
			[]codes.Code{codes.Unavailable},
		},
		"retried in vain": {
			[]string{"recv a; fail NOT_FOUND", "recv a; fail NOT_FOUND"},
			"send a; close; no headers; recv UNAVAILABLE",
			[]codes.Code{codes.NotFound, codes.NotFound},
		},
		"no messages": {
			[]string{"recv a"},
			"send a; close; no headers; recv EOF",
			[]codes.Code{codes.OK},
		},
	} {
		for _, desc := range []*grpc.StreamDesc{serverStream, bidiStream} {
			t.Run(name+"/"+desc.StreamName, func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					server := serveScripts(t, tt.servers...)
					ends := []codes.Code{}
					cc := server.conn(t, append(DialOptions(steady, WithMaxAttempts(2)), below(func(s grpc.ClientStream) grpc.ClientStream {
						return &translatingStream{s, &ends}
					}))...)
					openOn(t, cc, desc).play(t, tt.app)
					if !slices.Equal(ends, tt.ends) {
						t.Errorf("the interceptor below has seen %v, want %v", ends, tt.ends)
					}
				})
			})
		}
	}
}

// Header asks for the end of a hedged stream before the request is known: the next attempt is not a hedge, and learns of CloseSend.
func TestHeaderOfAHedgedStreamBeforeItsRequestIsKnown(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serveScripts(t, "fail UNAVAILABLE", "recv EOF; send 1")
		hedging := WithHedging(Hedging{Delay: HedgeAfter(0), Budget: Unlimited, AllMethodsAreSafe: true})
		cc := server.conn(t, append(DialOptions(steady, hedging),
			below(func(s grpc.ClientStream) grpc.ClientStream { return slowStream{s} }))...)
		app := openOn(t, cc, serverStream)
		done := make(chan struct{})
		go func() {
			defer close(done)
			app.play(t, "header")
		}()
		time.Sleep(5 * second)
		app.play(t, "close")
		<-done
		app.play(t, "recv 1; recv EOF")
	})
}

// A slowStream takes a second to receive, which is time for a hedge.
type slowStream struct{ grpc.ClientStream }

func (s slowStream) RecvMsg(m any) error {
	time.Sleep(second)
	return s.ClientStream.RecvMsg(m)
}

// A translatingStream calls NOT_FOUND unavailable, and UNAVAILABLE data loss.
type translatingStream struct {
	grpc.ClientStream
	ends *[]codes.Code
}

func (s *translatingStream) RecvMsg(m any) error {
	err := s.ClientStream.RecvMsg(m)
	if err == io.EOF {
		*s.ends = append(*s.ends, codes.OK)
	} else if err != nil {
		*s.ends = append(*s.ends, status.Code(err))
	}
	switch status.Code(err) {
	case codes.NotFound:
		return status.Error(codes.Unavailable, "translated")
	case codes.Unavailable:
		return status.Error(codes.DataLoss, "translated")
	default:
		return err
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

// An interceptor may receive ahead of the application. The call goes on until the application has received what was kept back, or
// cancels.
func TestAnInterceptorBelowMayReceiveAheadOfTheApplication(t *testing.T) {
	const failing = "recv a; recv EOF; send 1; send 2; fail DATA_LOSS"
	for _, tt := range []struct {
		desc   *grpc.StreamDesc
		server string
		app    string
		want   string // what the call ends with, and when; everything has come at once
	}{
		{clientStream, "recv a; recv EOF; send 1", "send a; close; wait 1s; recv 1", "OK after 1s"},
		{clientStream, "recv a; recv EOF; send 1", "send a; context; close; wait 1s; recv 1", "OK after 1s"},
		{clientStream, "recv a; recv EOF; send 1", "send a; context; close; wait 1s; cancel", "Canceled after 1s"},
		{clientStream, "recv a; recv EOF; send 1", "send a; close; wait 1s; cancel", "Canceled after 1s"},
		{serverStream, "recv a; recv EOF; send 1", "send a; close; wait 1s; recv 1; recv EOF", "OK after 1s"},
		{serverStream, "recv a; recv EOF; send 1", "send a; context; close; wait 1s; recv 1; recv EOF", "OK after 1s"},
		{serverStream, "recv a; recv EOF; send 1", "send a; close; wait 1s; cancel", "Canceled after 1s"},
		{serverStream, failing, "send a; close; wait 1s; recv 1; recv 2; recv DATA_LOSS", "DataLoss after 1s"},
		{serverStream, failing, "send a; close; wait 1s; header; recv 1; recv 2; recv DATA_LOSS", "DataLoss after 1s"},
		{serverStream, failing, "send a; context; close; wait 1s; recv 1; recv 2; recv DATA_LOSS", "DataLoss after 1s"},
		{serverStream, failing, "send a; context; close; wait 1s; cancel", "DataLoss after 1s"},
		{bidiStream, failing, "send a; close; wait 1s; recv 1; wait 1s; cancel", "DataLoss after 2s"},
	} {
		t.Run(tt.desc.StreamName+"/"+tt.app, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serveScripts(t, tt.server)
				r := retrierOf(t, steady)
				cc := server.conn(t, append(r.DialOptions(),
					belowStream(func(ctx context.Context, next streamOpener) (grpc.ClientStream, error) {
						s, err := next(ctx)
						return &aheadStream{ClientStream: s, ctx: ctx}, err
					}))...)
				got, start := "no end", time.Now()
				app := openOn(t, cc, tt.desc, grpc.OnFinish(func(err error) {
					got = fmt.Sprintf("%v after %v", status.Code(err), time.Since(start))
				}))
				app.play(t, tt.app)
				synctest.Wait()
				if got != tt.want {
					t.Errorf("the call has ended with %s, want %s", got, tt.want)
				}
				wantUsage(t, "at the end", r, inside.Usage{})
			})
		})
	}
}

// An aheadStream receives everything after CloseSend, and keeps it for the application.
type aheadStream struct {
	grpc.ClientStream
	ctx  context.Context
	room int // for messages; at least 8
	kept chan *echov1.EchoResponse
	done chan struct{} // closed when everything is kept
	err  error         // set before kept is closed
}

func (s *aheadStream) CloseSend() error {
	err := s.ClientStream.CloseSend()
	s.keep()
	return err
}

func (s *aheadStream) keep() {
	s.kept, s.done = make(chan *echov1.EchoResponse, max(8, s.room)), make(chan struct{})
	go func() {
		defer close(s.done)
		defer close(s.kept)
		for s.err == nil {
			m := &echov1.EchoResponse{}
			if s.err = s.ClientStream.RecvMsg(m); s.err == nil {
				s.kept <- m
			}
		}
	}()
}

func (s *aheadStream) RecvMsg(m any) error {
	select {
	case kept, ok := <-s.kept:
		if !ok {
			return s.err
		}
		proto.Merge(m.(proto.Message), kept)
		return nil
	case <-s.ctx.Done():
		return status.FromContextError(s.ctx.Err()).Err()
	}
}

// What was kept back when the stream ended is not lost because of a message that cannot be sent, and SendMsg returns at once.
func TestKeptMessagesSurviveAMessageThatCannotBeSent(t *testing.T) {
	const well, badly = "recv a; send 1; send 2", "recv a; send 1; send 2; fail DATA_LOSS"
	for _, tt := range []struct {
		server, app string
		finish      codes.Code
	}{
		{well, "send a; wait 1s; recv 1; unsendable; wait 1s; recv 2; recv EOF", codes.OK},
		{well, "send a; context; wait 1s; unsendable; wait 1s; recv 1; recv 2; recv EOF", codes.OK},
		{well, "send a; wait 1s; oversized; wait 1s; recv 1; recv 2; recv EOF", codes.OK},
		{badly, "send a; wait 1s; oversized; wait 1s; recv 1; recv 2; recv DATA_LOSS", codes.DataLoss},
		{badly, "send a; context; wait 1s; oversized; wait 1s; recv 1; recv 2; recv DATA_LOSS", codes.DataLoss},
	} {
		for name, opts := range map[string][]grpc.DialOption{"plain": nil, "retried": DialOptions(steady)} {
			t.Run(fmt.Sprintf("%s/%s/%s", tt.server, tt.app, name), func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					cc := serveScripts(t, tt.server).conn(t, append(opts, sendLimit,
						belowStream(func(ctx context.Context, next streamOpener) (grpc.ClientStream, error) {
							s, err := next(ctx)
							return &eagerStream{aheadStream{ClientStream: s, ctx: ctx}}, err
						}))...)
					finished, start := "not", time.Now()
					app := openOn(t, cc, bidiStream, grpc.OnFinish(func(err error) { finished = status.Code(err).String() }))
					app.play(t, tt.app)
					if synctest.Wait(); finished != tt.finish.String() || time.Since(start) > 2*second {
						t.Errorf("OnFinish: %s after %v, want %v", finished, time.Since(start), tt.finish)
					}
				})
			})
		}
	}
}

// sendLimit is what an "oversized" message exceeds, which fits into the buffer for a replay.
var sendLimit = grpc.WithDefaultCallOptions(grpc.MaxCallSendMsgSize(100))

// An attempt's SendMsg may still be running when another goroutine finds the attempt failed, and fail for a reason of its own.
func TestASendMsgThatFailsWhileAnotherAttemptIsAwaited(t *testing.T) {
	bubble(t, func(t *testing.T) {
		cc := serveScripts(t, "wait 1s; fail UNAVAILABLE", "recv a; send 1").conn(t, append(DialOptions(WithBackoff(Constant(2*second))),
			belowStream(func(ctx context.Context, next streamOpener) (grpc.ClientStream, error) {
				s, err := next(ctx)
				if a, _ := AttemptFromContext(ctx); a.Number > 1 {
					return s, err
				}
				return &hookedStream{ClientStream: s, send: func(any) error {
					time.Sleep(2 * second)
					return status.Error(codes.Internal, "below")
				}}, err
			}))...)
		app := openOn(t, cc, bidiStream)
		var group sync.WaitGroup
		group.Go(func() { app.play(t, "send a; close") })
		app.play(t, "recv 1; recv EOF")
		group.Wait()
	})
}

// wordy returns a stream whose SendMsg says in its own words why a message cannot be sent.
func wordy(s grpc.ClientStream) *hookedStream {
	return &hookedStream{ClientStream: s, send: func(m any) error {
		if err := s.SendMsg(m); err != nil {
			return fmt.Errorf("sending: %w", err)
		}
		return nil
	}}
}

// An interceptor may say in its own words why a message cannot be sent. The call ends all the same.
func TestAnInterceptorBelowMayWrapAnErrorOfSendMsg(t *testing.T) {
	for name, plain := range map[string]bool{"plain": true, "retried": false} {
		for _, script := range []string{"oversized", "context; oversized", "send a; wait 1s; oversized", "send a; recv 1; oversized"} {
			t.Run(script+"/"+name, func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					r := retrierOf(t, steady)
					opts := r.DialOptions()
					if plain {
						opts = nil
					}
					cc := serveScripts(t, "recv a; send 1; hang").conn(t, append(opts, sendLimit, below(func(s grpc.ClientStream) grpc.ClientStream {
						return wordy(s)
					}))...)
					finished := "not"
					openOn(t, cc, bidiStream, grpc.OnFinish(func(err error) { finished = status.Code(err).String() })).play(t, script)
					if synctest.Wait(); finished != "ResourceExhausted" {
						t.Errorf("OnFinish: %s, want ResourceExhausted", finished)
					}
					wantUsage(t, "after SendMsg has failed", r, inside.Usage{})
				})
			})
		}
	}
}

// It may do so with io.EOF as well, which says only that RecvMsg has the status.
func TestAnInterceptorBelowMayWrapTheEOFOfSendMsg(t *testing.T) {
	wraps := below(func(s grpc.ClientStream) grpc.ClientStream { return wordy(s) })
	for _, tt := range []struct {
		name   string
		server []string
		app    string
	}{
		{"a good end", []string{"recv a; send 1; send 2"}, "recv 1; recv 2; recv EOF"},
		{"another good end", []string{"recv a"}, "recv EOF"},
		{"a status", []string{"recv a; fail NOT_FOUND"}, "recv NOT_FOUND"},
		{"a status after a message", []string{"recv a; send 1; fail UNAVAILABLE"}, "recv 1; recv UNAVAILABLE"},
		{"a failure to retry", []string{"recv a; fail UNAVAILABLE", "recv a; recv b; send 1"}, "recv 1; recv EOF"},
	} {
		for _, desc := range []*grpc.StreamDesc{bidiStream, unlinkedStream} {
			for _, before := range []string{"send a", "context; send a"} { // the latter commits
				for name, opts := range map[string][]grpc.DialOption{"plain": nil, "retried": DialOptions(steady)} {
					if len(tt.server) > 1 && (name == "plain" || desc == unlinkedStream || before != "send a") {
						continue
					}
					t.Run(fmt.Sprintf("%s/%s/%s/%s", tt.name, desc.StreamName, before, name), func(t *testing.T) {
						bubble(t, func(t *testing.T) {
							app := openOn(t, serveScripts(t, tt.server...).conn(t, append(opts, wraps)...), desc)
							app.play(t, before+"; wait 10ms")
							err := app.stream.SendMsg(&echov1.EchoRequest{Message: "b"})
							if err != nil && (!errors.Is(err, io.EOF) || len(tt.server) > 1) || err == nil && tt.name == "a status" {
								t.Errorf("SendMsg = %v, want nothing but io.EOF", err)
							}
							app.play(t, tt.app)
						})
					})
				}
			}
		}
	}
}

// As long as a retry is possible, the application does not see it, also while another goroutine is about to retry.
func TestAnEOFOfSendMsgThatIsWrappedIsRetried(t *testing.T) {
	bubble(t, func(t *testing.T) {
		cc := serveScripts(t, "recv a; fail UNAVAILABLE", "recv a; recv b; recv EOF; send 1").conn(t, append(DialOptions(steady),
			below(func(s grpc.ClientStream) grpc.ClientStream {
				slow := wordy(s)
				slow.recv = func(m any) error {
					err := s.RecvMsg(m)
					if err != nil {
						time.Sleep(second)
					}
					return err
				}
				return slow
			}))...)
		app := openOn(t, cc, bidiStream)
		var group sync.WaitGroup
		group.Go(func() { app.play(t, "recv 1; recv EOF") })
		app.play(t, "send a; wait 10ms; send b; close")
		group.Wait()
	})
}

// An interceptor may word the io.EOF of RecvMsg. That of SendMsg stays io.EOF.
func TestAnInterceptorBelowMayWrapTheEOFOfRecvMsg(t *testing.T) {
	for _, server := range []string{"", "header", "fail NOT_FOUND"} {
		for name, opts := range map[string][]grpc.DialOption{"plain": nil, "retried": DialOptions(steady)} {
			t.Run(server+"/"+name, func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					app := openOn(t, serveScripts(t, server).conn(t, append(opts, below(func(s grpc.ClientStream) grpc.ClientStream {
						return &hookedStream{ClientStream: s, recv: func(m any) error {
							return fmt.Errorf("receiving: %w, %w", s.RecvMsg(m), io.EOF)
						}}
					}))...), bidiStream)
					app.play(t, "wait 1s")
					for range 3 {
						if err := app.stream.SendMsg(&echov1.EchoRequest{}); err != io.EOF {
							t.Errorf("SendMsg = %v, want io.EOF", err)
						}
					}
				})
			})
		}
	}
}

// An interceptor may end a stream by itself, with io.EOF, whatever gRPC's stream has come to. gRPC's Header could wait for ever then.
func TestAnInterceptorBelowMayEndAStream(t *testing.T) {
	for _, tt := range []struct {
		name   string
		desc   *grpc.StreamDesc
		server string
		below  func(grpc.ClientStream) grpc.ClientStream
	}{
		{"before there are headers", bidiStream, "recv a; hang", func(s grpc.ClientStream) grpc.ClientStream {
			return &hookedStream{ClientStream: s, recv: func(any) error { return io.EOF }}
		}},
		{"in place of a status", clientStream, "recv a; fail NOT_FOUND", func(s grpc.ClientStream) grpc.ClientStream {
			return &hookedStream{ClientStream: s, recv: func(m any) error { s.RecvMsg(m); return io.EOF }}
		}},
		{"with an error of Header", serverStream, "recv a", func(s grpc.ClientStream) grpc.ClientStream { return headerless{s} }},
	} {
		for name, opts := range map[string][]grpc.DialOption{
			"plain": nil, "retried": DialOptions(steady), "dry run": DialOptions(steady, WithDryRun(true)),
		} {
			t.Run(tt.name+"/"+name, func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					server := serveScripts(t, tt.server)
					start := time.Now()
					openOn(t, server.conn(t, append(opts, below(tt.below))...), tt.desc).play(t, "send a; close; wait 1ms; recv EOF; cancel")
					if n := len(server.attempts()); n != 1 || time.Since(start) > time.Millisecond {
						t.Errorf("the server saw %d attempts, and the end came after %v, want 1 after 1ms", n, time.Since(start))
					}
				})
			})
		}
	}
}

// headerless is a stream whose Header fails.
type headerless struct{ grpc.ClientStream }

func (headerless) Header() (metadata.MD, error) { return nil, errors.New("no headers here") }

// An interceptor that receives ahead, and looks at its context, may or may not have a message for the application when the call has
// ended. Nothing but the call's error follows an error.
func TestNothingFollowsTheErrorOfACallThatSendMsgHasEnded(t *testing.T) {
	for _, before := range []string{"send a", "send a; context", "send a; header"} {
		for range 20 { // the interceptor's choice is random
			bubble(t, func(t *testing.T) {
				cc := serveScripts(t, "recv a; header; send 1; hang").conn(t, append(DialOptions(steady), sendLimit,
					belowStream(func(ctx context.Context, next streamOpener) (grpc.ClientStream, error) {
						s, err := next(ctx)
						return &eagerStream{aheadStream{ClientStream: s, ctx: ctx}}, err
					}))...)
				app := openOn(t, cc, bidiStream)
				app.play(t, before+"; wait 1s; oversized")
				app.stream.RecvMsg(new(echov1.EchoResponse))
				app.play(t, "recv RESOURCE_EXHAUSTED; recv RESOURCE_EXHAUSTED")
			})
		}
	}
}

// What had arrived before a message that cannot be sent is for the application, whether or not that could be kept.
func TestWhatHadArrivedBeforeAMessageThatCannotBeSent(t *testing.T) {
	for _, script := range []string{
		"send a; wait 1s; oversized; recv 1; recv RESOURCE_EXHAUSTED", "send a; context; wait 1s; oversized; recv 1; recv RESOURCE_EXHAUSTED",
		"send a; wait 1s; unsendable; recv 1; recv INTERNAL", "send a; context; wait 1s; unsendable; recv 1; recv INTERNAL",
	} {
		for name, opts := range map[string][]grpc.DialOption{"plain": nil, "retried": DialOptions(steady)} {
			t.Run(script+"/"+name, func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					openOn(t, serveScripts(t, "recv a; send 1; hang").conn(t, append(opts, sendLimit)...), bidiStream).play(t, script)
				})
			})
		}
	}
}

// Header may be receiving ahead when SendMsg fails.
func TestAMessageThatCannotBeSentWhileHeaderWaits(t *testing.T) {
	for name, opts := range map[string][]grpc.DialOption{"plain": nil, "retried": DialOptions(steady)} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				cc := serveScripts(t, "recv a; hang").conn(t, append(opts, sendLimit,
					below(func(s grpc.ClientStream) grpc.ClientStream { return slowStream{s} }))...)
				app := openOn(t, cc, bidiStream)
				app.play(t, "send a")
				var group sync.WaitGroup
				group.Go(func() { app.stream.Header() })
				app.play(t, "wait 1s; oversized")
				group.Wait()
			})
		})
	}
}

// A RecvMsg that panics after the end leaves nothing open.
func TestAPanicAfterTheEnd(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := retrierOf(t, steady)
		cc := serveScripts(t, "recv a").conn(t, append(r.DialOptions(), below(func(s grpc.ClientStream) grpc.ClientStream {
			return &hookedStream{ClientStream: s, recv: func(m any) error {
				if err := s.RecvMsg(m); !isEOF(err) {
					return err
				}
				panic("below")
			}}
		}))...)
		finished := "not"
		app := openOn(t, cc, bidiStream, grpc.OnFinish(func(err error) { finished = status.Code(err).String() }))
		app.play(t, "send a; close")
		func() {
			defer func() { recover() }()
			app.stream.RecvMsg(new(echov1.EchoResponse))
		}()
		if synctest.Wait(); finished != "OK" {
			t.Errorf("OnFinish: %s, want OK", finished)
		}
		wantUsage(t, "after the panic", r, inside.Usage{})
	})
}

// An eagerStream receives everything after the first message was sent.
type eagerStream struct{ aheadStream }

func (s *eagerStream) SendMsg(m any) error {
	err := s.ClientStream.SendMsg(m)
	if s.kept == nil && err == nil {
		s.keep()
	}
	return err
}

func (s *eagerStream) CloseSend() error { return s.ClientStream.CloseSend() }

// An interceptor may panic when it has received the end, while another goroutine of the application asks for headers.
func TestHeaderDoesNotWaitForARecvMsgThatHasPanicked(t *testing.T) {
	bubble(t, func(t *testing.T) {
		panicked := false
		cc := serveScripts(t, "recv a").conn(t, append(DialOptions(steady), below(func(s grpc.ClientStream) grpc.ClientStream {
			return &hookedStream{ClientStream: s, recv: func(m any) error {
				err := s.RecvMsg(m)
				if isEOF(err) && !panicked {
					panicked = true
					time.Sleep(second)
					panic("below")
				}
				return err
			}}
		}))...)
		finished := "not"
		app := openOn(t, cc, bidiStream, grpc.OnFinish(func(err error) { finished = status.Code(err).String() }))
		app.play(t, "send a; close")
		asked := make(chan struct{})
		go func() {
			defer close(asked)
			time.Sleep(second / 2)
			app.stream.Header()
		}()
		func() {
			defer func() { recover() }()
			app.stream.RecvMsg(new(echov1.EchoResponse))
		}()
		<-asked
		if synctest.Wait(); finished != "OK" {
			t.Errorf("OnFinish: %s, want OK", finished)
		}
	})
}

// An interceptor may end a stream with an error that cannot be read, such as a nil pointer: when the application is bound to it, and when
// the attempt timeout has ended it.
func TestAnEndThatCannotBeRead(t *testing.T) {
	for name, servers := range map[string][]string{
		"bound":     {"recv a; send 1; fail DATA_LOSS"},
		"timed out": {"recv a; hang", "recv a; send 1; fail DATA_LOSS"},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				cc := serveScripts(t, servers...).conn(t, append(DialOptions(steady, WithAttemptTimeout(second)), unreadableEnds)...)
				app := openOn(t, cc, bidiStream)
				app.play(t, "send a; recv 1")
				if err := app.stream.RecvMsg(new(echov1.EchoResponse)); err != error((*Error)(nil)) {
					t.Errorf("RecvMsg = %T, want the interceptor's error", err)
				}
			})
		})
	}
}

var unreadableEnds = below(func(s grpc.ClientStream) grpc.ClientStream {
	return &hookedStream{ClientStream: s, recv: func(m any) error {
		if s.RecvMsg(m) != nil {
			return (*Error)(nil)
		}
		return nil
	}}
})

// Such an end may also come when the call is over.
func TestAnEndThatCannotBeReadAfterTheCallsEnd(t *testing.T) {
	bubble(t, func(t *testing.T) {
		cc := serveScripts(t, "recv a; send 1; hang").conn(t, append(DialOptions(steady), sendLimit, unreadableEnds)...)
		app := openOn(t, cc, bidiStream)
		app.play(t, "send a; context; wait 1s; oversized; recv 1")
		for range 2 {
			if err := app.stream.RecvMsg(new(echov1.EchoResponse)); err != error((*Error)(nil)) {
				t.Errorf("RecvMsg = %T, want the interceptor's error", err)
			}
		}
	})
}

// An interceptor may ask for the headers, and learn of the end, before the application has the stream. It may also open
// another stream then, with the same options.
func TestAnInterceptorBelowMayFindAnEndWhileItOpens(t *testing.T) {
	for _, tt := range []struct {
		name    string
		servers []string
		app     string
		finish  codes.Code
	}{
		{"and pass it on", []string{"fail INVALID_ARGUMENT"}, "recv INVALID_ARGUMENT", codes.InvalidArgument},
		{"and pass it on to nobody", []string{"fail INVALID_ARGUMENT"}, "cancel", codes.InvalidArgument},
		{"and open another stream", []string{"fail UNAUTHENTICATED", "header; recv a; send 1"}, "send a; close; recv 1; recv EOF", codes.OK},
		{"and open another stream for nobody", []string{"fail UNAUTHENTICATED", "header; hang"}, "cancel", codes.Canceled},
		{"and open another stream for a message", []string{"fail UNAUTHENTICATED", "header; recv a; send 1; hang"}, "send a; recv 1; cancel",
			codes.Canceled},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				r := retrierOf(t, steady)
				cc := serveScripts(t, tt.servers...).conn(t, append(r.DialOptions(),
					belowStream(func(ctx context.Context, next streamOpener) (grpc.ClientStream, error) {
						for range tt.servers[1:] {
							if refused, err := next(ctx); err == nil {
								refused.Header()
							}
						}
						stream, err := next(ctx)
						if err == nil {
							stream.Header()
						}
						return stream, err
					}))...)
				finished := "not"
				app := openOn(t, cc, bidiStream, grpc.OnFinish(func(err error) { finished = status.Code(err).String() }))
				app.play(t, tt.app)
				synctest.Wait()
				if finished != tt.finish.String() {
					t.Errorf("OnFinish: %s, want %v", finished, tt.finish)
				}
				wantUsage(t, "at the end", r, inside.Usage{})
			})
		})
	}
}

// A message that cannot be sent ends a stream: OnFinish has returned, or has panicked in the application's SendMsg, when that returns.
func TestOnFinishRunsWithinSendMsgOfAMessageThatCannotBeSent(t *testing.T) {
	for name, opts := range map[string][]grpc.DialOption{"plain": nil, "retried": DialOptions(steady)} {
		for _, panics := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, panics %t", name, panics), func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					slow := below(func(s grpc.ClientStream) grpc.ClientStream {
						hooked := &hookedStream{ClientStream: s}
						hooked.send = func(m any) error {
							defer time.Sleep(second)
							return s.SendMsg(m)
						}
						return hooked
					})
					finished := false
					app := openOn(t, serveScripts(t, "recv a; send 1; hang").conn(t, append(opts, slow)...), bidiStream, grpc.OnFinish(func(error) {
						time.Sleep(5 * second)
						finished = true
						if panics {
							panic("as the test wants")
						}
					}))
					app.play(t, "send a; recv 1")
					func() {
						defer func() {
							if p := recover(); p != nil != panics || !finished {
								t.Errorf("SendMsg has ended with panic %v, OnFinish has ended: %t; want a panic: %t, after OnFinish", p, finished, panics)
							}
						}()
						app.play(t, "unsendable")
					}()
				})
			})
		}
	}
}

// A hookedStream runs functions of the test around an interceptor's view of a stream.
type hookedStream struct {
	grpc.ClientStream
	recv func(m any) error
	send func(m any) error
}

func (s *hookedStream) RecvMsg(m any) error {
	if s.recv != nil {
		return s.recv(m)
	}
	return s.ClientStream.RecvMsg(m)
}

func (s *hookedStream) SendMsg(m any) error {
	if s.send != nil {
		return s.send(m)
	}
	return s.ClientStream.SendMsg(m)
}

// A stream may end while the application is in one of its methods, and the application may never call another: gRPC
// reports the end all the same, and so does the library.
func TestAnEndDuringTheLastMethodIsReported(t *testing.T) {
	for _, tt := range []struct {
		name string
		app  string
		hook func(s *hookedStream, cancel context.CancelFunc)
	}{
		{"RecvMsg of a later message", "send a; recv 1; recv 2", func(s *hookedStream, cancel context.CancelFunc) {
			received := 0
			s.recv = func(m any) error {
				err := s.ClientStream.RecvMsg(m)
				if received++; received == 2 {
					cancel()
					synctest.Wait()
				}
				return err
			}
		}},
		{"SendMsg", "send a", func(s *hookedStream, cancel context.CancelFunc) {
			s.send = func(m any) error {
				err := s.ClientStream.SendMsg(m)
				cancel()
				synctest.Wait()
				return err
			}
		}},
		{"NewStream", "", func(_ *hookedStream, cancel context.CancelFunc) {
			cancel()
			synctest.Wait()
		}},
	} {
		for name, opts := range map[string][]grpc.DialOption{"plain": nil, "retried": DialOptions(steady)} {
			t.Run(tt.name+"/"+name, func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					server := serveScripts(t, "recv a; send 1; send 2; hang")
					ctx, cancel := context.WithCancel(t.Context())
					defer cancel()
					cc := server.conn(t, append(opts, below(func(s grpc.ClientStream) grpc.ClientStream {
						hooked := &hookedStream{ClientStream: s}
						tt.hook(hooked, cancel)
						return hooked
					}))...)
					finished := "not"
					stream, err := cc.NewStream(ctx, bidiStream, "/streams/Chat", grpc.OnFinish(func(err error) { finished = status.Code(err).String() }))
					if err != nil {
						t.Fatal(err)
					}
					(&application{stream: stream}).play(t, tt.app)
					synctest.Wait()
					if finished != codes.Canceled.String() {
						t.Errorf("OnFinish: %s, want Canceled", finished)
					}
				})
			})
		}
	}
}

// An interceptor below may make a success of a failure, also of a hedged stream's.
func TestAnEndThatAnInterceptorBelowMadeGoodIsGood(t *testing.T) {
	for name, opts := range map[string][]Option{
		"retried": nil,
		"hedged":  {WithMethod("/streams/Expand", WithMaxAttempts(2), WithHedging(Hedging{Delay: HedgeAfter(time.Hour)}))},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serveScripts(t, "recv a; header; fail NOT_FOUND")
				cc := server.conn(t, append(DialOptions(opts...), below(func(s grpc.ClientStream) grpc.ClientStream {
					hooked := &hookedStream{ClientStream: s}
					hooked.recv = func(m any) error {
						err := s.RecvMsg(m)
						if status.Code(err) == codes.NotFound {
							return io.EOF
						}
						return err
					}
					return hooked
				}))...)
				finished := "not"
				app := openOn(t, cc, serverStream, grpc.OnFinish(func(err error) { finished = status.Code(err).String() }))
				app.play(t, "send a; close; recv EOF")
				if finished != codes.OK.String() {
					t.Errorf("OnFinish: %s, want OK", finished)
				}
			})
		})
	}
}

// A stream whose first message comes after another attempt has won is read to its end, so that interceptors below see it.
func TestAStreamThatWinsTooLateIsReadToItsEnd(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serveScripts(t, "recv a; wait 1500ms; send 1", "recv a; send 2; hang")
		opened, ends := 0, map[int]error{}
		cc := server.conn(t, append(DialOptions(WithMethod("/streams/Expand", WithMaxAttempts(2),
			WithHedging(Hedging{Delay: HedgeAfter(second), Budget: Unlimited}))), below(func(s grpc.ClientStream) grpc.ClientStream {
			opened++
			number, hooked := opened, &hookedStream{ClientStream: s}
			hooked.recv = func(m any) error {
				err := s.RecvMsg(m)
				if number == 2 && err == nil {
					time.Sleep(second) // while attempt 1 wins
				}
				if err != nil {
					ends[number] = err
				}
				return err
			}
			return hooked
		}))...)
		openOn(t, cc, serverStream).play(t, "send a; close; recv 1; recv EOF")
		if ends[1] != io.EOF || status.Code(ends[2]) != codes.Canceled {
			t.Errorf("the interceptor saw the ends %v, want EOF of attempt 1, and CANCELLED of attempt 2", ends)
		}
	})
}

// Messages that an interceptor has received ahead cost no more than others after the end has come.
func TestMessagesThatAreKeptBackAllocateNothing(t *testing.T) {
	const messages = 2000
	server := serveStreams(t, func(_ int, stream grpc.ServerStream) error {
		for range messages {
			if err := stream.SendMsg(&echov1.EchoResponse{}); err != nil {
				return err
			}
		}
		return nil
	})
	var ahead *aheadStream
	app := openOn(t, server.conn(t, append(DialOptions(), belowStream(func(ctx context.Context, next streamOpener) (grpc.ClientStream, error) {
		s, err := next(ctx)
		ahead = &aheadStream{ClientStream: s, ctx: ctx, room: messages}
		return ahead, err
	}))...), serverStream)
	app.play(t, "send a; close")
	<-ahead.done
	var m echov1.EchoResponse
	if allocs := testing.AllocsPerRun(messages/2, func() {
		if err := app.stream.RecvMsg(&m); err != nil {
			t.Error(err)
		}
	}); allocs != 0 {
		t.Errorf("%v allocations for each message, want none", allocs)
	}
}

// A stream's deadline may be that of the channel's service config, and the application may abandon the stream.
func TestAnAbandonedStreamEndsByTheServiceConfigsTimeout(t *testing.T) {
	const config = `{"methodConfig": [{"name": [{}], "timeout": "5s"}]}`
	for _, app := range []string{"", "send a", "send a; context", "send a; recv 1", "send a; recv 1; context"} {
		for name, opts := range map[string][]grpc.DialOption{"plain": nil, "retried": DialOptions(), "dry run": DialOptions(WithDryRun(true))} {
			t.Run(app+"/"+name, func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					server := serveScripts(t, "recv a; send 1; hang")
					got, start := "no end", time.Now()
					a := openOn(t, server.conn(t, append(opts, grpc.WithDefaultServiceConfig(config))...), bidiStream, grpc.OnFinish(func(err error) {
						got = fmt.Sprintf("%v after %v", status.Code(err), time.Since(start))
					}))
					a.play(t, app)
					time.Sleep(10 * second)
					synctest.Wait()
					if want := "DeadlineExceeded after 5s"; got != want {
						t.Errorf("the call has ended with %s, want %s", got, want)
					}
					select {
					case <-a.stream.Context().Done():
					default:
						t.Error("the context of the stream has not ended")
					}
				})
			})
		}
	}
}

// A brokenStream is one whose context panics.
type brokenStream struct{ grpc.ClientStream }

func (brokenStream) Context() context.Context { return brokenContext{} }

type brokenContext struct{ context.Context }

func (brokenContext) Err() error { panic("as the test wants") }

func TestAPanicWhenAStreamIsOpened(t *testing.T) {
	bubble(t, func(t *testing.T) {
		defer func() {
			if p := recover(); p != "as the test wants" {
				t.Errorf("the caller has recovered %v", p)
			}
		}()
		streamer := func(context.Context, *grpc.StreamDesc, *grpc.ClientConn, string, ...grpc.CallOption) (grpc.ClientStream, error) {
			return brokenStream{}, nil
		}
		_, _ = StreamClientInterceptor(WithBuiltInRetryDisabled())(t.Context(), serverStream, nil, echoMethod, streamer)
	})
}

// An endCounter counts the ends that an interceptor below sees.
type endCounter struct {
	grpc.ClientStream
	ends *int
}

func (c endCounter) RecvMsg(m any) error {
	err := c.ClientStream.RecvMsg(m)
	if err != nil {
		*c.ends++
	}
	return err
}

// SendMsg may be the first to receive the end, and RecvMsg then returns it to the application.
func TestTheEndIsReceivedOnce(t *testing.T) {
	for _, steps := range []string{"recv a; header", "recv a; header; fail NOT_FOUND", "recv a"} {
		bubble(t, func(t *testing.T) {
			ends := 0
			cc := serveScripts(t, steps).conn(t, append(DialOptions(steady),
				below(func(s grpc.ClientStream) grpc.ClientStream { return endCounter{s, &ends} }))...)
			app := openOn(t, cc, bidiStream)
			app.play(t, "send a; wait 1s; sendeof b; close")
			_ = app.stream.RecvMsg(&echov1.EchoResponse{})
			if ends != 1 {
				t.Errorf("%s: the interceptor below saw %d ends, want 1", steps, ends)
			}
		})
	}
}

// One goroutine may send while another receives, in a hedged stream, too. The race detector tells.
func TestAHedgedStreamOnTwoGoroutines(t *testing.T) {
	for range 20 {
		bubble(t, func(t *testing.T) {
			cc := serveScripts(t, "recv a; send 1").conn(t, DialOptions(WithMethod("/streams/Expand", WithMaxAttempts(2),
				WithHedging(Hedging{Delay: HedgeAfter(time.Minute)})))...)
			app := openOn(t, cc, serverStream)
			received := make(chan struct{})
			go func() {
				defer close(received)
				app.play(t, "recv 1; recv EOF")
			}()
			(&application{stream: app.stream}).play(t, "send a; close")
			<-received
		})
	}
}
