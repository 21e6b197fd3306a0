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
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// The tests here are of the end of a stream: what may be asked then, and that it comes.

// endings are streams that end, with their one attempt.
var endings = []struct {
	name            string
	kind            *grpc.StreamDesc
	server, app     string
	header, trailer string // the attempt that they name, if there are any
}{
	{"committed, success", bidiStream, "recv a; header; send 1", "send a; recv 1; recv EOF", "1", ""},
	{"committed, failure", bidiStream, "recv a; header; send 1; fail UNAVAILABLE", "send a; recv 1; recv UNAVAILABLE", "1", "1"},
	{"committed, cancelled", bidiStream, "recv a; header; send 1; hang", "send a; recv 1; cancel; recv CANCELLED", "1", ""},
	{"committed, abandoned", bidiStream, "recv a; header; send 1; hang", "send a; recv 1; cancel", "1", ""},
	{"not committed, success", bidiStream, "recv a; header", "send a; recv EOF", "1", ""},
	{"not committed, failure", bidiStream, "recv a; header; fail NOT_FOUND", "send a; recv NOT_FOUND", "1", "1"},
	{"not committed, failure without headers", bidiStream, "recv a; fail NOT_FOUND", "send a; recv NOT_FOUND", "", "1"},
	{"not committed, cancelled", bidiStream, "recv a; header; hang", "send a; wait 1s; cancel; recv CANCELLED", "1", ""},
	{"not committed, abandoned", bidiStream, "recv a; header; hang", "send a; wait 1s; cancel", "1", ""},
	{"server stream", serverStream, "recv a; header; send 1; fail NOT_FOUND", "send a; close; recv 1; recv NOT_FOUND", "1", "1"},
	{"server stream, failure", serverStream, "recv a; header; fail NOT_FOUND", "send a; close; recv NOT_FOUND", "1", "1"},
	{"client stream, success", clientStream, "recv a; header; recv EOF; send 1", "send a; close; recv 1", "1", ""},
	{"client stream, failure", clientStream, "recv a; header; recv EOF; fail NOT_FOUND", "send a; close; recv NOT_FOUND", "1", "1"},
}

func TestHeaderAfterTheEndReturnsHeadersThatHadArrived(t *testing.T) {
	for _, tt := range endings {
		t.Run(tt.name, func(t *testing.T) {
			asPlain(t, nil, func(t *testing.T, dial []grpc.DialOption) {
				app := openOn(t, serveScripts(t, tt.server).conn(t, dial...), tt.kind)
				app.play(t, tt.app)
				synctest.Wait()
				if md, err := app.stream.Header(); err != nil || first(md["attempt"]) != tt.header {
					t.Errorf("Header = %v, %v, want those of attempt %q", md, err, tt.header)
				}
			})
		})
	}
}

func TestHeaderAfterRetriesReturnsThoseOfTheLastAttempt(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serveScripts(t, "recv a; header; fail UNAVAILABLE", "recv a; header; fail UNAVAILABLE")
		app := openOn(t, server.conn(t, DialOptions(steady, WithMaxAttempts(2))...), bidiStream)
		app.play(t, "send a; recv UNAVAILABLE; trailer 2")
		if md, err := app.stream.Header(); err != nil || first(md["attempt"]) != "2" {
			t.Errorf("Header = %v, %v, want those of attempt 2", md, err)
		}
	})
}

// asked is what a stream says of itself within a callback.
type asked struct {
	stream grpc.ClientStream
	calls  int

	header, trailer string
}

// ask calls the methods of the stream. It runs in a callback, which gives up after a minute.
func (a *asked) ask(t *testing.T) {
	a.calls++
	done := make(chan struct{})
	go func() {
		defer close(done)
		if a.stream.Context() == nil {
			t.Error("Context = nil")
		}
		a.trailer = first(a.stream.Trailer()["attempt"])
		md, err := a.stream.Header()
		if err != nil {
			t.Errorf("Header = %v", err)
		}
		a.header = first(md["attempt"])
	}()
	select {
	case <-done:
	case <-time.After(time.Minute):
		t.Error("a method of the stream hangs in a callback at its end")
	}
}

