package grpcretry

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	oteltrace "go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/grpcretry/grpcretry/internal/recorded"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// The one test of panics makes calls of every kind again and again. Each time the nth use of one kind of
// callback panics, or ends its goroutine. The caller's goroutine must get that, and nothing of the call
// may be left: no goroutine, no token, no span, no memory, no call of OnFinish that is missing.

// A bomb goes off in a callback of a call: the one that is the nth of its kind.
type bomb struct {
	kind string
	nth  int
	exit bool // by runtime.Goexit

	mu      sync.Mutex
	ticks   int
	off     bool
	budget  aBudget
	started int               // attempts, as the observer saw them
	opened  []context.Context // of the attempts that were handed to gRPC
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
	switch {
	case explodes && b.exit:
		runtime.Goexit()
	case explodes:
		panic(errBomb)
	}
}

// ours are the kinds of callbacks that are given to this library. A panic of one of these ends the call;
// after one in a codec or an interceptor below, a stream is what that left behind.
var ours = []string{"classifier", "backoff", "attempt_start", "attempt_end", "decision", "call_end", "Withdraw", "Deposit", "Refund",
	"Balance", "Answered", "OnFinish", "log", "span", "function"}

var others = []string{"Marshal", "Unmarshal", "before opening", "after opening", "SendMsg", "CloseSend", "RecvMsg", "Header"}

func (b *bomb) Deposit(o Outcome) {
	b.budget.Deposit(o)
	b.tick(map[bool]string{true: "Refund", false: "Deposit"}[o.Result == Unsent])
}

func (b *bomb) Withdraw(now time.Time) bool {
	b.tick("Withdraw")
	return b.budget.Withdraw(now)
}
func (b *bomb) Balance(time.Time) float64 { b.tick("Balance"); return 1 }

// Delay is that of a Backoff: always a second.
func (b *bomb) Delay(int, time.Duration, float64) time.Duration { b.tick("backoff"); return second }

