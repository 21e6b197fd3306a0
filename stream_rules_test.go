package grpcretry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// The tests here are of rules that matter only at a certain moment, which an interceptor below brings about.

// belowFrom wraps the streams of attempt n and of those that follow it.
func belowFrom(n int, wrap func(grpc.ClientStream) grpc.ClientStream) grpc.DialOption {
	return belowStream(func(ctx context.Context, next streamOpener) (grpc.ClientStream, error) {
		s, err := next(ctx)
		if a, _ := AttemptFromContext(ctx); a.Number < n {
			return s, err
		}
		return wrap(s), err
	})
}

// A server may end a stream well before it has read all messages. If that is found when they are sent again, SendMsg returns io.EOF
// from then on, whether or not there is room in the buffer.
func TestSendMsgOfAStreamThatHasEndedDuringItsReplayReturnsEOF(t *testing.T) {
	for _, commit := range []string{"header", "context"} {
		t.Run(commit, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				cc := serveScripts(t, "recv a; fail UNAVAILABLE", "header").conn(t, append(DialOptions(steady), belowFrom(2,
					func(s grpc.ClientStream) grpc.ClientStream {
						return &hookedStream{ClientStream: s, send: func(m any) error {
							time.Sleep(second)
							return s.SendMsg(m)
						}}
					}))...)
				openOn(t, cc, bidiStream).play(t, "send a; wait 10ms; send b; wait 5s; "+commit+"; sendeof c; sendeof "+long+"; recv EOF")
			})
		})
	}
}

// A SendMsg that has failed ends its stream: nothing is sent after it, also while it is found out how it has failed. The rest is for the
// next attempt.
func TestNothingIsSentAfterAReplayThatHasFailed(t *testing.T) {
	bubble(t, func(t *testing.T) {
		opened, sent := 0, []string(nil)
		cc := serveScripts(t, "recv a; fail UNAVAILABLE", "hang", "recv a; recv b; recv c; recv EOF; send 1").conn(t, append(DialOptions(steady),
			below(func(s grpc.ClientStream) grpc.ClientStream {
				if opened++; opened != 2 {
					return s
				}
				return &hookedStream{ClientStream: s, send: func(m any) error {
					if sent = append(sent, m.(*echov1.EchoRequest).GetMessage()); len(sent) > 1 {
						return s.SendMsg(m)
					}
					return &slowError{error: status.Error(codes.Unavailable, "below")}
				}}
			}))...)
		app := openOn(t, cc, bidiStream)
		app.play(t, "send a; wait 10ms; send b; wait 500ms; send c; close; recv 1; recv EOF")
		if fmt.Sprint(sent) != "[a]" {
			t.Errorf("attempt 2 was sent %q, want only the first message, which failed", sent)
		}
	})
}

// A slowError takes a second to be read for the first time.
type slowError struct {
	error
	once sync.Once
}

func (e *slowError) Unwrap() error {
	e.once.Do(func() { time.Sleep(second) })
	return e.error
}

// A message may be on its way through an interceptor when another goroutine's SendMsg finds that the call is over. It is for the
// application all the same.
func TestAMessageThatCrossesTheEndOfTheCallIsDelivered(t *testing.T) {
	for _, end := range []string{"oversized", "cancel; wait 1ms; sendeof b"} {
		for _, before := range []string{"send a; context", "send a; header"} {
			for name, opts := range map[string][]grpc.DialOption{"plain": nil, "retried": DialOptions(steady)} {
				t.Run(fmt.Sprintf("%s/%s/%s", end, before, name), func(t *testing.T) {
					bubble(t, func(t *testing.T) {
						cc := serveScripts(t, "recv a; header; send 1; hang").conn(t, append(opts, sendLimit,
							below(func(s grpc.ClientStream) grpc.ClientStream { return slowStream{s} }))...)
						app := openOn(t, cc, bidiStream)
						app.play(t, before)
						var receiver sync.WaitGroup
						receiver.Go(func() { app.play(t, "recv 1") })
						app.play(t, "wait 100ms; "+end)
						receiver.Wait()
					})
				})
			}
		}
	}
}