func (a *asked) want(t *testing.T, header, trailer string) {
	t.Helper()
	if a.calls != 1 || a.header != header || a.trailer != trailer {
		t.Errorf("%d calls saw the header of attempt %q and the trailer of attempt %q, want one with %q and %q",
			a.calls, a.header, a.trailer, header, trailer)
	}
}

func TestAStreamMayBeAskedFromOnFinish(t *testing.T) {
	for _, tt := range endings {
		t.Run(tt.name, func(t *testing.T) {
			asPlain(t, nil, func(t *testing.T, dial []grpc.DialOption) {
				server, asked := serveScripts(t, tt.server), &asked{}
				app := openOn(t, server.conn(t, dial...), tt.kind, grpc.OnFinish(func(error) { asked.ask(t) }))
				asked.stream = app.stream
				app.play(t, tt.app)
				time.Sleep(2 * time.Minute)
				synctest.Wait()
				asked.want(t, tt.header, tt.trailer)
			})
		})
	}
}

func TestAStreamMayBeAskedFromAnObserverAtItsEnd(t *testing.T) {
	for _, tt := range endings {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server, asked := serveScripts(t, tt.server), &asked{}
				app := openOn(t, server.conn(t, DialOptions(WithObserver(func(_ context.Context, e Event) {
					if e.Kind == CallEnd {
						asked.ask(t)
					}
				}))...), tt.kind)
				asked.stream = app.stream
				app.play(t, tt.app)
				time.Sleep(2 * time.Minute)
				synctest.Wait()
				asked.want(t, tt.header, tt.trailer)
			})
		})
	}
}

// lateCaller is a stream whose RecvMsg is called late.
type lateCaller struct {
	grpc.ClientStream
	delay time.Duration
}

func (s lateCaller) RecvMsg(m any) error {
	time.Sleep(s.delay)
	return s.ClientStream.RecvMsg(m)
}

// finishingSlowly makes gRPC's report of the end late: whoever ends a stream is held up for a
// while after the stream is over for all others.
func finishingSlowly(receive, finish time.Duration) grpc.DialOption {
	return grpc.WithChainStreamInterceptor(func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string,
		streamer grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
		slow := grpc.OnFinish(func(error) { time.Sleep(finish) })
		stream, err := streamer(ctx, desc, cc, method, append([]grpc.CallOption{slow}, opts...)...)
		return lateCaller{stream, receive}, err
	})
}

// Header ends the stream at 1 s and returns at 2 s; RecvMsg has the status at 1.5 s.
func TestDoNotRetryIsObeyedWhileHeaderReportsTheEnd(t *testing.T) {
	for _, kind := range []*grpc.StreamDesc{serverStream, clientStream, bidiStream} {
		t.Run(kind.StreamName, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serveScripts(t, "recv a; wait 1s; pushback -1; fail UNAVAILABLE")
				var trailer metadata.MD
				app := openOn(t, server.conn(t, append(DialOptions(steady), finishingSlowly(1500*time.Millisecond, second))...), kind,
					grpc.Trailer(&trailer))
				app.play(t, "send a; close")
				var group sync.WaitGroup
				group.Go(func() { app.play(t, "no header") })
				app.play(t, "recv UNAVAILABLE")
				if first(trailer["attempt"]) != "1" {
					t.Errorf("trailer is %v, want that of attempt 1", trailer)
				}
				group.Wait()
				wantStop(t, app.err, codes.Unavailable, ErrPushback, 1)
				wantTimes(t, server, 0)
			})
		})
	}
}

// The end of the context ends the stream at 2 s, and that returns at 4 s; RecvMsg has the status
// at 3 s.
func TestPeerAndHeaderOfACancelledStreamAreThere(t *testing.T) {
	for _, tt := range []struct{ name, server, app string }{
		{"committed", "recv a; header; send 1; hang", "send a; recv 1; recv CANCELLED"},
		{"not committed", "recv a; header; hang", "send a; wait 1500ms; recv CANCELLED"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			asPlain(t, nil, func(t *testing.T, dial []grpc.DialOption) {
				server := serveScripts(t, tt.server)
				var header metadata.MD
				var at peer.Peer
				app := openOn(t, server.conn(t, append(dial, finishingSlowly(1500*time.Millisecond, 2*second))...), bidiStream,
					grpc.Peer(&at), grpc.Header(&header))
				time.AfterFunc(2*second, app.cancel)
				app.play(t, tt.app)
				if at.Addr == nil || first(header["attempt"]) != "1" {
					t.Errorf("peer is %v and header %v when RecvMsg has returned, want those of attempt 1", at.Addr, header)
				}
				time.Sleep(5 * second) // for the end to be reported
			})
		})
	}
}

