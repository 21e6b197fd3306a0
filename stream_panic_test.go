package grpcretry

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"strings"
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

// A bomb goes off in a callback of a call: the one that is the nth of its kind.
type bomb struct {
	kind string
	nth  int

	mu      sync.Mutex
	ticks   int
	off     bool
	budget  aBudget
	started int               // attempts, as the observer saw them
	opened  []context.Context // of the attempts that have a stream
	finish  int
	callEnd int
}

var errBomb = errors.New("bomb")

func (b *bomb) tick(kind string) {
	b.mu.Lock()
	if kind == b.kind {
		b.ticks++
	}
	explodes := kind == b.kind && b.ticks == b.nth && !b.off
	b.off = b.off || explodes
	b.mu.Unlock()
	if explodes {
		panic(errBomb)
	}
}

// ours are the kinds of callbacks that are given to this library. A panic of one of these ends
// the call; after one in a codec or a stream below, the stream is what that left behind.
var ours = []string{"classifier", "backoff", "attempt_start", "attempt_end", "decision", "call_end", "Withdraw", "Deposit",
	"Refund", "OnFinish"}

var others = []string{"Marshal", "Unmarshal", "before opening", "after opening", "SendMsg", "CloseSend", "RecvMsg", "Header"}

func (b *bomb) Deposit(o Outcome) { b.budget.Deposit(o); b.tick("Deposit") }
func (b *bomb) Withdraw(now time.Time) bool {
	b.tick("Withdraw")
	return b.budget.Withdraw(now)
}
func (b *bomb) Refund()                   { b.budget.Refund(); b.tick("Refund") }
func (b *bomb) Balance(time.Time) float64 { return 1 }

// Delay is that of a Backoff: always a second.
func (b *bomb) Delay(int, time.Duration, float64) time.Duration { b.tick("backoff"); return second }

func (b *bomb) options() []Option {
	return []Option{WithBudget(b), WithBackoff(b),
		WithClassifier(func(context.Context, Attempt) Classification { b.tick("classifier"); return Default }),
		WithObserver(func(_ context.Context, e Event) {
			b.mu.Lock()
			switch e.Kind {
			case AttemptStart:
				b.started++
			case CallEnd:
				b.callEnd++
			}
			b.mu.Unlock()
			b.tick(string(e.Kind))
		})}
}

func (b *bomb) callOptions() []grpc.CallOption {
	return []grpc.CallOption{grpc.ForceCodec(bombCodec{b}), grpc.OnFinish(func(error) {
		b.mu.Lock()
		b.finish++
		b.mu.Unlock()
		b.tick("OnFinish")
	})}
}

type bombCodec struct{ *bomb }

func (bombCodec) Name() string { return "proto" }
func (c bombCodec) Marshal(v any) ([]byte, error) {
	c.tick("Marshal")
	return proto.Marshal(v.(proto.Message))
}
func (c bombCodec) Unmarshal(data []byte, v any) error {
	c.tick("Unmarshal")
	return proto.Unmarshal(data, v.(proto.Message))
}

func (b *bomb) below(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, streamer grpc.Streamer,
	opts ...grpc.CallOption) (grpc.ClientStream, error) {
	b.tick("before opening")
	stream, err := streamer(ctx, desc, cc, method, opts...)
	if err == nil {
		b.mu.Lock()
		b.opened = append(b.opened, ctx)
		b.mu.Unlock()
	}
	b.tick("after opening")
	return bombStream{stream, b}, err
}

type bombStream struct {
	grpc.ClientStream
	*bomb
}

func (s bombStream) SendMsg(m any) error          { s.tick("SendMsg"); return s.ClientStream.SendMsg(m) }
func (s bombStream) CloseSend() error             { s.tick("CloseSend"); return s.ClientStream.CloseSend() }
func (s bombStream) RecvMsg(m any) error          { s.tick("RecvMsg"); return s.ClientStream.RecvMsg(m) }
func (s bombStream) Header() (metadata.MD, error) { s.tick("Header"); return s.ClientStream.Header() }