// A message that cannot be sent may end a call after retries. SendMsg then returns the call's error, as RecvMsg does, which tells of all
// attempts.
func TestSendMsgThatEndsACallAfterARetryReturnsTheCallsError(t *testing.T) {
	bubble(t, func(t *testing.T) {
		cc := serveScripts(t, "recv a; fail UNAVAILABLE", "recv a; recv b; hang").conn(t, append(DialOptions(steady), sendLimit)...)
		app := openOn(t, cc, bidiStream)
		app.play(t, "send a; wait 10ms; send b; wait 2s")
		err := app.stream.SendMsg(&echov1.EchoRequest{Message: long[:200]})
		if e := asError(t, err); len(e.Attempts) != 2 || status.Code(err) != codes.ResourceExhausted {
			t.Errorf("SendMsg = %v after %d attempts, want RESOURCE_EXHAUSTED after 2", err, len(e.Attempts))
		}
		if again := app.stream.RecvMsg(&echov1.EchoResponse{}); again != err {
			t.Errorf("RecvMsg = %v, want %v", again, err)
		}
	})
}

// An interceptor may say what the end is that another goroutine's SendMsg has found meanwhile. RecvMsg keeps to that.
func TestTheErrorThatAnInterceptorHasMadeOfTheEndStays(t *testing.T) {
	for name, opts := range map[string][]grpc.DialOption{"plain": nil, "retried": DialOptions(steady)} {
		for _, before := range []string{"send a; recv 1", "send a; context"} {
			t.Run(name+"/"+before, func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					server := "recv a; send 1; hang"
					if before == "send a; context" {
						server = "hang"
					}
					cc := serveScripts(t, server).conn(t, append(opts, below(func(s grpc.ClientStream) grpc.ClientStream {
						return &hookedStream{ClientStream: s, recv: func(m any) error {
							if err := s.RecvMsg(m); err == nil {
								return nil
							}
							time.Sleep(second)
							return status.Error(codes.Aborted, "below")
						}}
					}))...)
					app := openOn(t, cc, bidiStream)
					app.play(t, before)
					var receiver sync.WaitGroup
					receiver.Go(func() { app.play(t, "recv ABORTED; recv ABORTED") })
					app.play(t, "wait 100ms; cancel; wait 1ms; sendeof b")
					receiver.Wait()
				})
			})
		}
	}
}

// A hedge to which the request cannot be sent has failed for that reason, and not because the library has ended it.
func TestAHedgeThatCannotBeSentTellsWhy(t *testing.T) {
	bubble(t, func(t *testing.T) {
		hedging := WithHedging(Hedging{Delay: HedgeAfter(second), Budget: Unlimited, AllMethodsAreSafe: true})
		cc := serveScripts(t, "recv a; hang", "hang").conn(t, append(DialOptions(steady, hedging),
			belowFrom(2, func(s grpc.ClientStream) grpc.ClientStream { return mute{s} }))...)
		openOn(t, cc, serverStream).play(t, "send a; close; recv UNAUTHENTICATED")
	})
}

// dropping is an interceptor that does not pass the call options on.
var dropping = grpc.WithChainStreamInterceptor(func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string,
	streamer grpc.Streamer, _ ...grpc.CallOption) (grpc.ClientStream, error) {
	return streamer(ctx, desc, cc, method)
})

// The attempt timeout may end an attempt whose headers are on their way through an interceptor, without a report of gRPC's. Header then
// returns those of the next attempt.
func TestHeaderOfAnAttemptThatIsCutMeanwhileIsThatOfTheNext(t *testing.T) {
	for name, opts := range map[string][]grpc.DialOption{"reported": nil, "not reported": {dropping}} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				opened := 0
				slow := below(func(s grpc.ClientStream) grpc.ClientStream {
					if opened++; opened > 1 {
						return s
					}
					return headerDelayed{s}
				})
				cc := serveScripts(t, "recv a; header; hang", "recv a; header; send 1").conn(t,
					append(append(DialOptions(steady, WithAttemptTimeout(5*second)), slow), opts...)...)
				app := openOn(t, cc, bidiStream)
				app.play(t, "send a")
				if md, err := app.stream.Header(); first(md["attempt"]) != "2" || err != nil {
					t.Errorf("Header = %v, %v, want that of attempt 2", md, err)
				}
				app.play(t, "recv 1; recv EOF")
			})
		})
	}
}

