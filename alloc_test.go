package grpcretry

import (
	"context"
	"errors"
	"io"
	"runtime"
	"sync"
	"testing"
	"testing/synctest"
	"time"
	"unsafe"
	"weak"

	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"github.com/grpcretry/grpcretry/internal/recorded"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// TestFirstAttemptThatSucceedsAllocatesOnce holds the promise that no feature may cost a
// call that needs none of it.
func TestFirstAttemptThatSucceedsAllocatesOnce(t *testing.T) {
	for name, intercept := range map[string]grpc.UnaryClientInterceptor{
		"defaults":      UnaryClientInterceptor(),
		"with a logger": UnaryClientInterceptor(WithLogger(silent)),
		"with a method": UnaryClientInterceptor(WithMethod("/pkg.Service/Method", WithMaxAttempts(2))),
		"an observer":   UnaryClientInterceptor(WithObserver(func(context.Context, Event) {})),
	} {
		if got := testing.AllocsPerRun(1000, func() { callOnce(t, intercept, succeed) }); got > 1 {
			t.Errorf("%s: %v allocations, want at most 1", name, got)
		}
	}
	var header, trailer metadata.MD
	given := []grpc.CallOption{grpc.StaticMethod(), grpc.Header(&header), grpc.Trailer(&trailer), grpc.OnFinish(func(error) {})}
	intercept := UnaryClientInterceptor()
	for count := range len(given) + 1 {
		got := testing.AllocsPerRun(1000, func() {
			if err := intercept(t.Context(), "/pkg.Service/Method", nil, nil, nil, succeed, given[:count]...); err != nil {
				t.Fatal(err)
			}
		})
		if got > 1 {
			t.Errorf("with %d of gRPC's options: %v allocations, want at most 1", count, got)
		}
	}
}

// TestRecordsAreSmall holds the allocations of each call, and of each retried call, to their size classes; the next ones are 16, 32
// and 64 bytes larger. Above 512 bytes, Go needs more time for an allocation, and adds 8 bytes of its own.
func TestRecordsAreSmall(t *testing.T) {
	if got := unsafe.Sizeof(attempt{}); got > 192 {
		t.Errorf("an attempt takes %d bytes, want at most 192", got)
	}
	if got := unsafe.Sizeof(fullAttempt{}); got > 256 {
		t.Errorf("an attempt with extras takes %d bytes, want at most 256", got)
	}
	for name, got := range map[string]uintptr{
		"a stream": unsafe.Sizeof(retryStream{}), "a unary call with a contest": unsafe.Sizeof(contestedUnary{}),
	} {
		if got > 1016 {
			t.Errorf("%s takes %d bytes, want at most 1,016", name, got)
		}
	}
	if got := unsafe.Sizeof(cold{}); got > 512 {
		t.Errorf("the cold part of a call takes %d bytes, want at most 512", got)
	}
}

// TestFunctionsAllocateNoMore holds functions to what calls allocate: one allocation for a success, and
// two more for a retry.
func TestFunctionsAllocateNoMore(t *testing.T) {
	r := doer(t, 0, WithBackoff(Constant(0)), WithBudget(Unlimited))
	for failures, limit := range map[int]float64{0: 1, 1: 3} {
		got := testing.AllocsPerRun(1000, func() {
			calls := 0
			err := r.Do(t.Context(), "/sql/read", func(context.Context) error {
				if calls++; calls <= failures {
					return errUnavailable
				}
				return nil
			})
			if err != nil {
				t.Fatal(err)
			}
		})
		if got > limit {
			t.Errorf("a function with %d retries makes %v allocations, want at most %v", failures, got, limit)
		}
	}
}

// TestRetriesAllocateNoMore holds calls with retries to what they allocate today. It is
// less than go-grpc-middleware needs, 9 and 25; see bench/.
func TestRetriesAllocateNoMore(t *testing.T) {
	intercept := UnaryClientInterceptor(WithBackoff(Constant(0)), WithBudget(Unlimited), unmoved)
	withToken := metadata.AppendToOutgoingContext(t.Context(), "authorization", "a", "b", "c")
	for failures, limit := range map[int]float64{1: 3, 3: 6} {
		invoker := func(ctx context.Context, _ string, _, _ any, _ *grpc.ClientConn, _ ...grpc.CallOption) error {
			if a, _ := AttemptFromContext(ctx); a.Number <= failures {
				return errUnavailable
			}
			return nil
		}
		if got := testing.AllocsPerRun(1000, func() { callOnce(t, intercept, invoker) }); got > limit {
			t.Errorf("a call with %d retries makes %v allocations, want at most %v", failures, got, limit)
		}
		got := testing.AllocsPerRun(1000, func() {
			err := intercept(withToken, "/pkg.Service/Method", nil, nil, nil, invoker, stubOptions...)
			if err != nil {
				t.Fatal(err)
			}
		})
		if limit += 6 * float64(failures); got > limit { // its metadata, with the header
			t.Errorf("a call with %d retries and metadata makes %v allocations, want at most %v", failures, got, limit)
		}
	}
}

// TestAWaitingCallHoldsNoAttempt is about the memory of the very many calls that may wait.
func TestAWaitingCallHoldsNoAttempt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		intercept := UnaryClientInterceptor(WithBackoff(Constant(time.Hour)), WithBudget(Unlimited), WithPatience(0))
		var failed weak.Pointer[attempt]
		var running sync.WaitGroup
		running.Go(func() {
			callOnce(t, intercept, func(ctx context.Context, _ string, _, _ any, _ *grpc.ClientConn, _ ...grpc.CallOption) error {
				if a := ctx.(*attempt); a.number == 1 {
					failed = weak.Make(a)
					return errUnavailable
				}
				return nil
			})
		})
		synctest.Wait()
		runtime.GC()
		if failed.Value() != nil {
			t.Error("the call holds the attempt that has failed while it waits for the next one")
		}
		running.Wait()
	})
}

