package grpcretry

import (
	"context"
	"errors"
	"io"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
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

// The tests here are of single rules of DESIGN.md that a mutation of the code was found
// to break without any other test noticing.

// The order of the questions, where two of them say stop and their reasons differ.
func TestTheFirstReasonToStopIsTheReason(t *testing.T) {
	for _, tt := range []struct {
		name    string
		failure failure
		reason  error
		result  Result
	}{
		{"context ended, before the connection", failureOf(1, codes.Unavailable).with(func(f *failure) {
			f.CtxErr, f.Closed = context.Canceled, true
		}), context.Canceled, Ignored},
		{"context ended, before committed", failureOf(1, codes.Unavailable).with(func(f *failure) {
			f.CtxErr, f.Committed = context.Canceled, true
		}), context.Canceled, Failed},
		{"connection closed, before committed", failureOf(1, codes.Unavailable).with(func(f *failure) {
			f.Closed, f.Committed = true, true
		}), ErrConnClosed, Ignored},
		{"not retryable, before the last attempt", failureOf(4, codes.NotFound), ErrNotRetryable, Answered},
		{"a server's stop, before the last attempt", failureOf(4, codes.Unavailable).saying("-1"), ErrPushback, Failed},
		{"last attempt, before a pushback too long", failureOf(4, codes.Unavailable).saying("300001"), ErrAttemptsExhausted, Failed},
	} {
		t.Run(tt.name, func(t *testing.T) {
			budget := &aBudget{}
			want := step{verdict: verdict{Reason: tt.reason}, End: true}
			got := before{Start: noon}.plan(policyOf(t), budget, tt.failure.Attempt.Number).failed(t.Context(), &tt.failure, noon, 0.5)
			got.untouched, got.fatal = false, false // matters of the error and of hedging, tested with the interceptors
			if got != want {
				t.Errorf("Failed = %+v, want %+v", got, want)
			}
			if want := (Outcome{Attempt: tt.failure.Attempt.Number, Result: tt.result}); len(budget.heard) != 1 || budget.heard[0] != want {
				t.Errorf("budget heard %v, want %v once", budget.heard, want)
			}
			if len(budget.asked) != 0 {
				t.Errorf("budget was asked at %v", budget.asked)
			}
		})
	}
}

func TestPushbackOverMaxServerDelayIsToldBeforeTheDeadline(t *testing.T) {
	h := before{Start: noon, Deadline: noon.Add(time.Second)}
	f := failureOf(1, codes.Unavailable).saying("300001")
	want := verdict{Reason: ErrPushback, Wait: 300001 * time.Millisecond, WaitSource: WaitPushback}
	if got := h.plan(policyOf(t), &aBudget{}, 1).failed(t.Context(), &f, noon, 0.5); got.verdict != want {
		t.Errorf("Failed = %+v, want %+v", got, want)
	}
}

func TestACallThatIsCancelledAndClosedInAWaitIsCancelled(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(unavailable()))
		cc := server.conn(t, DialOptions(steady)...)
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(second/2, func() { cancel(); cc.Close() })
		_, err := echov1.NewEchoServiceClient(cc).Echo(ctx, request())
		if e := wantStop(t, err, codes.Canceled, context.Canceled, 1); e.Reason != context.Canceled {
			t.Errorf("Reason is %v, want the caller's", e.Reason)
		}
		wantTimes(t, server, 0)
	})
}

// lateContext has a deadline, but does not notice that it has passed.
type lateContext struct {
	context.Context
	deadline time.Time
}

func (c lateContext) Deadline() (time.Time, bool) { return c.deadline, true }