// That Header has nothing to return does not prove that the stream has ended, or how.
func TestAHeaderWithoutAnEndSaysNothingOfIt(t *testing.T) {
	for name, tt := range map[string]struct {
		server, app string
		below       grpc.DialOption
	}{
		"hidden headers": {"recv a; header; wait 1s; send 1", "send a; no headers; recv 1; recv EOF",
			below(func(s grpc.ClientStream) grpc.ClientStream { return unheaded{s} })},
		"dropped options": {"recv a; fail NOT_FOUND", "send a; no headers; recv NOT_FOUND", dropping},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				openOn(t, serveScripts(t, tt.server).conn(t, append(DialOptions(steady), tt.below)...), unlinkedStream).play(t, tt.app)
			})
		})
	}
}

// unheaded is a stream that hides its headers.
type unheaded struct{ grpc.ClientStream }

func (unheaded) Header() (metadata.MD, error) { return nil, nil }

// gRPC's report of an end may still be on its way when Header returns because of that end. The failure is retried all the same.
func TestHeaderWaitsForTheReportOfTheEnd(t *testing.T) {
	bubble(t, func(t *testing.T) {
		late := grpc.WithChainStreamInterceptor(func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string,
			streamer grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
			slow := grpc.OnFinish(func(error) { time.Sleep(5 * time.Millisecond) })
			return streamer(ctx, desc, cc, method, append([]grpc.CallOption{slow}, opts...)...)
		})
		cc := serveScripts(t, "recv a; wait 1s; fail UNAVAILABLE", "recv a; header; send 1").conn(t, append(DialOptions(steady), late)...)
		app := openOn(t, cc, bidiStream)
		app.play(t, "send a")
		var receiver sync.WaitGroup
		receiver.Go(func() { app.play(t, "recv 1; recv EOF") })
		app.play(t, "header")
		receiver.Wait()
	})
}

// A lockedAhead receives ahead of the application, and holds a lock that Trailer and Header take, while it receives. gRPC reports the
// end within that.
type lockedAhead struct {
	aheadStream
	t    *testing.T
	lock chan struct{} // so that a bubble's time goes on while a goroutine waits
}

func (s *lockedAhead) hold() (free func()) {
	select {
	case s.lock <- struct{}{}:
		return func() { <-s.lock }
	case <-time.After(time.Minute):
		s.t.Error("nobody gives the lock back")
		return func() {}
	}
}

func (s *lockedAhead) Header() (metadata.MD, error) {
	defer s.hold()()
	return s.ClientStream.Header()
}

func (s *lockedAhead) Trailer() metadata.MD {
	defer s.hold()()
	return s.ClientStream.Trailer()
}

func TestAnInterceptorThatReceivesAheadMayHoldALock(t *testing.T) {
	for _, before := range []string{"", "context; "} {
		bubble(t, func(t *testing.T) {
			cc := serveScripts(t, "recv a; recv EOF; fail CANCELLED").conn(t, append(DialOptions(steady),
				belowStream(func(ctx context.Context, next streamOpener) (grpc.ClientStream, error) {
					s, err := next(ctx)
					ahead := &lockedAhead{t: t, lock: make(chan struct{}, 1)}
					ahead.aheadStream = aheadStream{ctx: ctx, ClientStream: &hookedStream{ClientStream: s, recv: func(m any) error {
						defer ahead.hold()()
						return s.RecvMsg(m)
					}}}
					return ahead, err
				}))...)
			app := openOn(t, cc, bidiStream)
			app.play(t, before+"send a; close; wait 1s; recv CANCELLED")
		})
	}
}