// serveLeniently runs the script of an attempt for whatever the client sends.
func serveLeniently(t *testing.T, steps string, stream grpc.ServerStream) error {
	for _, step := range split(steps) {
		verb, arg, _ := strings.Cut(step, " ")
		var err error
		switch verb {
		case "one":
			err = stream.RecvMsg(new(echov1.EchoRequest))
		case "all":
			for stream.RecvMsg(new(echov1.EchoRequest)) == nil {
				continue
			}
		case "header":
			err = stream.SendHeader(metadata.Pairs("attempt", "1"))
		case "send":
			err = stream.SendMsg(&echov1.EchoResponse{Message: arg})
		case "fail":
			return status.Error(parseCode(t, arg), "x")
		case "hang":
			<-stream.Context().Done()
		}
		if err != nil || stream.Context().Err() != nil {
			return status.Error(codes.Canceled, "the client has gone")
		}
	}
	return nil
}

// A survivor is an application that recovers from panics and goes on.
type survivor struct {
	stream    grpc.ClientStream
	mu        sync.Mutex
	recovered int
	ended     bool // RecvMsg has returned an error
}

func (s *survivor) try(f func()) {
	defer func() {
		if p := recover(); p != nil {
			s.mu.Lock()
			defer s.mu.Unlock()
			s.recovered++
		}
	}()
	f()
}

func (s *survivor) play(t *testing.T, steps string, cancel func()) {
	for _, step := range split(steps) {
		verb, arg, _ := strings.Cut(step, " ")
		s.try(func() {
			switch verb {
			case "send":
				s.stream.SendMsg(&echov1.EchoRequest{Message: arg})
			case "close":
				s.stream.CloseSend()
			case "recv":
				if s.stream.RecvMsg(new(echov1.EchoResponse)) != nil {
					s.mu.Lock()
					s.ended = true
					s.mu.Unlock()
				}
			case "header":
				s.stream.Header()
			case "context":
				s.stream.Context()
			case "wait":
				time.Sleep(parseDuration(t, arg))
			case "abort":
				cancel()
			}
		})
	}
}

// lives are calls with panics at all their points. A second goroutine, if there is one, runs its
// own steps. Afterwards the application receives until there is an error. No committed stream is
// cancelled: gRPC may report that end on a goroutine of its own, where nobody can recover.
var lives = []struct {
	name          string
	kind          *grpc.StreamDesc
	opts          []Option
	scripts       []string
	first, second string
}{
	{"success", bidiStream, nil, []string{"all; send 1; send 2"}, "send a; close; recv; recv; recv", ""},
	{"found by RecvMsg", bidiStream, nil, []string{"one; fail UNAVAILABLE", "one; fail UNAVAILABLE", "all; send 1; send 2"},
		"send a; send b; close; recv; recv; recv", ""},
	{"found by SendMsg", clientStream, nil, []string{"one; fail UNAVAILABLE", "all; send 1"}, "send a; wait 1s; send b; close; recv", ""},
	{"found by Header", serverStream, nil, []string{"one; fail UNAVAILABLE", "header; all; send 1"},
		"send a; close; header; recv; recv", ""},
	{"attempts exhausted", bidiStream, []Option{WithMaxAttempts(2)}, []string{"one; fail UNAVAILABLE", "one; fail UNAVAILABLE"},
		"send a; recv; recv", ""},
	{"not retryable", clientStream, nil, []string{"one; header; fail NOT_FOUND"}, "send a; recv; recv", ""},
	{"failure when committed", bidiStream, nil, []string{"one; send 1; fail UNAVAILABLE"}, "send a; recv; recv; recv", ""},
	{"success when committed by Context", clientStream, nil, []string{"all; send 1"}, "send a; context; close; recv", ""},
	{"committed to a second attempt", bidiStream, nil, []string{"one; fail UNAVAILABLE", "header; send 1; all; fail UNAVAILABLE"},
		"send a; header; recv; send b; close; recv; recv", ""},
	{"attempt timeout", bidiStream, []Option{WithAttemptTimeout(5 * second)}, []string{"one; hang", "all; send 1"},
		"send a; close; recv; recv", ""},
	{"attempt timeout, no attempts left", bidiStream, []Option{WithAttemptTimeout(5 * second), WithMaxAttempts(2)},
		[]string{"one; hang", "one; hang"}, "send a; close; recv; recv", ""},
	{"two goroutines", bidiStream, nil, []string{"one; fail UNAVAILABLE", "one; one; fail UNAVAILABLE", "all; send 1"}, "recv; recv",
		"send a; wait 500ms; send b; wait 1s; send c; close"},
	{"header on a second goroutine", bidiStream, nil, []string{"one; fail UNAVAILABLE", "one; header; all; send 1"},
		"send a; close; recv; recv", "header"},
	{"cancelled in a backoff", bidiStream, nil, []string{"one; fail UNAVAILABLE"}, "send a; recv; recv", "wait 500ms; abort"},
}