// gRPC on either side has timers of its own: DEADLINE_EXCEEDED may be here before the
// context knows. That is the caller's deadline all the same.
func TestDeadlineExceededAtTheVeryMomentOfTheDeadline(t *testing.T) {
	for _, tt := range []struct {
		after time.Duration
		ours  bool
	}{
		{second - 1, false}, // a server's own
		{second, true},
		{second + 1, true},
	} {
		bubble(t, func(t *testing.T) {
			attempts := 0
			invoker := func(context.Context, string, any, any, *grpc.ClientConn, ...grpc.CallOption) error {
				attempts++
				time.Sleep(tt.after)
				return status.Error(codes.DeadlineExceeded, "late")
			}
			ctx := lateContext{t.Context(), time.Now().Add(second)}
			err := UnaryClientInterceptor()(ctx, "/s/m", nil, nil, nil, invoker)
			if tt.ours {
				e := wantStop(t, err, codes.DeadlineExceeded, context.DeadlineExceeded, 1)
				if e.Reason != context.DeadlineExceeded {
					t.Errorf("after %v: Reason is %v, want the deadline", tt.after, e.Reason)
				}
			} else {
				wantUntouched(t, err, codes.DeadlineExceeded, "late")
			}
			if attempts != 1 {
				t.Errorf("after %v: %d attempts, want 1", tt.after, attempts)
			}
		})
	}
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
			below := func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
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
	t.Run("stream", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			scripts := []string{"recv a; fail UNAVAILABLE", "recv a; fail UNAVAILABLE", "recv a; send 1"}
			server := serveStreams(t, func(n int, stream grpc.ServerStream) error { return playServer(t, n, scripts[n-1], stream) })
			var contexts []context.Context
			below := func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, streamer grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
				contexts = append(contexts, ctx)
				sofar := slices.Clone(contexts)
				time.AfterFunc(second/2, func() { check(t, sofar) })
				return streamer(ctx, desc, cc, method, opts...)
			}
			cc := server.conn(t, append(DialOptions(steady), grpc.WithChainStreamInterceptor(below))...)
			stream, err := cc.NewStream(t.Context(), serverStream, "/s/m")
			if err != nil {
				t.Fatal(err)
			}
			(&application{stream: stream}).play(t, "send a; close; recv 1; recv EOF; wait 1s")
			wantTimes(t, server, 0, 1*second, 3*second)
		})
	})
}

// A stream is committed when the limit is passed, not when it is reached, and all its
// messages count. "aaa" is 3 bytes, in a field of 2 more, in a frame of 5 more.
func TestTheBufferLimitIsExact(t *testing.T) {
	small := (&retryStream{desc: clientStream}).weigh(&echov1.EchoRequest{Message: "aaa"}).size
	for _, tt := range []struct {
		limit    int
		attempts []time.Duration
		app      string
	}{
		{2 * small, []time.Duration{0, 1 * second}, "send aaa; send bbb; close; recv 1"},
		{2*small - 1, []time.Duration{0}, "send aaa; send bbb; close; recv UNAVAILABLE"},
	} {
		t.Run(strconv.Itoa(tt.limit), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				scripts := []string{"recv aaa; recv bbb; recv EOF; fail UNAVAILABLE", "recv aaa; recv bbb; recv EOF; send 1"}
				server := serveStreams(t, func(n int, stream grpc.ServerStream) error { return playServer(t, n, scripts[n-1], stream) })
				app, err := server.openStream(t, clientStream, []Option{WithBufferLimit(tt.limit)})
				if err != nil {
					t.Fatal(err)
				}
				app.play(t, tt.app)
				wantTimes(t, server, tt.attempts...)
			})
		})
	}
}

// Headers do not commit a stream just because somebody else than the application sees them.
func TestHeadersSeenByAnObserverDoNotCommitAStream(t *testing.T) {
	bubble(t, func(t *testing.T) {
		scripts := []string{"recv a; header; fail UNAVAILABLE", "recv a; send 1"}
		server := serveStreams(t, func(n int, stream grpc.ServerStream) error { return playServer(t, n, scripts[n-1], stream) })
		var headers []string
		app, err := server.openStream(t, serverStream, []Option{WithObserver(func(_ context.Context, e Event) {
			if e.Kind == AttemptEnd {
				headers = append(headers, first(e.Attempt.Header["attempt"]))
			}
		})})
		if err != nil {
			t.Fatal(err)
		}
		app.play(t, "send a; close; recv 1; recv EOF")
		wantTimes(t, server, 0, second)
		if want := []string{"1", ""}; !slices.Equal(headers, want) {
			t.Errorf("the observer saw headers of attempts %q, want %q", headers, want)
		}
	})
}

