package grpcretry

import (
	"context"
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

// A stream that could not be opened is not open.
func TestAStreamThatCannotBeOpenedIsNotCounted(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r, err := New(WithPatience(0))
		if err != nil {
			t.Fatal(err)
		}
		refuses := belowStream(func(context.Context, streamOpener) (grpc.ClientStream, error) {
			return nil, status.Error(codes.PermissionDenied, "not you")
		})
		_, err = serveScripts(t, "hang").conn(t, append(r.DialOptions(), refuses)...).NewStream(t.Context(), bidiStream, anyMethod)
		if open := r.usage.streams.Load(); status.Code(err) != codes.PermissionDenied || open != 0 {
			t.Errorf("NewStream = %v, and %d streams are open; want the interceptor's error, and none", err, open)
		}
	})
}

// A concurrency budget limits what is sent instead of a failed attempt. A stream that goes on is
// no longer that, and nobody waits for its token.
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
				time.AfterFunc(second/2, func() { wantFree(1, "during the backoff") })
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

// A stream whose replay has failed while the application was elsewhere ends without it.
func TestAStreamThatFailsWhileNobodyLooksEnds(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server, reported, attempts := serveScripts(t, "recv a; fail UNAVAILABLE", "hang"), &record{}, 0
		cc := server.conn(t, append(DialOptions(append(reported.options(), steady)...), below(func(s grpc.ClientStream) grpc.ClientStream {
			if attempts++; attempts > 1 {
				return mute{s}
			}
			return s
		}))...)
		app := openOn(t, cc, bidiStream, reported.onFinish())
		app.play(t, "send a; wait 1s; try b; wait 1s")
		if attempts != 2 {
			t.Fatalf("%d attempts, want 2", attempts)
		}
		reported.want(t, status.Error(codes.Unauthenticated, ""))
		app.cancel()
		synctest.Wait()
		reported.want(t, status.Error(codes.Unauthenticated, "")) // once
	})
}

// mute is a stream that cannot send.
type mute struct{ grpc.ClientStream }

func (mute) SendMsg(any) error { return status.Error(codes.Unauthenticated, "no credentials") }

// The tests here are of streams with an attempt timeout of 5 s.

// The attempt timeout is the server's time to answer, not the application's time to read.
func TestAResponseThatArrivedInTimeIsDeliveredToALateReader(t *testing.T) {
	for _, tt := range []struct {
		name        string
		kind        *grpc.StreamDesc
		server, app string
	}{
		{"server stream", serverStream, "recv a; send 1; send 2", "send a; close; wait 20s; recv 1; recv 2; recv EOF"},
		{"server stream that goes on", serverStream, "recv a; send 1; wait 1m; send 2",
			"send a; close; wait 20s; recv 1; recv 2; recv EOF"},
		{"empty server stream", serverStream, "recv a", "send a; close; wait 20s; recv EOF"},
		{"client stream", clientStream, "recv a; recv EOF; wait 1s; send 1", "send a; close; wait 20s; recv 1"},
		{"bidi", bidiStream, "recv a; wait 1s; send 1; recv b; send 2; recv EOF",
			"send a; wait 20s; recv 1; send b; recv 2; close; recv EOF"},
		{"committed by Header", bidiStream, "recv a; header; send 1; send 2", "send a; header; wait 20s; recv 1; recv 2; recv EOF"},
		{"committed by Context", bidiStream, "recv a; wait 1s; send 1; wait 1m; send 2",
			"send a; context; wait 20s; recv 1; recv 2; recv EOF"},
		{"a failure", serverStream, "recv a; fail NOT_FOUND", "send a; close; wait 20s; recv NOT_FOUND"},
		{"a failure after headers", bidiStream, "recv a; header; wait 1s; fail NOT_FOUND", "send a; wait 20s; recv NOT_FOUND"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server, reported := serveScripts(t, tt.server), &record{}
				app := openOn(t, server.conn(t, DialOptions(append(reported.options(), WithAttemptTimeout(5*second))...)...), tt.kind,
					reported.onFinish())
				app.play(t, tt.app)
				reported.want(t, app.err)
				wantTimes(t, server, 0)
				if b := &reported.budget; len(b.asked) != b.refunded {
					t.Errorf("%d retries were withdrawn and %d refunded, want none to be paid for", len(b.asked), b.refunded)
				}
				if app.err != nil && status.Convert(app.err).Message() != "failed in attempt 1" {
					t.Errorf("RecvMsg = %v, want the server's failure", app.err)
				}
			})
		})
	}
}