var panicPoints = flag.Int("panics.points", 1, "TestStreamsSurvivePanics tries so many callbacks of each kind; no call has more than 12")

// A panic comes out on a goroutine of the application, and ends nothing but the call.
func TestStreamsSurvivePanics(t *testing.T) {
	for _, tt := range lives {
		for _, kind := range append(ours, others...) {
			for nth, off := 1, true; off && nth <= *panicPoints; nth++ {
				t.Run(fmt.Sprintf("%s, %s #%d", tt.name, kind, nth), func(t *testing.T) {
					defer func() {
						if p := recover(); p != nil {
							t.Errorf("a goroutine is left: %v", p)
						}
					}()
					bubble(t, func(t *testing.T) {
						b := &bomb{kind: kind, nth: nth}
						server := serveStreams(t, func(n int, stream grpc.ServerStream) error {
							return serveLeniently(t, tt.scripts[min(n, len(tt.scripts))-1], stream)
						})
						cc := server.conn(t, append(DialOptions(append(b.options(), tt.opts...)...),
							grpc.WithChainStreamInterceptor(b.below))...)
						ctx, cancel := context.WithCancel(t.Context())
						defer cancel()
						app := &survivor{}
						app.try(func() { app.stream, _ = cc.NewStream(ctx, tt.kind, "/s/m", b.callOptions()...) })
						done := make(chan struct{})
						if app.stream == nil {
							close(done)
						} else {
							go func() {
								defer close(done)
								var group sync.WaitGroup
								group.Go(func() { app.play(t, tt.second, cancel) })
								app.play(t, tt.first+strings.Repeat("; recv", 5), cancel)
								group.Wait()
							}()
						}
						time.Sleep(time.Minute)
						synctest.Wait()
						b.check(t, app, done, cancel)
						off = b.off
					})
				})
			}
		}
	}
}

func (b *bomb) check(t *testing.T, app *survivor, done <-chan struct{}, cancel func()) {
	select {
	case <-done:
		if app.ended {
			for i, ctx := range b.opened {
				if ctx.Err() == nil {
					t.Errorf("the context of attempt %d outlives the call", i+1)
				}
			}
		}
	default:
		if strings.Contains(strings.Join(ours, " "), b.kind) {
			t.Error("a method waits for something that does not come")
		}
	}
	cancel()
	time.Sleep(time.Minute)
	synctest.Wait()
	select {
	case <-done:
	default:
		t.Error("a method waits for ever, although the call is cancelled")
	}
	if want := map[bool]int{true: 1}[b.off]; app.recovered != want {
		t.Errorf("the application has recovered from %d panics, want %d", app.recovered, want)
	}
	if b.finish != 1 || b.callEnd > 1 {
		t.Errorf("OnFinish ran %d times and CallEnd came %d times, want once and at most once", b.finish, b.callEnd)
	}
	charged, outcomes := 0, map[int]int{}
	for _, o := range b.budget.heard {
		charged += min(1, o.Attempt-1)
		if outcomes[o.Attempt]++; outcomes[o.Attempt] > 1 {
			t.Errorf("budget heard %v, want one outcome of attempt %d", b.budget.heard, o.Attempt)
		}
	}
	if paid := len(b.budget.asked) - b.budget.refunded; paid != charged {
		t.Errorf("budget gave %d retries, got %d back and heard %v, want an outcome of each of the others",
			len(b.budget.asked), b.budget.refunded, b.budget.heard)
	}
	if heard := len(b.budget.heard); heard < len(b.opened) || heard > b.started {
		t.Errorf("budget heard %v of %d attempts, %d of which have been opened", b.budget.heard, b.started, len(b.opened))
	}
}

// latePanic is a stream whose SendMsg panics after a second.
type latePanic struct{ grpc.ClientStream }

func (latePanic) SendMsg(any) error { time.Sleep(second); panic(errBomb) }