// abandon runs a stream that one goroutine sends to for a second, and whose Context another one
// asks for or does not. Neither comes back. Meanwhile the attempt times out at 5 s, and the call
// ends.
func abandon(t *testing.T, end func(*application, *grpc.ClientConn)) {
	ms := func(n int) time.Duration { return time.Duration(n) * time.Millisecond }
	for _, send := range []time.Duration{ms(2500), ms(4500), ms(5200)} {
		for _, at := range []time.Duration{ms(2700), ms(4700), ms(5100), ms(5300), ms(5700), ms(8000)} {
			for _, use := range []time.Duration{ms(2800), ms(4800), ms(5250), ms(5600), ms(5800), ms(9000), time.Hour} {
				t.Run(fmt.Sprintf("SendMsg at %v, ended at %v, Context at %v", send, at, use), func(t *testing.T) {
					bubble(t, func(t *testing.T) {
						server, reported := serveScripts(t, "hang", "hang"), &record{}
						cc := server.conn(t, append(DialOptions(append(reported.options(), WithAttemptTimeout(5*second), steady)...),
							below(func(s grpc.ClientStream) grpc.ClientStream { return pausing{s} }))...)
						app := openOn(t, cc, bidiStream, reported.onFinish())
						time.AfterFunc(at, func() { end(app, cc) })
						if use < time.Hour {
							time.AfterFunc(use, func() { app.stream.Context() })
						}
						time.Sleep(send)
						app.stream.SendMsg(request())
						time.Sleep(time.Minute)
						reported.mu.Lock()
						defer reported.mu.Unlock()
						if f, e := reported.finished, reported.ended; len(f) != 1 || len(e) != 1 || f[0] == nil || e[0] == nil {
							t.Errorf("OnFinish reported %v and CallEnd %v, want a failure once each", f, e)
						}
					})
				})
			}
		}
	}
}

func TestAnAbandonedStreamEndsWheneverItIsCancelled(t *testing.T) {
	abandon(t, func(app *application, _ *grpc.ClientConn) { app.cancel() })
}

func TestAnAbandonedStreamEndsWheneverItsClientConnIsClosed(t *testing.T) {
	abandon(t, func(_ *application, cc *grpc.ClientConn) { cc.Close() })
}

// A client stream that succeeds has a response. gRPC returns a bare io.EOF when a transparent
// retry fails at the wrong moment.
func TestAClientStreamThatEndsWithoutAResponseIsAFailure(t *testing.T) {
	for _, tt := range []struct {
		name string
		use  func(grpc.ClientStream)
	}{
		{"not committed", func(grpc.ClientStream) {}},
		{"committed by Context", func(s grpc.ClientStream) { s.Context() }},
		{"committed by Header", func(s grpc.ClientStream) { s.Header() }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				reported := &record{}
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				stream, err := StreamClientInterceptor(append(reported.options(), steady)...)(ctx, clientStream, nil, "/s/m",
					func(context.Context, *grpc.StreamDesc, *grpc.ClientConn, string, ...grpc.CallOption) (grpc.ClientStream, error) {
						return &deaf{kind: bidiStream, finish: func(error) {}}, nil
					}, reported.onFinish())
				if err != nil {
					t.Fatal(err)
				}
				tt.use(stream)
				err = stream.RecvMsg(new(echov1.EchoResponse))
				if err == nil || errors.Is(err, io.EOF) || status.Code(err) == codes.OK {
					t.Fatalf("RecvMsg = %v, want a failure", err)
				}
				reported.want(t, err)
			})
		})
	}
}