// slowStream is a stream whose SendMsg takes its time to say that it failed.
type slowStream struct {
	grpc.ClientStream
	delay time.Duration
}

func (s slowStream) SendMsg(m any) error {
	err := s.ClientStream.SendMsg(m)
	if err != nil {
		time.Sleep(s.delay)
	}
	return err
}

// A SendMsg that fails while another goroutine is retrying, or has done so, has done its
// work: the message is in the buffer.
func TestSendThatFailsWhileTheReceiverRetriesSaysNothing(t *testing.T) {
	for _, tt := range []struct {
		name  string
		delay time.Duration
	}{
		{"in the wait", second / 2},
		{"in the next attempt", 3 * second / 2},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				scripts := []string{"wait 1s; fail UNAVAILABLE", "recv " + big + "; recv " + big + "; recv c; recv EOF; send 1"}
				server := serveStreams(t, func(n int, stream grpc.ServerStream) error { return playServer(t, n, scripts[n-1], stream) })
				below := func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, streamer grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
					stream, err := streamer(ctx, desc, cc, method, opts...)
					return slowStream{stream, tt.delay}, err
				}
				cc := server.conn(t, append(DialOptions(steady, WithBufferLimit(1<<20)), grpc.WithChainStreamInterceptor(below))...)
				stream, err := cc.NewStream(t.Context(), bidiStream, "/s/m")
				if err != nil {
					t.Fatal(err)
				}
				app := &application{stream: stream}
				var group sync.WaitGroup
				group.Go(func() {
					app.play(t, "send "+big+"; send "+big)
					if got, want := time.Since(server.start), second+tt.delay; got != want {
						t.Errorf("SendMsg returned after %v, want %v", got, want)
					}
					app.play(t, "send c; close")
				})
				app.play(t, "recv 1; recv EOF")
				group.Wait()
				wantTimes(t, server, 0, 2*second)
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

// A first message that crosses the attempt timeout is not handed out: nothing could follow
// it but a failure that the server did not send.
func TestAFirstMessageThatCrossesTheAttemptTimeoutIsNotSeen(t *testing.T) {
	bubble(t, func(t *testing.T) {
		scripts := []string{"recv a; send 1; send 2; hang", "recv a; send 3; send 4"}
		server := serveStreams(t, func(n int, stream grpc.ServerStream) error { return playServer(t, n, scripts[n-1], stream) })
		delay := 6 * second
		below := func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, streamer grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
			stream, err := streamer(ctx, desc, cc, method, opts...)
			late := &lateStream{stream, delay}
			delay = 0
			return late, err
		}
		budget := &aBudget{}
		cc := server.conn(t, append(DialOptions(steady, WithAttemptTimeout(5*second), WithBudget(budget)), grpc.WithChainStreamInterceptor(below))...)
		stream, err := cc.NewStream(t.Context(), serverStream, "/s/m")
		if err != nil {
			t.Fatal(err)
		}
		(&application{stream: stream}).play(t, "send a; close; recv 3; recv 4; recv EOF")
		if len(server.attempts()) != 2 {
			t.Errorf("%d attempts, want 2", len(server.attempts()))
		}
		if want := []Outcome{{Attempt: 1, Result: Failed}, {Attempt: 2, Result: Succeeded}}; !slices.Equal(budget.heard, want) {
			t.Errorf("budget heard %v, want %v", budget.heard, want)
		}
	})
}

// A stream holds no message any longer than it may have to send it again.
func TestABufferIsLetGo(t *testing.T) {
	for _, tt := range []struct{ name, server, app string }{
		{"when committed by a message", "recv a; send 1; hang", "send a; recv 1"},
		{"when committed by headers", "recv a; header; hang", "send a; header"},
		{"when committed by the application", "recv a; hang", "send a; context"},
		{"when the limit is passed", "hang", "send a; send " + big},
		{"at the end", "recv a; fail NOT_FOUND", "send a; recv NOT_FOUND"},
		{"at the end without a message", "recv a", "send a; recv EOF"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serveStreams(t, func(n int, stream grpc.ServerStream) error { return playServer(t, n, tt.server, stream) })
				app, err := server.openStream(t, bidiStream, []Option{WithBufferLimit(1000)})
				if err != nil {
					t.Fatal(err)
				}
				app.play(t, tt.app)
				s := app.stream.(*retryStream)
				s.mu.Lock()
				defer s.mu.Unlock()
				if s.queue != nil || s.size != 0 {
					t.Errorf("buffer has %d messages of %d bytes", len(s.queue), s.size)
				}
			})
		})
	}
}