// A replay may go on when the application has its first message already. Its panic comes out of
// a later method.
func TestAPanicOfAReplayComesOutAfterTheCommit(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server, reported := serveScripts(t, "recv a; fail UNAVAILABLE", "send 1; hang"), &record{}
		attempts := 0
		cc := server.conn(t, append(DialOptions(append(reported.options(), steady)...), below(func(s grpc.ClientStream) grpc.ClientStream {
			if attempts++; attempts > 1 {
				return latePanic{s}
			}
			return s
		}))...)
		app, tough := openOn(t, cc, bidiStream, reported.onFinish()), &survivor{}
		app.play(t, "send a")
		tough.try(func() { app.play(t, "recv 1") })
		tough.try(func() { app.stream.RecvMsg(new(echov1.EchoResponse)) })
		if tough.recovered != 1 {
			t.Errorf("the application has recovered from %d panics, want 1", tough.recovered)
		}
		app.cancel()
		synctest.Wait()
		if len(reported.finished) != 1 {
			t.Errorf("OnFinish reported %v, want one failure", reported.finished)
		}
	})
}

func TestAPanicWhileRecoveringLeavesNobodyWaiting(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serveStreams(t, func(n int, stream grpc.ServerStream) error {
			return playServer(t, n, "recv a; fail UNAVAILABLE", stream)
		})
		app, err := server.openStream(t, bidiStream, []Option{WithClassifier(func(context.Context,
			Attempt) Classification {
			panic("classifier")
		})})
		if err != nil {
			t.Fatal(err)
		}
		app.play(t, "send a")
		func() {
			defer func() {
				if recover() == nil {
					t.Error("the classifier's panic did not come out")
				}
			}()
			app.play(t, "recv 1")
		}()
		app.play(t, "sendeof b; recv INTERNAL")
	})
}

// The call span ends with the call, also if an observer panics before the first attempt is sent.
func TestACallSpanEndsWhenTheFirstObserverPanics(t *testing.T) {
	bubble(t, func(t *testing.T) {
		provider, spans := recordSpans()
		cc := serveScripts(t).conn(t, DialOptions(WithTracerProvider(provider), WithCallSpan(true),
			WithObserver(func(context.Context, Event) { panic(errBomb) }))...)
		tough := &survivor{}
		tough.try(func() { cc.NewStream(t.Context(), bidiStream, "/s/m") })
		if started, ended := len(spans.Started()), len(spans.Ended()); tough.recovered != 1 || started != 1 || ended != 1 {
			t.Errorf("the application has recovered from %d panics, %d call spans were started and %d ended, want one of each",
				tough.recovered, started, ended)
		}
	})
}

// A stream that is not hedged, because its delay is not known yet, is measured all the same.
func TestAPanicOfTheDelayEndsAStreamThatIsNotHedged(t *testing.T) {
	for _, script := range []string{"recv a; send 1; send 2", "recv a; send 1; fail UNAVAILABLE", "recv a; send 1; hang"} {
		t.Run(script, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				unknown := switched{func() bool { return false }, panickyDelay{HedgeAfter(second)}}
				server, reported := serveScripts(t, script), &record{}
				cc := server.conn(t, DialOptions(append(reported.options(),
					WithMethod("/streams/Expand", WithHedging(Hedging{Delay: unknown})))...)...)
				app := openOn(t, cc, serverStream, reported.onFinish())
				tough := &survivor{stream: app.stream}
				tough.play(t, "send a; close; recv; recv; recv", app.cancel)
				if tough.recovered != 1 {
					t.Errorf("the application has recovered from %d panics, want 1", tough.recovered)
				}
				if len(reported.finished) != 1 {
					t.Errorf("OnFinish reported %v, want one failure", reported.finished)
				}
			})
		})
	}
}

// panicAtEOF is a stream whose RecvMsg panics when gRPC's has returned io.EOF.
type panicAtEOF struct{ grpc.ClientStream }

func (s panicAtEOF) RecvMsg(m any) error {
	err := s.ClientStream.RecvMsg(m)
	if err == io.EOF {
		panic(errBomb)
	}
	return err
}

func TestAPanicBelowAtTheEndOfACommittedStream(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server, reported := serveScripts(t, "header"), &record{}
		cc := server.conn(t, append(DialOptions(reported.options()...),
			below(func(s grpc.ClientStream) grpc.ClientStream { return panicAtEOF{s} }))...)
		app := openOn(t, cc, bidiStream, reported.onFinish())
		tough := &survivor{stream: app.stream}
		tough.play(t, "header; recv", app.cancel)
		if tough.recovered != 1 {
			t.Errorf("the application has recovered from %d panics, want 1", tough.recovered)
		}
		reported.want(t, nil)
	})
}