// A response that has come is a success, also if the caller cancels before the library has taken note of it: here a classifier holds it
// up, which judges the slowness. An interceptor has made the response, so that gRPC reports the cancellation.
func TestAResponseIsASuccessAlthoughTheCallerCancels(t *testing.T) {
	bubble(t, func(t *testing.T) {
		cc := serveScripts(t, "hang").conn(t, append(DialOptions(WithAttemptTimeout(2*second),
			WithClassifier(func(context.Context, Attempt) Classification {
				time.Sleep(4 * second)
				return Stop
			})), below(func(s grpc.ClientStream) grpc.ClientStream {
			return &hookedStream{ClientStream: s, recv: func(any) error {
				time.Sleep(3 * second)
				return nil
			}}
		}))...)
		finished := errors.New("not yet")
		app := openOn(t, cc, clientStream, grpc.OnFinish(func(err error) { finished = err }))
		time.AfterFunc(4*second, app.cancel)
		app.play(t, "send a; close; recv ")
		if synctest.Wait(); finished != nil {
			t.Errorf("OnFinish(%v), want a success", finished)
		}
	})
}

// A message may be on its way through an interceptor when another goroutine's SendMsg fails, so that the attempt could be replaced. The
// application gets it, and so becomes bound to the attempt.
func TestAMessageThatCrossesTheFailureOfASendMsgIsDelivered(t *testing.T) {
	bubble(t, func(t *testing.T) {
		cc := serveScripts(t, "recv a; send 1; hang", "recv a; recv b; send 2").conn(t, append(DialOptions(steady),
			below(func(s grpc.ClientStream) grpc.ClientStream {
				sent := 0
				return &hookedStream{ClientStream: slowStream{s}, send: func(m any) error {
					if sent++; sent > 1 {
						return status.Error(codes.Unavailable, "below")
					}
					return s.SendMsg(m)
				}}
			}))...)
		app := openOn(t, cc, bidiStream)
		app.play(t, "send a")
		var receiver sync.WaitGroup
		receiver.Go(func() { app.play(t, "recv 1; recv UNAVAILABLE") })
		app.play(t, "wait 100ms; try b")
		receiver.Wait()
	})
}

// The goroutine that receives judges a failure, because interceptors below may tell it what that is. A SendMsg that commits the stream
// waits for that.
func TestSendMsgOverTheBufferLeavesAFailureToTheReceiver(t *testing.T) {
	bubble(t, func(t *testing.T) {
		cc := serveScripts(t, "recv a; fail NOT_FOUND", "recv a; recv "+long+"; send 1").conn(t, append(DialOptions(steady),
			below(func(s grpc.ClientStream) grpc.ClientStream {
				ends := []codes.Code{}
				translated := &translatingStream{s, &ends}
				return &hookedStream{ClientStream: s, recv: func(m any) error {
					defer time.Sleep(second)
					return translated.RecvMsg(m)
				}}
			}))...)
		app := openOn(t, cc, bidiStream)
		app.play(t, "send a")
		var receiver sync.WaitGroup
		receiver.Go(func() { app.play(t, "recv 1; recv EOF") })
		app.play(t, "wait 100ms; send "+long)
		receiver.Wait()
	})
}

// The caller may cancel while the application is in a RecvMsg that returns a first message, and abandon the stream then.
func TestAnEndDuringTheFirstRecvMsgIsReported(t *testing.T) {
	for _, before := range []string{"send a", "send a; context"} {
		for name, opts := range map[string][]grpc.DialOption{"plain": nil, "retried": DialOptions(steady)} {
			t.Run(before+"/"+name, func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					cc := serveScripts(t, "recv a; send 1; hang").conn(t, append(opts,
						below(func(s grpc.ClientStream) grpc.ClientStream { return slowStream{s} }))...)
					finished := "not"
					app := openOn(t, cc, bidiStream, grpc.OnFinish(func(err error) { finished = status.Code(err).String() }))
					app.play(t, before)
					time.AfterFunc(second/2, app.cancel)
					app.play(t, "recv 1")
					if synctest.Wait(); finished != "Canceled" {
						t.Errorf("OnFinish: %s, want Canceled", finished)
					}
				})
			})
		}
	}
}

// A retry that fails leaves nothing in the application's message, as the first attempt has left nothing.
func TestNothingOfARetryThatFailsIsLeftInTheMessage(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const server = "recv a; recv EOF; send 1; fail UNAVAILABLE"
		app := openOn(t, serveScripts(t, server, server).conn(t, DialOptions(steady, WithMaxAttempts(2))...), clientStream)
		app.play(t, "send a; close")
		var m echov1.EchoResponse
		if err := app.stream.RecvMsg(&m); status.Code(err) != codes.Unavailable || m.GetMessage() != "" {
			t.Errorf("RecvMsg = %v with %q, want UNAVAILABLE and nothing", err, m.GetMessage())
		}
	})
}