// TestWaitsOfACallSpanThatIsNotSampledAreFree compares a retry after a wait, too short to need a timer,
// with one that follows immediately. Only a call span that records has a span for the wait.
func TestWaitsOfACallSpanThatIsNotSampledAreFree(t *testing.T) {
	allocations := func(spans trace.TracerProvider, wait time.Duration) float64 {
		intercept := UnaryClientInterceptor(WithBackoff(Constant(wait)), WithBudget(Unlimited),
			WithCallSpan(true), WithTracerProvider(spans))
		invoker := func(ctx context.Context, _ string, _, _ any, _ *grpc.ClientConn, _ ...grpc.CallOption) error {
			if a, _ := AttemptFromContext(ctx); a.Number == 1 {
				return errUnavailable
			}
			return nil
		}
		return testing.AllocsPerRun(100, func() { callOnce(t, intercept, invoker) })
	}
	for spans, costs := range map[trace.TracerProvider]bool{noop.NewTracerProvider(): false, &recorded.Spans{}: true} {
		waits, none := allocations(spans, time.Nanosecond), allocations(spans, 0)
		if costs != (waits > none) {
			t.Errorf("%T: %v allocations with a wait and %v without, want more: %v", spans, waits, none, costs)
		}
	}
}

// TestHedgingThatIsNotDueAllocatesNoMore is about calls that are answered before their
// hedge is sent, as most are.
func TestHedgingThatIsNotDueAllocatesNoMore(t *testing.T) {
	intercept := UnaryClientInterceptor(WithPolicy(Policy{MaxAttempts: 2,
		Hedging: &Hedging{Delay: HedgeAfter(time.Minute), AllMethodsAreSafe: true}}))
	reply := &echov1.EchoResponse{}
	got := testing.AllocsPerRun(1000, func() {
		if err := intercept(t.Context(), "/pkg.Service/Method", nil, reply, nil, succeed, stubOptions...); err != nil {
			t.Fatal(err)
		}
	})
	if got > 3 {
		t.Errorf("%v allocations, want at most 3", got)
	}
}

// TestUnsentOnlyAllocatesLittle is about the evidence that each attempt carries.
func TestUnsentOnlyAllocatesLittle(t *testing.T) {
	intercept := UnaryClientInterceptor(WithUnsentOnly(true))
	if got := testing.AllocsPerRun(1000, func() { callOnce(t, intercept, succeed) }); got > 4 {
		t.Errorf("%v allocations, want at most 4", got)
	}
}

// TestHeaderIsNotAskedFor guards three allocations that gRPC makes: for a copy of the
// header, wherever one is asked for. That of the trailer costs one, and rules need it.
func TestHeaderIsNotAskedFor(t *testing.T) {
	var asked []grpc.CallOption
	callOnce(t, UnaryClientInterceptor(), func(_ context.Context, _ string, _, _ any, _ *grpc.ClientConn, opts ...grpc.CallOption) error {
		asked = opts
		return nil
	})
	trailers := 0
	for _, opt := range asked {
		switch opt.(type) {
		case grpc.HeaderCallOption:
			t.Error("a call with defaults asks gRPC for the header")
		case grpc.TrailerCallOption:
			trailers++
		}
	}
	if trailers != 1 {
		t.Errorf("a call with defaults asks gRPC for the trailer %d times, want once", trailers)
	}
}