// lateStream is a stream whose first message is slow to come up.
type lateStream struct {
	grpc.ClientStream
	delay time.Duration
}

func (s *lateStream) RecvMsg(m any) error {
	err := s.ClientStream.RecvMsg(m)
	time.Sleep(s.delay)
	return err
}

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
				server := serveScripts(t, tt.scripts...)
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

// An attempt that the library has given up, and that does not end by then, is not judged again and again at its timeout.
func TestAnAttemptThatWasGivenUpIsNotJudgedForEver(t *testing.T) {
	bubble(t, func(t *testing.T) { // in which a busy loop stops time
		server := serveScripts(t, "recv a; fail UNAVAILABLE", "hang")
		attempts := 0
		cc := server.conn(t, append(DialOptions(steady, WithAttemptTimeout(5*second), WithMaxAttempts(2)),
			below(func(s grpc.ClientStream) grpc.ClientStream {
				if attempts++; attempts == 1 {
					return s
				}
				return numb{s}
			}))...)
		openOn(t, cc, bidiStream).play(t, "send a; recv UNAUTHENTICATED")
	})
}

// numb is a stream whose SendMsg fails by itself, and whose RecvMsg is slow to notice the end.
type numb struct{ grpc.ClientStream }

func (numb) SendMsg(any) error {
	time.Sleep(second)
	return status.Error(codes.Unauthenticated, "no credentials")
}

func (s numb) RecvMsg(m any) error {
	time.Sleep(20 * second)
	return s.ClientStream.RecvMsg(m)
}

// A response that has arrived is received although the caller's context ends, or its connection is closed, while the application is in
// no method of the stream, as with plain gRPC. A failure is that of the context, except in a dry run.
func TestAResponseThatHasArrivedOutlivesTheCall(t *testing.T) {
	ends := map[string]func(*grpc.ClientConn, context.CancelFunc){
		"cancelled":         func(_ *grpc.ClientConn, cancel context.CancelFunc) { cancel() },
		"past its deadline": func(*grpc.ClientConn, context.CancelFunc) { time.Sleep(9 * second) },
		"closed":            func(cc *grpc.ClientConn, _ context.CancelFunc) { cc.Close() },
	}
	configs := map[string][]grpc.DialOption{
		"plain gRPC": nil, "the defaults": DialOptions(), "a dry run": DialOptions(WithDryRun(true)),
		"an attempt timeout": DialOptions(WithAttemptTimeout(second)),
		"hedging":            DialOptions(WithMethod(anyMethod, WithHedging(Hedging{Delay: HedgeAfter(time.Minute)}))),
	}
	for name, tt := range map[string]struct {
		desc               *grpc.StreamDesc
		script, then, fail string
	}{
		"server stream":             {serverStream, "recv a; send 1; send 2", "recv 1; recv 2; recv EOF; recv EOF", ""},
		"server stream, no message": {serverStream, "recv a", "recv EOF; recv EOF", ""},
		"messages, then a failure":  {serverStream, "recv a; send 1; fail NOT_FOUND", "recv 1; recv NOT_FOUND; recv NOT_FOUND", ""},
		"client stream":             {clientStream, "recv a; recv EOF; send 1", "recv 1", ""},
		"a failure":                 {serverStream, "recv a; fail NOT_FOUND", "", "recv NOT_FOUND"},
	} {
		for how, end := range ends {
			for config, opts := range configs {
				t.Run(name+", "+how+", "+config, func(t *testing.T) {
					bubble(t, func(t *testing.T) {
						cc := serveScripts(t, tt.script, "hang").conn(t, opts...)
						ctx, cancel := context.WithTimeout(t.Context(), 9*second)
						defer cancel()
						stream, err := cc.NewStream(ctx, tt.desc, anyMethod)
						if err != nil {
							t.Fatal(err)
						}
						app := &application{stream: stream}
						app.play(t, "send a; close; wait 1ms")
						end(cc, cancel)
						synctest.Wait()
						switch {
						case tt.fail == "":
							app.play(t, tt.then)
						case config == "plain gRPC" || config == "a dry run":
							app.play(t, tt.fail)
						default:
							if err := stream.RecvMsg(&echov1.EchoResponse{}); !isContextEnd(err) {
								t.Errorf("RecvMsg: %v, want the context's end", err)
							}
						}
					})
				})
			}
		}
	}
}