// An interceptor may end a stream by itself, so that gRPC's stream goes on. Nothing more is sent to that.
func TestNothingIsSentAfterAnEndThatAnInterceptorHasMade(t *testing.T) {
	bubble(t, func(t *testing.T) {
		cc := serveScripts(t, "recv a; recv EOF").conn(t, append(DialOptions(steady), below(func(s grpc.ClientStream) grpc.ClientStream {
			return &hookedStream{ClientStream: s, recv: func(any) error { return io.EOF }}
		}))...)
		openOn(t, cc, bidiStream).play(t, "send a; wait 1s; recv EOF; sendeof b; cancel")
	})
}

// gRPC may take its time to report the end of a stream whose SendMsg an interceptor has made fail. Until then, Trailer reads nothing that
// gRPC may write.
func TestTrailerBeforeTheReportOfAnEndReadsNothing(t *testing.T) {
	bubble(t, func(t *testing.T) {
		late := grpc.WithChainStreamInterceptor(func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string,
			open grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
			ended := false
			opts = append([]grpc.CallOption{grpc.OnFinish(func(error) {
				time.Sleep(2 * overGrace)
				ended = true
			})}, opts...)
			stream, err := open(ctx, desc, cc, method, opts...)
			return rejecting{stream, func() {
				if !ended {
					t.Error("Trailer was called before gRPC had reported the stream's end")
				}
			}}, err
		})
		app := openOn(t, serveScripts(t, "hang").conn(t, append(DialOptions(steady), late)...), bidiStream)
		app.play(t, "try bad; trailer ; wait 1s; trailer ")
	})
}

// Trailer is known when gRPC has reported the end, or RecvMsg has returned it.
func TestTrailerIsKnownFromEitherReportOfTheEnd(t *testing.T) {
	for name, tt := range map[string]struct {
		server, app string
		below       grpc.DialOption
	}{
		"not received": {"recv a; fail CANCELLED", "send a; context; wait 1s; trailer 1",
			belowStream(func(ctx context.Context, next streamOpener) (grpc.ClientStream, error) {
				s, err := next(ctx)
				return &eagerStream{aheadStream{ClientStream: s, ctx: ctx}}, err
			})},
		"not reported": {"recv a; fail NOT_FOUND", "send a; recv NOT_FOUND; trailer 1", dropping},
	} {
		for kind, opts := range map[string][]grpc.DialOption{"plain": nil, "retried": DialOptions(steady)} {
			t.Run(name+"/"+kind, func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					openOn(t, serveScripts(t, tt.server).conn(t, append(opts, tt.below)...), bidiStream).play(t, tt.app)
				})
			})
		}
	}
}

// An interceptor may give each attempt a time of its own, and say in RecvMsg that its end is a failure of the server. An upload that
// flow control has blocked meanwhile is retried.
func TestAnEndThatASendMsgHasFoundIsWhatRecvMsgSays(t *testing.T) {
	for _, desc := range []*grpc.StreamDesc{clientStream, bidiStream} {
		t.Run(desc.StreamName, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serveScripts(t, "hang", "recv "+long+"; recv "+long+"; recv EOF; send 1")
				cc := server.conn(t, append(DialOptions(steady, WithBufferLimit(1<<20)),
					belowStream(func(ctx context.Context, next streamOpener) (grpc.ClientStream, error) {
						own, cancel := context.WithTimeout(ctx, 3*second)
						context.AfterFunc(ctx, cancel)
						s, err := next(own)
						return &hookedStream{ClientStream: s, recv: func(m any) error {
							err := s.RecvMsg(m)
							if status.Code(err) == codes.DeadlineExceeded {
								return status.Error(codes.Unavailable, "the attempt took too long")
							}
							return err
						}}, err
					}))...)
				openOn(t, cc, desc).play(t, "send "+long+"; send "+long+"; close; recv 1; recv EOF")
			})
		})
	}
}