// countingContext knows how many functions wait for its end.
type countingContext struct {
	context.Context // without an end
	mu              sync.Mutex
	waiting         int
}

func (c *countingContext) number() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.waiting
}

func (c *countingContext) Done() <-chan struct{} { return make(chan struct{}) }

func (c *countingContext) AfterFunc(func()) (stop func() bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.waiting++
	stopped := false
	return func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		if stopped {
			return false
		}
		stopped = true
		c.waiting--
		return true
	}
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
		{"a timeout while the application is elsewhere", []string{"recv a; hang", "recv a; send 1"}, "send a; close; wait 20s; recv 1; recv EOF"},
		{"a timeout that was committed to", []string{"recv a; hang"}, "send a; close; context; wait 20s; recv DEADLINE_EXCEEDED"},
		{"a timeout, and then committed", []string{"recv a; hang", "recv a; send 1"}, "send a; close; wait 20s; context; recv 1; recv EOF"},
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

// The end of a stream is a success and plain io.EOF, whatever came before it.
func TestTheEndOfAStreamIsASuccess(t *testing.T) {
	for _, tt := range []struct {
		name    string
		kind    *grpc.StreamDesc
		scripts []string
		app     string
		want    []Outcome
	}{
		{"without a message", serverStream, []string{"recv a"}, "send a; close; recv EOF; recv EOF", []Outcome{{Attempt: 1, Result: Succeeded}}},
		{"without a message, after a retry", serverStream, []string{"fail UNAVAILABLE", "recv a"}, "send a; close; recv EOF; recv EOF",
			[]Outcome{{Attempt: 1, Result: Failed}, {Attempt: 2, Result: Succeeded}}},
		{"after a message", serverStream, []string{"recv a; send 1"}, "send a; close; recv 1; recv EOF; recv EOF", []Outcome{{Attempt: 1, Result: Succeeded}}},
		{"after a message, after a retry", bidiStream, []string{"fail UNAVAILABLE", "recv a; send 1"}, "send a; close; recv 1; recv EOF; recv EOF",
			[]Outcome{{Attempt: 1, Result: Failed}, {Attempt: 2, Result: Succeeded}}},
		{"after headers", serverStream, []string{"recv a; header"}, "send a; close; header; recv EOF; recv EOF", []Outcome{{Attempt: 1, Result: Succeeded}}},
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

// Without a buffer a stream is gRPC's own: no budget, no event, its error untouched, also
// where it cannot be opened.
func TestStreamsWithoutABufferPassStraightThrough(t *testing.T) {
	for _, tt := range []struct {
		name string
		opt  Option
	}{
		{"WithBufferLimit", WithBufferLimit(0)},
		{"Policy.BufferLimit", WithPolicy(Policy{BufferLimit: -1})},
	} {
		t.Run(tt.name, func(t *testing.T) {
			budget, events, attempts := &aBudget{}, 0, 0
			streamer := func(context.Context, *grpc.StreamDesc, *grpc.ClientConn, string, ...grpc.CallOption) (grpc.ClientStream, error) {
				if attempts++; attempts == 1 {
					return &endless{}, nil
				}
				return nil, status.Error(codes.Unavailable, "no stream")
			}
			open := StreamClientInterceptor(tt.opt, WithBudget(budget), WithObserver(func(context.Context, Event) { events++ }))
			stream, err := open(t.Context(), bidiStream, nil, "/s/m", streamer)
			if _, own := stream.(*endless); !own || err != nil {
				t.Errorf("stream is %T, %v, want gRPC's own", stream, err)
			}
			_, err = open(t.Context(), bidiStream, nil, "/s/m", streamer)
			wantUntouched(t, err, codes.Unavailable, "no stream")
			if len(budget.heard) != 0 || events != 0 || attempts != 2 {
				t.Errorf("budget heard %v, %d events, %d attempts, want none, none, one a call", budget.heard, events, attempts)
			}
		})
	}
}

// unclosable is a stream whose CloseSend fails.
type unclosable struct{ grpc.ClientStream }

func (s unclosable) CloseSend() error {
	_ = s.ClientStream.CloseSend()
	return status.Error(codes.Unavailable, "CloseSend failed")
}

// A CloseSend that fails while a retry is possible is no more final than a SendMsg.
func TestCloseSendThatFailsIsRetried(t *testing.T) {
	for _, tt := range []struct {
		name       string
		unclosable int // so many attempts
	}{
		{"in the first attempt", 1},
		{"in the replay", 2},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serveStreams(t, func(n int, stream grpc.ServerStream) error {
					if PreviousAttempts(stream.Context()) < tt.unclosable { // n counts only those that came this far
						return playServer(t, n, "recv a; recv EOF; fail UNAVAILABLE", stream)
					}
					return playServer(t, n, "recv a; recv EOF; send 1", stream)
				})
				attempts := 0
				below := func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, streamer grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
					stream, err := streamer(ctx, desc, cc, method, opts...)
					if attempts++; attempts <= tt.unclosable {
						return unclosable{stream}, err
					}
					return stream, err
				}
				cc := server.conn(t, append(DialOptions(steady), grpc.WithChainStreamInterceptor(below))...)
				stream, err := cc.NewStream(t.Context(), bidiStream, "/s/m")
				if err != nil {
					t.Fatal(err)
				}
				(&application{stream: stream}).play(t, "send a; close; recv 1; recv EOF")
				if attempts != tt.unclosable+1 {
					t.Errorf("%d attempts, want %d", attempts, tt.unclosable+1)
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
				t.Errorf("budget heard %v, CallEnd came %d times, OnFinish ran %d times, want %v, once, once", budget.heard, ends, finished, want)
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
				below := func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, streamer grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
					stream, err := streamer(ctx, desc, cc, method, opts...)
					return pausing{stream}, err
				}
				ends, finished := 0, 0
				cc := server.conn(t, append(DialOptions(steady, WithObserver(func(_ context.Context, e Event) {
					if e.Kind == CallEnd {
						ends++
					}
				})), grpc.WithChainStreamInterceptor(below))...)
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

// alone is a stream that finds out if two goroutines are in RecvMsg.
type alone struct {
	grpc.ClientStream
	t      *testing.T
	inside atomic.Int32
}

func (s *alone) RecvMsg(m any) error {
	if s.inside.Add(1) > 1 {
		s.t.Error("two goroutines in RecvMsg of one stream")
	}
	defer s.inside.Add(-1)
	err := s.ClientStream.RecvMsg(m)
	time.Sleep(second / 2) // for another goroutine to learn of the failure first
	return err
}

// gRPC forbids two RecvMsg of one stream at once: while one goroutine receives, another
// that sees an attempt fail leaves it to the first to find out why.
func TestNobodyElseReceivesWhileTheApplicationDoes(t *testing.T) {
	for _, tt := range []struct{ name, other string }{
		{"Header", "header"},
		{"SendMsg", "wait 1s; send a"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				scripts := []string{"wait 1s; fail UNAVAILABLE", "header; wait 5s; send 1"}
				server := serveStreams(t, func(n int, stream grpc.ServerStream) error { return playServer(t, n, scripts[n-1], stream) })
				below := func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, streamer grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
					stream, err := streamer(ctx, desc, cc, method, opts...)
					return &alone{ClientStream: stream, t: t}, err
				}
				cc := server.conn(t, append(DialOptions(steady), grpc.WithChainStreamInterceptor(below))...)
				stream, err := cc.NewStream(t.Context(), bidiStream, "/s/m")
				if err != nil {
					t.Fatal(err)
				}
				app := &application{stream: stream}
				var group sync.WaitGroup
				group.Go(func() { app.play(t, "recv 1; recv EOF") })
				app.play(t, tt.other)
				group.Wait()
				wantTimes(t, server, 0, 2*second+second/2)
			})
		})
	}
}