// So it does if an earlier attempt had failed, whose failure the call would return. What the stream shows is then that of the response.
func TestAResponseThatHasArrivedOutlivesTheCallAfterARetry(t *testing.T) {
	for how, end := range map[string]func(*grpc.ClientConn, context.CancelFunc){
		"cancelled": func(_ *grpc.ClientConn, cancel context.CancelFunc) { cancel() },
		"closed":    func(cc *grpc.ClientConn, _ context.CancelFunc) { cc.Close() },
	} {
		t.Run(how, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serveStreams(t, func(n int, stream grpc.ServerStream) error {
					if n == 1 {
						return status.Error(codes.Unavailable, "early")
					}
					stream.SetTrailer(metadata.Pairs("attempt", "2"))
					return stream.SendMsg(&echov1.EchoResponse{Message: "1"})
				})
				cc := server.conn(t, DialOptions(WithBackoff(Constant(0)))...)
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				var trailer metadata.MD
				stream, err := cc.NewStream(ctx, bidiStream, anyMethod, grpc.Trailer(&trailer))
				if err != nil {
					t.Fatal(err)
				}
				app := &application{stream: stream}
				app.play(t, "wait 1ms; send a; wait 1ms")
				end(cc, cancel)
				synctest.Wait()
				app.play(t, "recv 1; recv EOF; trailer 2")
				if got := first(trailer["attempt"]); got != "2" || len(server.attempts()) != 2 {
					t.Errorf("the trailer is of attempt %q, and there were %d, want 2", got, len(server.attempts()))
				}
			})
		})
	}
}

// No message follows an error that the application has received.
func TestNoMessageFollowsAnError(t *testing.T) {
	bubble(t, func(t *testing.T) {
		app, err := serveScripts(t, "recv a; send 1; hang").openStream(t, bidiStream, nil, grpc.MaxCallSendMsgSize(8))
		if err != nil {
			t.Fatal(err)
		}
		app.play(t, "send a; wait 1ms; try too long a message; recv 1; recv RESOURCE_EXHAUSTED; cancel; wait 1ms; recv RESOURCE_EXHAUSTED")
	})
}

// A server may respond twice to a client stream.
func TestTheErrorOfASecondResponseStays(t *testing.T) {
	bubble(t, func(t *testing.T) {
		app := openOn(t, serveScripts(t, "header; recv a; send 1; send 2").conn(t, DialOptions(steady)...), clientStream)
		app.play(t, "send a; header; wait 1s")
		once, again := app.stream.RecvMsg(new(echov1.EchoResponse)), app.stream.RecvMsg(new(echov1.EchoResponse))
		if status.Code(once) != codes.Internal || again != once {
			t.Errorf("RecvMsg = %v, then %v, want one error twice", once, again)
		}
	})
}

// A classifier panics when a stream's attempt is overdue, on a goroutine of ours, while the application becomes bound to the stream.
func TestAPanicAtTheTimeoutOfAStreamThatCommitsMeanwhile(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serveScripts(t, "recv a; wait 10s; send 1")
		cc := server.conn(t, DialOptions(WithAttemptTimeout(2*second), WithClassifier(func(context.Context, Attempt) Classification {
			time.Sleep(4 * second)
			panic("the classifier's")
		}))...)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		stream, err := cc.NewStream(ctx, serverStream, "/s/m")
		if err != nil {
			t.Fatal(err)
		}
		time.AfterFunc(3*second, func() { stream.Context() })
		defer func() {
			if p := recover(); p != "the classifier's" {
				t.Errorf("recovered %v, want the classifier's panic on the call's own goroutine", p)
			}
		}()
		(&application{stream: stream}).play(t, "send a; close; recv 1; recv EOF")
	})
}