// A concurrency budget limits what is sent instead of a failed attempt. A stream that goes on is
// no longer that.
func TestACommittedStreamGivesItsPlaceInAConcurrencyBudgetBack(t *testing.T) {
	for _, tt := range []struct{ name, server, commit string }{
		{"by a message", "recv a; send 1; hang", "recv 1"},
		{"by Header", "recv a; header; hang", "header"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				atOnce, err := NewConcurrencyBudget(1)
				if err != nil {
					t.Fatal(err)
				}
				wantFree := func(want float64, when string) {
					t.Helper()
					if got := atOnce.Balance(time.Now()); got != want {
						t.Errorf("%s the budget has %v retries, want %v", when, got, want)
					}
				}
				server := serveScripts(t, "recv a; fail UNAVAILABLE", tt.server, "recv a; fail UNAVAILABLE", "recv a; send 1")
				cc := server.conn(t, DialOptions(steady, WithBudget(AllBudgets(atOnce, Unlimited)))...)
				watch := openOn(t, cc, bidiStream)
				time.AfterFunc(second/2, func() { wantFree(0, "during the backoff") })
				watch.play(t, "send a; "+tt.commit)
				wantFree(1, "after the commit")
				openOn(t, cc, bidiStream).play(t, "send a; recv 1; recv EOF")
				wantFree(1, "after another call")
				watch.cancel()
				synctest.Wait()
				wantFree(1, "after the end")
			})
		})
	}
}

// The end of a stream is a success and plain io.EOF, whatever came before it.
func TestTheEndOfAStreamIsASuccess(t *testing.T) {
	for _, tt := range []struct {
		name    string
		kind    *grpc.StreamDesc
		scripts []string
		app     string
		want    []Outcome
	}{
		{"without a message", serverStream, []string{"recv a"}, "send a; close; recv EOF; recv EOF",
			[]Outcome{{Attempt: 1, Result: Succeeded}}},
		{"without a message, after a retry", serverStream, []string{"fail UNAVAILABLE", "recv a"}, "send a; close; recv EOF; recv EOF",
			[]Outcome{{Attempt: 1, Result: Failed}, {Attempt: 2, Result: Succeeded}}},
		{"after a message", serverStream, []string{"recv a; send 1"}, "send a; close; recv 1; recv EOF; recv EOF",
			[]Outcome{{Attempt: 1, Result: Succeeded}}},
		{"after a message, after a retry", bidiStream, []string{"fail UNAVAILABLE", "recv a; send 1"},
			"send a; close; recv 1; recv EOF; recv EOF",
			[]Outcome{{Attempt: 1, Result: Failed}, {Attempt: 2, Result: Succeeded}}},
		{"after headers", serverStream, []string{"recv a; header"}, "send a; close; header; recv EOF; recv EOF",
			[]Outcome{{Attempt: 1, Result: Succeeded}}},
		{"of a client stream", clientStream, []string{"fail UNAVAILABLE", "recv a; recv EOF; send 1"}, "send a; close; recv 1",
			[]Outcome{{Attempt: 1, Result: Failed}, {Attempt: 2, Result: Succeeded}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serveStreams(t, func(n int, stream grpc.ServerStream) error { return playServer(t, n, tt.scripts[n-1], stream) })
				budget := &aBudget{}
				var ends, finished []error
				app, err := server.openStream(t, tt.kind, []Option{WithBudget(budget), WithObserver(func(_ context.Context, e Event) {
					if e.Kind == CallEnd {
						ends = append(ends, e.Err)
					}
				})}, grpc.OnFinish(func(err error) { finished = append(finished, err) }))
				if err != nil {
					t.Fatal(err)
				}
				app.play(t, tt.app)
				if !slices.Equal(budget.heard, tt.want) {
					t.Errorf("budget heard %v, want %v", budget.heard, tt.want)
				}
				if none := []error{nil}; !slices.Equal(ends, none) || !slices.Equal(finished, none) {
					t.Errorf("CallEnd came with %v and OnFinish ran with %v, want once without an error each", ends, finished)
				}
				if err := app.stream.RecvMsg(new(echov1.EchoResponse)); err != io.EOF {
					t.Errorf("RecvMsg = %#v, want io.EOF itself", err)
				}
			})
		})
	}
}