// A call on one ClientConn that makes a call on a second one that makes a call on the
// first: three calls, each with retries of its own.
func TestACallThatComesBackToItsConnectionIsItsOwn(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(unavailable(), ok(), ok()))
		tokens := serve(t, script(ok()))
		// The careless way, each with the options of the call above it.
		var home echov1.EchoServiceClient
		tokenConn := tokens.conn(t, append(DialOptions(steady), grpc.WithChainUnaryInterceptor(
			func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
				if _, err := home.Put(ctx, request(), opts...); err != nil {
					t.Errorf("back home: %v", err)
				}
				return invoker(ctx, method, req, reply, cc, opts...)
			}))...)
		home = echov1.NewEchoServiceClient(server.conn(t, append(DialOptions(steady), grpc.WithChainUnaryInterceptor(
			func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
				if method == echov1.EchoService_Echo_FullMethodName {
					if _, err := echov1.NewEchoServiceClient(tokenConn).Append(ctx, request(), opts...); err != nil {
						t.Errorf("token: %v", err)
					}
				}
				return invoker(ctx, method, req, reply, cc, opts...)
			}))...))
		if _, err := home.Echo(t.Context(), request()); err != nil {
			t.Error(err)
		}
		wantTimes(t, server, 0, second, second)
		wantTimes(t, tokens, second)
	})
}