// What follows a first message that came too late is read and thrown away. A codec that panics there does what it does
// anywhere else in RecvMsg.
func TestACodecThatPanicsOnMessagesThatCameTooLateEndsItsAttempt(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server, reported := serveScripts(t, "recv a; send 1; send 2; hang", "hang"), &record{}
		cc := server.conn(t, append(DialOptions(append(reported.options(), WithAttemptTimeout(5*second), steady)...),
			below(func(s grpc.ClientStream) grpc.ClientStream { return &unreadable{ClientStream: s} }))...)
		app := openOn(t, cc, bidiStream, reported.onFinish())
		app.play(t, "send a")
		func() {
			defer func() {
				if recover() == nil {
					t.Error("the panic did not reach the application")
				}
			}()
			_ = app.stream.RecvMsg(&echov1.EchoResponse{})
		}()
		synctest.Wait()
		wantTimes(t, server, 0, 7*second)
		app.cancel()
		synctest.Wait()
		reported.want(t, status.Error(codes.Canceled, ""))
	})
}

// unreadable is a stream whose first message is slow to come up, and whose second one the codec cannot read.
type unreadable struct {
	grpc.ClientStream
	messages int
}

func (s *unreadable) RecvMsg(m any) error {
	err := s.ClientStream.RecvMsg(m)
	if s.messages++; s.messages > 1 {
		panic("the codec")
	}
	time.Sleep(7 * second)
	return err
}

// The response of a client stream is complete when it has come, whatever the timer says.
func TestACompleteResponseIsTakenAfterTheTimeout(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serveScripts(t, "recv a; recv EOF; send 1")
		budget := &tally{}
		cc := server.conn(t, append(DialOptions(WithAttemptTimeout(5*second), WithBudget(budget)),
			below(func(s grpc.ClientStream) grpc.ClientStream { return &lateStream{s, 6 * second} }))...)
		openOn(t, cc, clientStream).play(t, "send a; close; recv 1")
		wantTimes(t, server, 0)
		if want := (counts{withdrawn: 1, refunded: 1, told: [5]int{Succeeded: 1}, highest: 1}); budget.counts != want {
			t.Errorf("budget is %+v, want %+v", budget.counts, want)
		}
	})
}

// gRPC's RecvMsg returns the response of a client stream after it has seen the status, so it is a success, although
// the report of the cut came first.
func TestAResponseThatCrossesTheReportOfTheCutIsASuccess(t *testing.T) {
	bubble(t, func(t *testing.T) {
		reported := &record{}
		stream, err := StreamClientInterceptor(append(reported.options(), WithAttemptTimeout(second))...)(t.Context(), clientStream, nil, "/s/m",
			func(ctx context.Context, _ *grpc.StreamDesc, _ *grpc.ClientConn, _ string, opts ...grpc.CallOption) (grpc.ClientStream, error) {
				return cutStream{ctx: ctx, opts: opts}, nil
			}, reported.onFinish())
		if err != nil {
			t.Fatal(err)
		}
		err = stream.RecvMsg(request())
		reported.want(t, err)
		if err != nil {
			t.Errorf("got %v, want the response", err)
		}
	})
}

// A cutStream reports that its attempt was cut, and has the response a second later.
type cutStream struct {
	grpc.ClientStream
	ctx  context.Context
	opts []grpc.CallOption
}

func (s cutStream) Context() context.Context     { return s.ctx }
func (s cutStream) Header() (metadata.MD, error) { return metadata.MD{}, nil }
func (s cutStream) Trailer() metadata.MD         { return nil }

func (s cutStream) RecvMsg(any) error {
	<-s.ctx.Done()
	for _, opt := range s.opts {
		if opt, ok := opt.(grpc.OnFinishCallOption); ok {
			opt.OnFinish(errCut)
		}
	}
	time.Sleep(second)
	return nil
}