// TestAStreamAllocatesNoMore is about the start and the end of a server stream; for what
// is between, see TestCommittedStreamAllocatesNothingPerMessage.
func TestAStreamAllocatesNoMore(t *testing.T) {
	intercept, desc, m := StreamClientInterceptor(), &grpc.StreamDesc{ServerStreams: true}, &echov1.EchoRequest{}
	one := &oneMessage{}
	streamer := func(context.Context, *grpc.StreamDesc, *grpc.ClientConn, string, ...grpc.CallOption) (grpc.ClientStream, error) {
		one.received = false
		return one, nil
	}
	got := testing.AllocsPerRun(1000, func() {
		s, err := intercept(t.Context(), desc, nil, "/pkg.Service/Method", streamer, stubOptions...)
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(s.SendMsg(m), s.CloseSend(), s.RecvMsg(m)); err != nil {
			t.Fatal(err)
		}
		if err := s.RecvMsg(m); err != io.EOF {
			t.Fatalf("RecvMsg = %v, want io.EOF", err)
		}
	})
	if got > 9 {
		t.Errorf("%v allocations, want at most 9", got)
	}
}

// oneMessage is a stream that gives one message, and ends.
type oneMessage struct {
	grpc.ClientStream
	received bool
}

func (*oneMessage) Context() context.Context { return nil }

func (*oneMessage) SendMsg(any) error    { return nil }
func (*oneMessage) CloseSend() error     { return nil }
func (*oneMessage) Trailer() metadata.MD { return nil }
func (s *oneMessage) RecvMsg(any) error {
	if s.received {
		return io.EOF
	}
	s.received = true
	return nil
}

// endless is a stream that takes and gives any message.
type endless struct{ grpc.ClientStream }

func (*endless) SendMsg(any) error        { return nil }
func (*endless) RecvMsg(any) error        { return nil }
func (*endless) Trailer() metadata.MD     { return nil }
func (*endless) Context() context.Context { return nil }

func TestCommittedStreamAllocatesNothingPerMessage(t *testing.T) {
	stream := &endless{}
	s, err := StreamClientInterceptor()(t.Context(), bidiStream, nil, "/s/m",
		func(context.Context, *grpc.StreamDesc, *grpc.ClientConn, string, ...grpc.CallOption) (grpc.ClientStream, error) {
			return stream, nil
		})
	if err != nil {
		t.Fatal(err)
	}
	var m any = &echov1.EchoRequest{}
	if err := s.RecvMsg(m); err != nil { // commits
		t.Fatal(err)
	}
	if got := testing.AllocsPerRun(100, func() { _, _ = s.SendMsg(m), s.RecvMsg(m) }); got != 0 {
		t.Errorf("%v allocations per message, want 0", got)
	}
}

// TestServerInterceptorsAllocateOnce holds the server interceptors to one allocation for a request, and
// two for a stream, and the calls made for it to what calls allocate.
func TestServerInterceptorsAllocateOnce(t *testing.T) {
	unary, stream := UnaryServerInterceptor(), StreamServerInterceptor()
	intercept := UnaryClientInterceptor()
	ctx := metadata.NewIncomingContext(t.Context(), metadata.Pairs("user-agent", "grpc-go"))
	info, streamInfo := &grpc.UnaryServerInfo{FullMethod: echoMethod}, &grpc.StreamServerInfo{FullMethod: echoMethod}
	var seen context.Context
	handle := func(ctx context.Context, _ any) (any, error) { seen = ctx; return nil, nil }
	handleStream := func(_ any, s grpc.ServerStream) error { seen = s.Context(); return nil }
	ours := &ofContext{ctx: ctx}
	for name, one := range map[string]struct {
		limit float64
		run   func()
	}{
		"unary":  {1, func() { _, _ = unary(ctx, nil, info, handle) }},
		"stream": {2, func() { _ = stream(nil, ours, streamInfo, handleStream) }},
		"a call of the handler": {1, func() {
			if err := intercept(seen, echoMethod, nil, nil, nil, succeed); err != nil {
				t.Fatal(err)
			}
		}},
	} {
		if _, err := unary(ctx, nil, info, handle); err != nil {
			t.Fatal(err)
		}
		if got := testing.AllocsPerRun(1000, one.run); got > one.limit {
			t.Errorf("%s: %v allocations, want at most %v", name, got, one.limit)
		}
	}
}

// An ofContext is a server's stream that has a context.
type ofContext struct {
	grpc.ServerStream
	ctx context.Context
}

func (s *ofContext) Context() context.Context { return s.ctx }