// A call whose context has ended, or whose ClientConn is closed, while another attempt is opened says so, also if an object is sent again
// before the opening has failed.
func TestTheEndOfACallComesBeforeAnObjectThatIsSentAgain(t *testing.T) {
	for name, end := range map[string]func(*application, *grpc.ClientConn){
		"cancelled": func(app *application, _ *grpc.ClientConn) { app.cancel() },
		"closed":    func(_ *application, cc *grpc.ClientConn) { cc.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				cc := serveScripts(t, "recv a; fail UNAVAILABLE").conn(t, append(DialOptions(steady),
					belowStream(func(ctx context.Context, next streamOpener) (grpc.ClientStream, error) {
						if a, _ := AttemptFromContext(ctx); a.Number > 1 {
							time.Sleep(10 * second)
						}
						return next(ctx)
					}))...)
				app, m := openOn(t, cc, bidiStream), &echov1.EchoRequest{Message: "a"}
				if err := app.stream.SendMsg(m); err != nil {
					t.Fatal(err)
				}
				var receiver sync.WaitGroup
				receiver.Go(func() { app.play(t, "recv CANCELLED") })
				time.Sleep(5 * second)
				end(app, cc)
				if err := app.stream.SendMsg(m); err != io.EOF {
					t.Errorf("SendMsg = %v, want io.EOF", err)
				}
				receiver.Wait()
			})
		})
	}
}

// A retry whose message comes too late fails, and leaves nothing in the application's message, hedged or not.
func TestNothingOfAMessageThatCameTooLateIsLeft(t *testing.T) {
	hedging := WithHedging(Hedging{Delay: HedgeAfter(time.Hour), AllMethodsAreSafe: true})
	for name, opts := range map[string][]Option{"retried": nil, "hedged": {hedging}} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				opts := append([]Option{steady, WithMaxAttempts(2), WithAttemptTimeout(5 * second)}, opts...)
				cc := serveScripts(t, "send 1; hang", "send 2; hang").conn(t, append(DialOptions(opts...),
					below(func(s grpc.ClientStream) grpc.ClientStream { return &lateStream{s, 10 * second} }))...)
				app := openOn(t, cc, serverStream)
				app.play(t, "send a; close")
				var m echov1.EchoResponse
				if err := app.stream.RecvMsg(&m); status.Code(err) != codes.DeadlineExceeded || m.GetMessage() != "" {
					t.Errorf("RecvMsg = %v with %q, want DEADLINE_EXCEEDED and nothing", err, m.GetMessage())
				}
			})
		})
	}
}

// The ClientConn may be closed at any moment of a SendMsg that finds an end. If OnFinish panics then, the application can recover.
func TestAPanicInOnFinishWhileSendMsgFindsTheEnd(t *testing.T) {
	for moment := range 12 {
		bubble(t, func(t *testing.T) {
			var cc *grpc.ClientConn
			sent, read := 0, 0
			cc = serveScripts(t, "recv a; fail NOT_FOUND").conn(t, append(DialOptions(steady), below(func(s grpc.ClientStream) grpc.ClientStream {
				return &hookedStream{ClientStream: s, send: func(m any) error {
					if sent++; sent == 1 {
						defer func() { go s.RecvMsg(new(echov1.EchoResponse)) }() // it receives ahead
						return s.SendMsg(m)
					}
					return readError{status.Error(codes.Unavailable, "below"), func() {
						if read++; read == moment {
							cc.Close()
						}
					}}
				}}
			}))...)
			app := openOn(t, cc, bidiStream, grpc.OnFinish(func(error) { panic("mine") }))
			app.play(t, "send a; wait 1s")
			panicked := 0
			for _, method := range []func(any) error{app.stream.SendMsg, app.stream.RecvMsg} {
				func() {
					defer func() {
						if recover() == "mine" {
							panicked++
						}
					}()
					_ = method(new(echov1.EchoRequest))
				}()
			}
			if panicked != 1 {
				t.Errorf("closed at moment %d: OnFinish panicked %d times in the application's methods, want once", moment, panicked)
			}
		})
	}
}

// A readError tells when it is read.
type readError struct {
	error
	read func()
}

func (e readError) Unwrap() error {
	e.read()
	return e.error
}