// One attempt has the result: Header, Trailer and the caller's options show that one, although a later attempt was the
// last.
func TestHeaderAndTrailerBelongToTheResult(t *testing.T) {
	hedging := WithMethod("/streams/Expand",
		WithPolicy(Policy{MaxAttempts: 2, Hedging: &Hedging{Budget: Unlimited, Delay: HedgeAfter(second)}}))
	for _, tt := range []struct {
		name    string
		kind    *grpc.StreamDesc
		opts    []Option
		scripts []string
		// below goes around the creation of attempt 2.
		below func(ctx context.Context, next streamOpener) (grpc.ClientStream, error)
		asks  bool   // another goroutine is in Header when the call ends
		want  string // the attempt; "" for nothing
	}{
		{name: "the last attempt is cut", scripts: []string{"recv a; header; fail UNAVAILABLE", "recv a; header; hang"}, want: "1"},
		{name: "the last attempt is cut during Header", scripts: []string{"recv a; header; fail UNAVAILABLE", "recv a; header; hang"},
			below: slowHeader, asks: true, want: "1"},
		{name: "the last attempt is cut before there is a stream", scripts: []string{"recv a; header; fail UNAVAILABLE"},
			below: func(ctx context.Context, _ streamOpener) (grpc.ClientStream, error) {
				<-ctx.Done()
				return nil, status.FromContextError(ctx.Err()).Err()
			}, want: "1"},
		{name: "the last attempt has no stream", scripts: []string{"recv a; header; fail UNAVAILABLE"},
			below: func(context.Context, streamOpener) (grpc.ClientStream, error) {
				return nil, status.Error(codes.Unavailable, "not created")
			}},
		{name: "the hedge is cut", kind: serverStream, opts: []Option{hedging},
			scripts: []string{"recv a; header; wait 3s; fail UNAVAILABLE", "recv a; header; hang"}, want: "1"},
		{name: "the hedge fails, and the first attempt is cut", kind: serverStream, opts: []Option{hedging},
			scripts: []string{"recv a; header; hang", "recv a; header; wait 1s; fail UNAVAILABLE"}, want: "2"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server, attempts := serveScripts(t, tt.scripts...), 0
				opts := append([]Option{steady, WithMaxAttempts(2), WithAttemptTimeout(5 * second)}, tt.opts...)
				cc := server.conn(t, append(DialOptions(opts...),
					belowStream(func(ctx context.Context, next streamOpener) (grpc.ClientStream, error) {
						if attempts++; attempts == 2 && tt.below != nil {
							return tt.below(ctx, next)
						}
						return next(ctx)
					}))...)
				kind := tt.kind
				if kind == nil {
					kind = bidiStream
				}
				var header, trailer metadata.MD
				app := openOn(t, cc, kind, grpc.Header(&header), grpc.Trailer(&trailer))
				app.play(t, "send a; close")
				var group sync.WaitGroup
				check := func(what string, md metadata.MD) {
					t.Helper()
					if got := first(md["attempt"]); got != tt.want {
						t.Errorf("%s = %v, want that of attempt %q", what, md, tt.want)
					}
				}
				if tt.asks {
					group.Go(func() {
						time.Sleep(2 * second) // then there is attempt 2
						md, _ := app.stream.Header()
						check("the Header that was waiting", md)
					})
				}
				app.play(t, "recv UNAVAILABLE")
				if attempts != 2 {
					t.Fatalf("%d attempts, want 2", attempts)
				}
				group.Wait()
				md, _ := app.stream.Header()
				check("Header", md)
				check("Trailer", app.stream.Trailer())
				check("grpc.Header", header)
				check("grpc.Trailer", trailer)
			})
		})
	}
}

// slowHeader opens a stream whose Header returns long after the headers have arrived.
func slowHeader(ctx context.Context, next streamOpener) (grpc.ClientStream, error) {
	stream, err := next(ctx)
	return headerDelayed{stream}, err
}

type headerDelayed struct{ grpc.ClientStream }

func (s headerDelayed) Header() (metadata.MD, error) {
	md, err := s.ClientStream.Header()
	time.Sleep(20 * second)
	return md, err
}

// gRPC reports the end of a cancelled stream on a goroutine of its own. A RecvMsg that is called at that moment returns when
// the caller's outputs are complete, as in plain gRPC.
func TestOutputsAreCompleteWhenACancelledStreamReturns(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serveScripts(t, "recv a; send 1; hang")
		cc := server.conn(t, append(DialOptions(steady),
			belowStream(func(ctx context.Context, next streamOpener) (grpc.ClientStream, error) {
				stream, err := next(ctx)
				return trailerDelayed{stream}, err
			}))...)
		var header metadata.MD
		var from peer.Peer
		app := openOn(t, cc, bidiStream, grpc.Header(&header), grpc.Peer(&from))
		app.play(t, "send a; recv 1; cancel")
		synctest.Wait() // gRPC's goroutine is in the stream's Trailer
		app.play(t, "recv CANCELLED")
		if header == nil || from.Addr == nil {
			t.Errorf("after the end, grpc.Header is %v and grpc.Peer %v, want those of the attempt", header, from.Addr)
		}
	})
}