// The rules that need the response headers have them also where the caller takes them.
func TestHeadersAreReadAlsoWhereTheCallerTakesThem(t *testing.T) {
	t.Run("to commit", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			server := serve(t, script(unavailable(), unavailable().withHeader("k", "two")))
			var header metadata.MD
			_, err := server.client(t, steady, WithCommitOnHeaders(true)).Echo(t.Context(), request(), grpc.Header(&header))
			wantStop(t, err, codes.Unavailable, ErrCommitted, 2)
			wantTimes(t, server, 0, second)
		})
	})
	t.Run("to be seen", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			server := serve(t, script(unavailable().withHeader("k", "one"), unavailable(), ok().withHeader("k", "three")))
			var seen []string
			client := server.client(t, steady, WithObserver(func(_ context.Context, e Event) {
				if e.Kind == AttemptEnd {
					seen = append(seen, first(e.Attempt.Header["k"]))
				}
			}))
			var header metadata.MD
			if _, err := client.Echo(t.Context(), request(), grpc.Header(&header)); err != nil {
				t.Error(err)
			}
			if want := []string{"one", "", "three"}; !slices.Equal(seen, want) || first(header["k"]) != "three" {
				t.Errorf("the observer saw headers %q, the caller %v, want %q, the last", seen, header, want)
			}
		})
	})
}

// An attempt that the server ended did not time out, even if we learn of it late: the
// cause of its context is asked only where the code may come from a context.
func TestAServersWordAfterTheAttemptTimeoutIsTheServers(t *testing.T) {
	late := func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
		err := invoker(ctx, method, req, reply, cc, opts...)
		time.Sleep(6 * second)
		return err
	}
	bubble(t, func(t *testing.T) {
		server := serve(t, script(unavailable(), fail(codes.NotFound, "gone")))
		cc := server.conn(t, append(DialOptions(steady, WithAttemptTimeout(5*second)), grpc.WithChainUnaryInterceptor(late))...)
		_, err := echov1.NewEchoServiceClient(cc).Echo(t.Context(), request())
		e := wantStop(t, err, codes.NotFound, ErrNotRetryable, 2)
		for i, want := range []codes.Code{codes.Unavailable, codes.NotFound} {
			if got := e.Attempts[i]; got.Code() != want || errors.Is(got.Err, ErrAttemptTimeout) {
				t.Errorf("attempt %d failed with %v, want the server's %v", i+1, got.Err, want)
			}
		}
		wantTimes(t, server, 0, 7*second)
	})
}