func (b *bomb) options() []Option {
	return []Option{WithBudget(b), WithBackoff(b), WithLogger(slog.New(bombLog{slog.DiscardHandler, b})),
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

type bombLog struct {
	slog.Handler
	*bomb
}

func (bombLog) Enabled(context.Context, slog.Level) bool    { return true }
func (l bombLog) Handle(context.Context, slog.Record) error { l.tick("log"); return nil }
func (l bombLog) WithAttrs([]slog.Attr) slog.Handler        { return l }

type bombSpan struct {
	noop.Span
	*bomb
}

func (bombSpan) IsRecording() bool                           { return true }
func (s bombSpan) AddEvent(string, ...oteltrace.EventOption) { s.tick("span") }

// bombDelay is the delay of hedges, and is told about every attempt that wins.
type bombDelay struct {
	HedgeDelay
	*bomb
}

func (d bombDelay) Delay(method string, now time.Time) (time.Duration, bool) {
	return d.HedgeDelay.Delay(method, now)
}
func (d bombDelay) Answered(string, time.Duration, bool, time.Time) { d.tick("Answered") }

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

func (b *bomb) open(ctx context.Context) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.opened = append(b.opened, ctx)
}

func (b *bomb) belowUnary(ctx context.Context, next func(context.Context) error) error {
	b.open(ctx)
	b.tick("before opening")
	err := next(ctx)
	b.tick("after opening")
	return err
}

func (b *bomb) belowStream(ctx context.Context, next streamOpener) (grpc.ClientStream, error) {
	b.tick("before opening")
	stream, err := next(ctx)
	if err == nil {
		b.open(ctx)
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
		case "wait":
			if !elapsed(parseDuration(t, arg), stream.Context().Done()) {
				return status.Error(codes.Canceled, "the client has gone")
			}
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

// tellsOfPanic reports whether err is the panic of a replay, which comes out as an error, because a goroutine of ours
// runs it.
func tellsOfPanic(err error) bool {
	return status.Code(err) == codes.Internal && strings.Contains(err.Error(), "panic while a message was sent again: "+errBomb.Error())
}

// A survivor is an application that recovers from panics, or is told about them, and goes on. Each method of the
// library runs on a goroutine of its own, which a callback may end.
type survivor struct {
	stream    grpc.ClientStream
	mu        sync.Mutex
	recovered int
	ended     bool // the call has returned, or RecvMsg has returned an error
}

func (s *survivor) try(f func()) {
	var done sync.WaitGroup
	returned := false
	done.Go(func() {
		defer func() {
			if p := recover(); p != nil || !returned {
				s.mu.Lock()
				defer s.mu.Unlock()
				s.recovered++
			}
		}()
		f()
		returned = true
	})
	done.Wait()
}

func (s *survivor) end(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = true
	if tellsOfPanic(err) && s.recovered == 0 {
		s.recovered++
	}
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
				if err := s.stream.RecvMsg(new(echov1.EchoResponse)); err != nil {
					s.end(err)
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

// lives are calls with panics at all their points: streams, unary calls (no kind) and functions (neither a kind
// nor scripts). A second goroutine, if there is one, runs its own steps. Afterwards the application receives until
// there is an error. No committed stream is cancelled: gRPC may report that end on a goroutine of its own, where
// nobody can recover.
var lives = []struct {
	name          string
	kind          *grpc.StreamDesc
	opts          []Option
	scripts       []string
	first, second string
}{
	{"stream, success", bidiStream, nil, []string{"all; send 1; send 2"}, "send a; close; recv; recv; recv", ""},
	{"stream, found by RecvMsg", bidiStream, nil, []string{"one; fail UNAVAILABLE", "all; fail UNAVAILABLE", "all; send 1; send 2"},
		"send a; send b; close; recv; recv; recv", ""},
	{"stream, found by SendMsg", clientStream, nil, []string{"one; fail UNAVAILABLE", "all; send 1"},
		"send a; wait 1s; send b; close; recv", ""},
	{"stream, found by Header", serverStream, nil, []string{"one; fail UNAVAILABLE", "header; all; wait 1s; send 1"},
		"send a; close; header; recv; recv", ""},
	{"stream, attempts exhausted", bidiStream, []Option{WithMaxAttempts(2)}, []string{"one; fail UNAVAILABLE", "one; fail UNAVAILABLE"},
		"send a; recv; recv", ""},
	{"stream, failure when committed", bidiStream, nil, []string{"one; send 1; fail UNAVAILABLE"}, "send a; recv; recv; recv", ""},
	{"stream, committed to a second attempt", bidiStream, nil, []string{"one; fail UNAVAILABLE", "header; send 1; all; fail UNAVAILABLE"},
		"send a; header; recv; send b; close; recv; recv", ""},
	{"stream, no memory", bidiStream, []Option{withReplayMemory(0)}, []string{"all; send 1"}, "send a; send b; close; recv; recv", ""},
	{"stream, attempt timeout", bidiStream, []Option{WithAttemptTimeout(5 * second)}, []string{"one; hang", "all; send 1"},
		"send a; close; recv; recv", ""},
	{"stream, two goroutines", bidiStream, nil, []string{"one; fail UNAVAILABLE", "one; one; fail UNAVAILABLE", "all; send 1"}, "recv; recv",
		"send a; wait 500ms; send b; wait 1s; send c; close"},
	{"stream, cancelled in a backoff", bidiStream, nil, []string{"one; fail UNAVAILABLE"}, "send a; recv; recv", "wait 500ms; abort"},
	{"hedged stream, the hedge wins", serverStream, nil, []string{"one; hang", "all; send 1; send 2"}, "send a; close; recv; recv; recv", ""},
	{"hedged stream, all fail", serverStream, []Option{WithMaxAttempts(3)}, []string{"one; wait 1500ms; fail UNAVAILABLE"},
		"send a; close; recv", "wait 1s; header"},

	{"unary, two failures", nil, nil, []string{"all; fail UNAVAILABLE", "all; fail UNAVAILABLE", "all; send 1"}, "", ""},
	{"unary, attempt timeout", nil, []Option{WithAttemptTimeout(5 * second)}, []string{"all; hang", "all; send 1"}, "", ""},
	{"unary, cancelled in a backoff", nil, nil, []string{"all; fail UNAVAILABLE"}, "", "wait 500ms; abort"},
	{"hedged unary, the hedge wins", nil, nil, []string{"all; hang", "all; send 1"}, "", ""},
	{"hedged unary, all fail", nil, []Option{WithMaxAttempts(3)}, []string{"all; wait 1500ms; fail UNAVAILABLE"}, "", ""},

	{"function, two failures", nil, nil, nil, "UNAVAILABLE; UNAVAILABLE; OK", ""},
	{"function, attempt timeout", nil, []Option{WithAttemptTimeout(5 * second)}, nil, "hang; OK", ""},
}

var panicPoints = flag.Int("panics.points", 2, "TestPanics tries so many uses of each kind of callback; no call has more than 12")

// A panic comes out on a goroutine of the application, and ends nothing but the call.
func TestPanics(t *testing.T) {
	for i, life := range lives {
		for _, kind := range slices.Concat(ours, others) {
			if strings.HasPrefix(life.name, "hedged") && !slices.Contains(ours, kind) {
				continue // on the goroutine of a hedge a panic below ends the program
			}
			for _, exit := range []bool{false, true} {
				if exit && !slices.Contains(ours, kind) {
					continue // what gRPC and its interceptors make of that is theirs
				}
				for nth, off := 1, true; off && nth <= *panicPoints; nth++ {
					t.Run(fmt.Sprintf("%s, %s #%d, exit %v", life.name, kind, nth, exit), func(t *testing.T) {
						defer func() {
							if p := recover(); p != nil {
								t.Errorf("a goroutine is left: %v", p)
							}
						}()
						bubble(t, func(t *testing.T) {
							b := &bomb{kind: kind, nth: nth, exit: exit}
							b.live(t, i)
							off = b.off
						})
					})
				}
			}
		}
	}
}

func (b *bomb) live(t *testing.T, number int) {
	life := lives[number]
	hedges := strings.HasPrefix(life.name, "hedged")
	spans := &recorded.Spans{}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	opts := b.options()
	if b.kind == "span" {
		ctx = oteltrace.ContextWithSpan(ctx, bombSpan{bomb: b})
	} else {
		opts = append(opts, WithTracerProvider(spans), WithCallSpan(true))
	}
	if hedges { // only they are paid for
		opts = append(opts, WithBudget(Unlimited), WithPolicy(Policy{
			Hedging: &Hedging{Delay: bombDelay{HedgeAfter(second), b}, Budget: b, AllMethodsAreSafe: true}}))
	}
	r := retrierOf(t, append(opts, life.opts...)...)
	server := serveStreams(t, func(n int, stream grpc.ServerStream) error {
		return serveLeniently(t, life.scripts[min(n, len(life.scripts))-1], stream)
	})
	cc := server.conn(t, append(r.DialOptions(), belowUnary(b.belowUnary), belowStream(b.belowStream))...)
	app, done := &survivor{}, make(chan struct{})
	go func() {
		defer close(done)
		var group sync.WaitGroup
		defer group.Wait()
		switch {
		case life.kind != nil:
			app.try(func() { app.stream, _ = cc.NewStream(ctx, life.kind, "/s/m", b.callOptions()...) })
			if app.stream == nil {
				return
			}
			group.Go(func() { app.play(t, life.second, cancel) })
			app.play(t, life.first+strings.Repeat("; recv", 5), cancel)
		case life.scripts != nil:
			group.Go(func() { app.play(t, life.second, cancel) })
			app.try(func() { app.end(cc.Invoke(ctx, "/s/m", request(), new(echov1.EchoResponse), b.callOptions()...)) })
		default:
			b.finish = 1 // a function has no options of gRPC
			app.try(func() { app.end(r.Do(ctx, "/f", b.function(t, split(life.first)))) })
		}
	}()
	time.Sleep(time.Minute)
	synctest.Wait()
	b.check(t, app, done, cancel, life.kind != nil || hedges)
	if u := r.usage.now(); u.OpenStreams != 0 || u.ReplayMemory != 0 || u.WaitingCalls != 0 {
		t.Errorf("Usage = %+v, want nothing in use", u)
	}
	if started, ended := len(spans.Started()), len(spans.Ended()); started != ended {
		t.Errorf("%d spans were started, and %d have ended", started, ended)
	}
}

// function fails by a script of codes.
func (b *bomb) function(t *testing.T, script []string) func(context.Context) error {
	calls := 0
	return func(ctx context.Context) error {
		b.open(ctx)
		b.tick("function")
		calls++
		if script[calls-1] == "hang" {
			<-ctx.Done()
			return ctx.Err()
		}
		if c := parseCode(t, script[calls-1]); c != codes.OK {
			return status.Error(c, "x")
		}
		return nil
	}
}

// check compares what is left of a call. Unless bounded, its attempts have the caller's context.
func (b *bomb) check(t *testing.T, app *survivor, done <-chan struct{}, cancel func(), bounded bool) {
	select {
	case <-done:
		if app.ended && bounded {
			for i, ctx := range b.opened {
				if ctx.Err() == nil {
					t.Errorf("the context of attempt %d outlives the call", i+1)
				}
			}
		}
	default:
		if slices.Contains(ours, b.kind) {
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
		if outcomes[o.Attempt]++; outcomes[o.Attempt] > 1 && o.Attempt > 1 {
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

// A panic of the function that PerTarget was given ends the call like that of any other callback.
func TestAPanicThatCreatesABudget(t *testing.T) {
	bad := PerTarget(func() Budget { panic("no budget") })
	for name, p := range map[string]Policy{
		"retries": {Budget: bad},
		"hedges":  {Hedging: &Hedging{Delay: HedgeAfter(second), Budget: bad}},
	} {
		for _, kind := range []callKind{{"unary", nil}, {"server stream", serverStream}} {
			t.Run(name+", "+kind.name, func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					server := serveStreams(t, func(int, grpc.ServerStream) error { return nil })
					cc := server.conn(t, DialOptions(WithMethod("/streams/", WithPolicy(p)))...)
					finished := 0
					defer func() {
						if p := recover(); p != "no budget" || finished != 1 {
							t.Errorf("panic %v, OnFinish ran %d times, want the panic, and once", p, finished)
						}
					}()
					kind.call(t.Context(), cc, anyMethod, grpc.OnFinish(func(error) { finished++ }))
				})
			})
		}
	}
}

type panickyBudget struct{ Budget }

func (panickyBudget) Deposit(Outcome) { panic(errBomb) }

// A callback may panic each time. Then budgets may be missing what they were to be told, but the call ends.
func TestABudgetThatAlwaysPanics(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := retrierOf(t, WithHedging(Hedging{Delay: HedgeAfter(second), Budget: panickyBudget{Unlimited}, AllMethodsAreSafe: true}))
		finished := 0
		app := openOn(t, serveScripts(t, "recv a; hang", "recv a; send 1").conn(t, r.DialOptions()...), serverStream,
			grpc.OnFinish(func(error) { finished++ }))
		app.play(t, "send a; close")
		func() {
			defer func() { recover() }()
			app.stream.RecvMsg(new(echov1.EchoResponse))
		}()
		if synctest.Wait(); finished != 1 {
			t.Errorf("OnFinish ran %d times, want once", finished)
		}
		if err := app.stream.RecvMsg(new(echov1.EchoResponse)); err != errPanicked {
			t.Errorf("the next RecvMsg = %v, want %v", err, errPanicked)
		}
	})
}

// brokenBudget panics whenever it is used.
type brokenBudget struct{ panickyBudget }

func (brokenBudget) Withdraw(time.Time) bool { panic(errBomb) }

// Whatever panics, and how often, the call no longer waits for its target.
func TestACallThatPanicsTwiceWaitsForNothing(t *testing.T) {
	everyKind(t, func(t *testing.T, kind callKind) {
		r := retrierOf(t, steady, WithAttemptTimeout(second), WithBudget(brokenBudget{panickyBudget{Unlimited}}))
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		defer func() {
			if recover() == nil {
				t.Error("there was no panic")
			}
			for known := range r.targets.All() {
				if n := known.waiting.Load(); n != 0 {
					t.Errorf("%d calls wait", n)
				}
			}
		}()
		_ = kind.call(ctx, serveScripts(t, "recv hello; hang").conn(t, r.DialOptions()...), anyMethod)
	})
}

type panickySpan struct{ noop.Span }

func (panickySpan) IsRecording() bool              { return true }
func (panickySpan) End(...oteltrace.SpanEndOption) { panic(errBomb) }

type panickyTracer struct{ noop.Tracer }

func (panickyTracer) Start(ctx context.Context, _ string, _ ...oteltrace.SpanStartOption) (context.Context, oteltrace.Span) {
	return oteltrace.ContextWithSpan(ctx, panickySpan{}), panickySpan{}
}

type panickyTracers struct{ noop.TracerProvider }

func (panickyTracers) Tracer(string, ...oteltrace.TracerOption) oteltrace.Tracer {
	return panickyTracer{}
}

func TestASpanThatAlwaysPanics(t *testing.T) {
	everyKind(t, func(t *testing.T, kind callKind) {
		server := serveStreams(t, func(int, grpc.ServerStream) error { return errUnavailable })
		cc := server.conn(t, DialOptions(steady, WithCallSpan(true), WithTracerProvider(panickyTracers{}))...)
		finished := 0
		func() {
			defer func() { recover() }()
			kind.call(t.Context(), cc, anyMethod, grpc.OnFinish(func(error) { finished++ }))
		}()
		if synctest.Wait(); finished != 1 {
			t.Errorf("OnFinish ran %d times, want once", finished)
		}
	})
}