// trailerDelayed is a stream whose Trailer is slow.
type trailerDelayed struct{ grpc.ClientStream }

func (s trailerDelayed) Trailer() metadata.MD {
	time.Sleep(20 * second)
	return s.ClientStream.Trailer()
}

// After the end of a stream that a SendMsg has found, SendMsg returns what gRPC's own does.
func TestSendMsgAfterCloseSendAfterTheEnd(t *testing.T) {
	for name, opts := range map[string][]grpc.DialOption{"plain": nil, "retried": DialOptions(steady)} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serveScripts(t, "fail NOT_FOUND")
				app := openOn(t, server.conn(t, opts...), bidiStream)
				app.play(t, "wait 1s; sendeof a; sendeof b; close")
				for range 2 {
					if err := app.stream.SendMsg(request()); status.Code(err) != codes.Internal {
						t.Errorf("SendMsg after CloseSend returned %v, want INTERNAL", err)
					}
				}
				app.play(t, "recv NOT_FOUND")
			})
		})
	}
}

// A stream that lives for long, and ends in any way, gives the token of its retry back when it is known to have helped.
func TestARetryThatDeliversAMessageIsFree(t *testing.T) {
	for _, tt := range []struct {
		name, second, steps string
		want                float64
	}{
		{"cancelled", "recv hello; send a; hang", "send hello; recv a; recv CANCELLED", 3},
		{"broken", "recv hello; send a; fail UNAVAILABLE", "send hello; recv a; recv UNAVAILABLE", 3},
		{"without a message", "recv hello; hang", "send hello; recv CANCELLED", 2},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				budget := realRatioBudget(t, RatioBudget{})
				server := serveScripts(t, "recv hello; fail UNAVAILABLE", tt.second)
				app, err := server.openStream(t, bidiStream, []Option{WithBudget(AllBudgets(budget, Unlimited)), WithBackoff(Constant(0))})
				if err != nil {
					t.Fatal(err)
				}
				time.AfterFunc(second, app.cancel)
				app.play(t, tt.steps)
				synctest.Wait()
				wantBalance(t, budget, time.Now(), tt.want)
			})
		})
	}
}

// No attempt follows when the caller has ended a stream, or closed the ClientConn. So Context is that of the attempt, as in gRPC, even
// while another goroutine finds out about the end.
func TestContextOfAStreamThatItsCallerHasEnded(t *testing.T) {
	for name, opts := range map[string][]grpc.DialOption{"plain": nil, "retried": DialOptions(steady)} {
		for _, script := range []string{"header", "header; hang", "hang"} {
			for _, how := range []string{"closed", "cancelled"} {
				t.Run(name+"/"+script+"/"+how, func(t *testing.T) {
					bubble(t, func(t *testing.T) {
						slow := below(func(s grpc.ClientStream) grpc.ClientStream { return trailerDelayed{s} })
						cc := serveScripts(t, script).conn(t, append(opts, slow)...)
						app := openOn(t, cc, serverStream)
						app.play(t, "send a; close; wait 100ms")
						if how == "closed" {
							cc.Close()
						} else {
							app.cancel()
						}
						wantEndedContext(t, app)
					})
				})
			}
		}
	}
}

// wantEndedContext checks the Context of a stream that has just ended, and waits until an interceptor below lets it go.
func wantEndedContext(t *testing.T, app *application) {
	t.Helper()
	synctest.Wait()
	ctx := app.stream.Context()
	if p, _ := peer.FromContext(ctx); p == nil || ctx.Err() == nil {
		t.Errorf("the context has the peer %v, and has ended with %v, want those of the attempt", p, ctx.Err())
	}
	time.Sleep(time.Minute)
}

// So it is while SendMsg receives, to find out why the attempt has ended.
func TestContextOfAStreamWhoseSendMsgReceives(t *testing.T) {
	bubble(t, func(t *testing.T) {
		slow := below(func(s grpc.ClientStream) grpc.ClientStream { return slowStream{s} })
		cc := serveScripts(t, "header; recv hello; fail UNAVAILABLE", "hang").conn(t, append(DialOptions(steady), slow)...)
		app := openOn(t, cc, bidiStream)
		app.play(t, "send hello; wait 100ms")
		go func() { _ = app.stream.SendMsg(request()) }()
		synctest.Wait()
		cc.Close()
		wantEndedContext(t, app)
	})
}