// Every attempt of a stream has options of its own: gRPC reads them when it ends, which
// may be after the next has begun.
func TestAttemptsOfAStreamDoNotShareOptions(t *testing.T) {
	bubble(t, func(t *testing.T) {
		scripts := []string{"fail UNAVAILABLE", "fail UNAVAILABLE", "recv a; send 1"}
		server := serveStreams(t, func(n int, stream grpc.ServerStream) error { return playServer(t, n, scripts[n-1], stream) })
		var all [][]grpc.CallOption
		below := func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, streamer grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
			all = append(all, opts)
			return streamer(ctx, desc, cc, method, opts...)
		}
		cc := server.conn(t, append(DialOptions(steady), grpc.WithChainStreamInterceptor(below))...)
		stream, err := cc.NewStream(t.Context(), serverStream, "/s/m")
		if err != nil {
			t.Fatal(err)
		}
		(&application{stream: stream}).play(t, "send a; close; recv 1; recv EOF")
		peers := map[*peer.Peer]int{}
		for i, opts := range all {
			for _, opt := range opts {
				if opt, ok := opt.(*attempt); ok {
					peers[opt.PeerAddr] = i + 1
				}
			}
		}
		if len(all) != 3 || len(peers) != 3 {
			t.Errorf("%d attempts write their peer to %d places, want 3 to 3", len(all), len(peers))
		}
	})
}

// No timer outlives its attempt, and no context outlives it.
func TestNothingOfAStreamsAttemptsIsLeft(t *testing.T) {
	for _, tt := range []struct {
		name    string
		scripts []string
		app     string
	}{
		{"not retryable", []string{"recv a; fail NOT_FOUND"}, "send a; recv NOT_FOUND"},
		{"retries", []string{"recv a; fail UNAVAILABLE", "recv a; fail UNAVAILABLE", "recv a; send 1"}, "send a; recv 1; recv EOF"},
		{"no message", []string{"recv a; fail UNAVAILABLE", "recv a"}, "send a; recv EOF"},
		{"a failure when committed", []string{"recv a; send 1; fail UNAVAILABLE"}, "send a; recv 1; recv UNAVAILABLE"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serveStreams(t, func(n int, stream grpc.ServerStream) error { return playServer(t, n, tt.scripts[n-1], stream) })
				var attempts []*attempt
				below := func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, streamer grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
					attempts = append(attempts, ctx.Value(attemptKey{}).(*attempt))
					return streamer(ctx, desc, cc, method, opts...)
				}
				cc := server.conn(t, append(DialOptions(steady, WithAttemptTimeout(time.Hour)), grpc.WithChainStreamInterceptor(below))...)
				stream, err := cc.NewStream(t.Context(), bidiStream, "/s/m")
				if err != nil {
					t.Fatal(err)
				}
				(&application{stream: stream}).play(t, tt.app)
				for _, a := range attempts {
					if a.bounds.timer.Stop() {
						t.Errorf("the timer of attempt %d runs on", a.number)
					}
					if a.Err() == nil {
						t.Errorf("the context of attempt %d is alive", a.number)
					}
				}
				if len(attempts) != len(tt.scripts) {
					t.Errorf("%d attempts, want %d", len(attempts), len(tt.scripts))
				}
			})
		})
	}
}

// DialOptions says that built-in retries are off of the ClientConns that it is given to,
// and of no other that the Retrier is used on.
func TestDialOptionsDoNotSpeakForOtherConnections(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(unavailable()))
		r, err := New(WithBackoff(Constant(second)), WithMaxAttempts(5), WithBudget(Unlimited))
		if err != nil {
			t.Fatal(err)
		}
		ours := server.conn(t, append(r.DialOptions(), grpc.WithDefaultServiceConfig(builtInPolicy))...)
		theirs := server.conn(t, grpc.WithChainUnaryInterceptor(r.UnaryClientInterceptor()), grpc.WithDefaultServiceConfig(builtInPolicy))
		for _, tt := range []struct {
			name string
			cc   *grpc.ClientConn
			want int
		}{{"with DialOptions", ours, 5}, {"without", theirs, 3}} {
			before := len(server.attempts())
			if _, err := echov1.NewEchoServiceClient(tt.cc).Echo(t.Context(), request()); status.Code(err) != codes.Unavailable {
				t.Errorf("%s: err = %v, want UNAVAILABLE", tt.name, err)
			}
			if got := len(server.attempts()) - before; got != tt.want {
				t.Errorf("%s: %d attempts, want %d", tt.name, got, tt.want)
			}
		}
	})
}