// quiet is a stream from an interceptor below that does not pass OnFinish on.
type quiet struct {
	grpc.ClientStream
	received []error // what RecvMsg returns, one after the other
	sent     error
}

func (q *quiet) SendMsg(any) error            { return q.sent }
func (q *quiet) CloseSend() error             { return nil }
func (q *quiet) Header() (metadata.MD, error) { return metadata.MD{}, nil }
func (q *quiet) Trailer() metadata.MD         { return nil }
func (q *quiet) Context() context.Context     { return context.Background() }

func (q *quiet) RecvMsg(any) error {
	err := q.received[0]
	q.received = q.received[1:]
	return err
}

// A committed stream ends when the application sees its end, also where gRPC's OnFinish
// does not get through to us.
func TestACommittedStreamEndsWithoutOnFinish(t *testing.T) {
	failed := status.Error(codes.Internal, "x")
	for _, tt := range []struct {
		name   string
		kind   *grpc.StreamDesc
		stream *quiet
		use    func(s grpc.ClientStream) error
		want   Result
	}{
		{"RecvMsg at the end", bidiStream, &quiet{received: []error{nil, io.EOF}},
			func(s grpc.ClientStream) error { return errors.Join(s.RecvMsg(nil), s.RecvMsg(nil)) }, Succeeded},
		{"RecvMsg fails", bidiStream, &quiet{received: []error{nil, failed}},
			func(s grpc.ClientStream) error { return errors.Join(s.RecvMsg(nil), s.RecvMsg(nil)) }, Ignored},
		{"SendMsg fails", bidiStream, &quiet{received: []error{nil}, sent: failed},
			func(s grpc.ClientStream) error { return errors.Join(s.RecvMsg(nil), s.SendMsg(nil)) }, Ignored},
		{"RecvMsg of a client stream", clientStream, &quiet{received: []error{nil}},
			func(s grpc.ClientStream) error { return s.RecvMsg(nil) }, Succeeded},
		{"RecvMsg of a client stream after Header", clientStream, &quiet{received: []error{nil}},
			func(s grpc.ClientStream) error { _, _ = s.Header(); return s.RecvMsg(nil) }, Succeeded},
	} {
		t.Run(tt.name, func(t *testing.T) {
			budget, ends, finished := &aBudget{}, 0, 0
			s, err := StreamClientInterceptor(WithBudget(budget), WithObserver(func(_ context.Context, e Event) {
				if e.Kind == CallEnd {
					ends++
				}
			}))(t.Context(), tt.kind, nil, "/s/m",
				func(context.Context, *grpc.StreamDesc, *grpc.ClientConn, string, ...grpc.CallOption) (grpc.ClientStream, error) {
					return tt.stream, nil
				}, grpc.OnFinish(func(error) { finished++ }))
			if err != nil {
				t.Fatal(err)
			}
			_ = tt.use(s)
			if want := []Outcome{{Attempt: 1, Result: tt.want}}; !slices.Equal(budget.heard, want) || ends != 1 || finished != 1 {
				t.Errorf("budget heard %v, CallEnd came %d times, OnFinish ran %d times, want %v, once, once", budget.heard, ends,
					finished, want)
			}
		})
	}
}

// pausing is a stream whose SendMsg and CloseSend return a second after they have succeeded.
type pausing struct{ grpc.ClientStream }

func (s pausing) SendMsg(m any) error {
	err := s.ClientStream.SendMsg(m)
	time.Sleep(second)
	return err
}
func (s pausing) CloseSend() error { err := s.ClientStream.CloseSend(); time.Sleep(second); return err }