// A committed stream may still time out before its first message, and ends then.
func TestCommittedStreamsThatTimeOutEnd(t *testing.T) {
	for _, tt := range []struct {
		name, server, app string
		delay             time.Duration // of what RecvMsg returns
	}{
		{"abandoned after the timeout", "recv a; hang", "send a; context; wait 10s; cancel", 0},
		{"found out", "recv a; hang", "send a; context; wait 10s; recv DEADLINE_EXCEEDED; recv DEADLINE_EXCEEDED", 0},
		{"a first message that crosses the timeout", "recv a; send 1; send 2; hang", "send a; context; recv DEADLINE_EXCEEDED", 6 * second},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serveStreams(t, func(n int, stream grpc.ServerStream) error { return playServer(t, n, tt.server, stream) })
				below := func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, streamer grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
					stream, err := streamer(ctx, desc, cc, method, opts...)
					return &lateStream{stream, tt.delay}, err
				}
				ends, finished := 0, 0
				cc := server.conn(t, append(DialOptions(steady, WithAttemptTimeout(5*second), WithObserver(func(_ context.Context, e Event) {
					if e.Kind == CallEnd {
						ends++
					}
				})), grpc.WithChainStreamInterceptor(below))...)
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				stream, err := cc.NewStream(ctx, bidiStream, "/s/m", grpc.OnFinish(func(error) { finished++ }))
				if err != nil {
					t.Fatal(err)
				}
				(&application{stream: stream, cancel: cancel}).play(t, tt.app)
				synctest.Wait()
				if ends != 1 || finished != 1 {
					t.Errorf("CallEnd came %d times and OnFinish ran %d times, want once each", ends, finished)
				}
				wantTimes(t, server, 0)
			})
		})
	}
}

// refusing is a stream that an interceptor fails by itself, as fault injection does.
type refusing struct {
	grpc.ClientStream
	recv, send error
}

func (s refusing) RecvMsg(m any) error {
	if s.recv != nil {
		return s.recv
	}
	return s.ClientStream.RecvMsg(m)
}

func (s refusing) SendMsg(m any) error {
	if s.send != nil {
		return s.send
	}
	return s.ClientStream.SendMsg(m)
}

func TestAnInterceptorBelowMayFailAStreamByItself(t *testing.T) {
	injected := status.Error(codes.Unavailable, "injected")
	for _, tt := range []struct {
		name  string
		first refusing
		opts  []Option
	}{
		{"RecvMsg", refusing{recv: injected}, nil},
		{"SendMsg", refusing{send: injected}, nil},
		{"RecvMsg, observed", refusing{recv: injected}, []Option{WithObserver(func(context.Context, Event) {})}},
		{"SendMsg, observed", refusing{send: injected}, []Option{WithObserver(func(context.Context, Event) {})}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serveStreams(t, func(n int, stream grpc.ServerStream) error {
					if PreviousAttempts(stream.Context()) == 0 {
						return playServer(t, n, "hang", stream)
					}
					return playServer(t, n, "recv a; send 1", stream)
				})
				attempts := 0
				below := func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, streamer grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
					stream, err := streamer(ctx, desc, cc, method, opts...)
					if attempts++; attempts > 1 || err != nil {
						return stream, err
					}
					first := tt.first
					first.ClientStream = stream
					return first, nil
				}
				cc := server.conn(t, append(DialOptions(append(tt.opts, steady)...), grpc.WithChainStreamInterceptor(below))...)
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // ends a test that hangs
				defer cancel()
				stream, err := cc.NewStream(ctx, bidiStream, "/s/m")
				if err != nil {
					t.Fatal(err)
				}
				(&application{stream: stream}).play(t, "send a; close; recv 1; recv EOF")
				if got := time.Since(server.start); got != second {
					t.Errorf("the call took %v, want 1s", got)
				}
			})
		})
	}
}