// A stream that is cancelled while the application is in a method that notices nothing,
// and does not come back, has ended all the same.
func TestStreamAbandonedInAMethodThatSucceedsEnds(t *testing.T) {
	for _, tt := range []struct {
		name, app string
		first     string // the script of the first attempt
	}{
		{"SendMsg", "send a", "hang"},
		{"CloseSend", "close", "hang"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serveStreams(t, func(n int, stream grpc.ServerStream) error { return playServer(t, n, tt.first, stream) })
				ends, finished := 0, 0
				cc := server.conn(t, append(DialOptions(steady, WithObserver(func(_ context.Context, e Event) {
					if e.Kind == CallEnd {
						ends++
					}
				})), below(func(s grpc.ClientStream) grpc.ClientStream { return pausing{s} }))...)
				ctx, cancel := context.WithCancel(t.Context())
				time.AfterFunc(second/2, cancel)
				stream, err := cc.NewStream(ctx, bidiStream, "/s/m", grpc.OnFinish(func(error) { finished++ }))
				if err != nil {
					t.Fatal(err)
				}
				(&application{stream: stream}).play(t, tt.app)
				synctest.Wait()
				if ends != 1 || finished != 1 {
					t.Errorf("CallEnd came %d times and OnFinish ran %d times, want once each", ends, finished)
				}
			})
		})
	}
}

func TestAbandonedStreamEnds(t *testing.T) {
	for _, tt := range []struct {
		name, server, app string
		opts              []Option
		close             bool // the ClientConn instead of cancelling
	}{
		{name: "before anything", server: "hang"},
		{name: "after a send", server: "hang", app: "send a"},
		{name: "when committed", server: "send 1; hang", app: "send a; recv 1"},
		{name: "after its failure", server: "recv a; fail UNAVAILABLE", app: "send a; wait 1s"},
		{name: "after a timeout", server: "hang", app: "send a; wait 10s", opts: []Option{WithAttemptTimeout(second)}},
		{name: "after a timeout, headers and a send", server: "header; hang", app: "send a; wait 10s; send b",
			opts: []Option{WithAttemptTimeout(second)}},
		{name: "after a timeout, headers and Context", server: "header; hang", app: "send a; wait 10s; context",
			opts: []Option{WithAttemptTimeout(second)}},
		{name: "by closing the connection", server: "hang", app: "send a", close: true},
		{name: "by closing the connection when committed", server: "send 1; hang", app: "send a; recv 1", close: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serveStreams(t, func(n int, stream grpc.ServerStream) error { return playServer(t, n, tt.server, stream) })
				finished, ends := 0, 0
				atOnce, err := NewConcurrencyBudget(1)
				if err != nil {
					t.Fatal(err)
				}
				cc := server.conn(t, DialOptions(append(tt.opts, WithBudget(atOnce), WithObserver(func(_ context.Context, e Event) {
					if e.Kind == CallEnd {
						ends++
					}
				}))...)...)
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				stream, err := cc.NewStream(ctx, bidiStream, "/s/m", grpc.OnFinish(func(err error) {
					finished++
					if err == nil {
						t.Error("OnFinish says success")
					}
				}))
				if err != nil {
					t.Fatal(err)
				}
				(&application{stream: stream}).play(t, tt.app)
				if finished != 0 {
					t.Fatal("OnFinish ran before the end")
				}
				if tt.close {
					cc.Close()
				} else {
					cancel()
				}
				synctest.Wait()
				if finished != 1 || ends != 1 {
					t.Errorf("OnFinish ran %d times and CallEnd came %d times, want once each", finished, ends)
				}
				if got := atOnce.Balance(time.Now()); got != 1 {
					t.Errorf("budget has %v retries, want 1", got)
				}
			})
		})
	}
}

func TestContextAndTrailerAfterTheEnd(t *testing.T) {
	bubble(t, func(t *testing.T) {
		attempts := 0
		below := belowStream(func(ctx context.Context, next streamOpener) (grpc.ClientStream, error) {
			if attempts++; attempts > 1 {
				return nil, status.Error(codes.NotFound, "no stream")
			}
			return next(ctx)
		})
		server := serveStreams(t, func(n int, stream grpc.ServerStream) error { return playServer(t, n, "fail UNAVAILABLE", stream) })
		cc := server.conn(t, append(DialOptions(steady), below)...)
		app := openOn(t, cc, bidiStream)
		app.play(t, "send a; recv NOT_FOUND; context; sendeof b; close; no header")
		if got := app.stream.Trailer(); got != nil {
			t.Errorf("Trailer = %v of a last attempt that had no stream", got)
		}
		wantStop(t, app.err, codes.NotFound, ErrNotRetryable, 2)
	})
}
