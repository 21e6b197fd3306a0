package grpcretry

import (
	"fmt"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

const (
	noSideEffects = descriptorpb.MethodOptions_NO_SIDE_EFFECTS
	idempotent    = descriptorpb.MethodOptions_IDEMPOTENT
)

func TestLevelsOfMethods(t *testing.T) {
	const service = "/grpcretry.test.v1.EchoService/"
	for method, want := range map[string]level{
		service + "Echo":                         noSideEffects,
		service + "Put":                          idempotent,
		service + "Append":                       levelUnknown,
		service + "Expand":                       levelUnknown,
		service + "Echoes":                       levelUnknown,
		service:                                  levelUnknown,
		"/grpcretry.test.v1.EchoRequest/message": levelUnknown, // a message, not a service
		"/grpcretry.test.v1.EchoService.Echo/":   levelUnknown, // a method, not a service
		"/no.such.Service/Method":                levelUnknown,
		"nonsense":                               levelUnknown,
		"//":                                     levelUnknown,
		"/":                                      levelUnknown,
		"":                                       levelUnknown,
	} {
		for range 2 { // the second is remembered
			if got := levelOf(method); got != want {
				t.Errorf("level of %q is %v, want %v", method, got, want)
			}
		}
	}
}

// Each level has its own policy, through a real server.
func TestIdempotencyLevels(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(unavailable()))
		client := server.client(t, WithBackoff(Constant(second)), WithMaxAttempts(2), WithBudget(Unlimited),
			WithIdempotencyLevel(noSideEffects, WithMaxAttempts(4)),
			WithIdempotencyLevel(idempotent, WithMaxAttempts(3)))
		client.Echo(t.Context(), request())
		client.Put(t.Context(), request())
		client.Append(t.Context(), request())
		wantTimes(t, server, 0, second, 2*second, 3*second, // Echo
			3*second, 4*second, 5*second, // Put
			5*second, 6*second) // Append
	})
}

// A level is narrower than all methods and wider than a service, whatever the order of the options.
func TestScopeOfLevels(t *testing.T) {
	level := func(n int) Option { return WithIdempotencyLevel(noSideEffects, WithMaxAttempts(n)) }
	service := WithMethod("/grpcretry.test.v1.EchoService/", WithMaxAttempts(7))
	method := WithMethod(echoMethod, WithMaxAttempts(8))
	for _, tt := range []struct {
		opts []Option
		want int
	}{
		{[]Option{level(6)}, 6},
		{[]Option{level(6), level(5)}, 5},
		{[]Option{level(6), WithMaxAttempts(2)}, 6},
		{[]Option{service, level(6)}, 7},
		{[]Option{method, service, level(6)}, 8},
		{[]Option{WithIdempotencyLevel(idempotent, WithMaxAttempts(5))}, 4},
		{[]Option{WithIdempotencyLevel(levelUnknown, WithMaxAttempts(5))}, 4},
		{[]Option{WithIdempotencyLevel(noSideEffects), WithMaxAttempts(2)}, 2},
	} {
		if got := retrierOf(t, tt.opts...).Policy(echoMethod).MaxAttempts; got != tt.want {
			t.Errorf("%v: %d attempts, want %d", tt.opts, got, tt.want)
		}
	}
	r := retrierOf(t, WithIdempotencyLevel(levelUnknown, WithMaxAttempts(9)), level(6))
	for method, want := range map[string]int{"/no.such.Service/Method": 9, "": 9, echoMethod: 6,
		"/grpcretry.test.v1.EchoService/Append": 9, "/grpcretry.test.v1.EchoService/Put": 4} {
		if got := r.Policy(method).MaxAttempts; got != want {
			t.Errorf("%s: %d attempts, want %d", method, got, want)
		}
	}
}

// A level applies to streams, too.
func TestLevelsOfStreams(t *testing.T) {
	linkStreams(t)
	bubble(t, func(t *testing.T) {
		for method, want := range map[string]int{"/leveled.Streams/Read": 3, "/leveled.Streams/Write": 2, "/leveled.Streams/Other": 1} {
			server := serveStreams(t, func(n int, stream grpc.ServerStream) error { return playServer(t, n, "fail UNAVAILABLE", stream) })
			cc := server.conn(t, DialOptions(Disable(), WithBackoff(Constant(second)),
				WithIdempotencyLevel(noSideEffects, WithMaxAttempts(3)),
				WithIdempotencyLevel(idempotent, WithMaxAttempts(2)))...)
			stream, err := cc.NewStream(t.Context(), serverStream, method)
			if err != nil {
				t.Fatal(err)
			}
			app := &application{stream: stream}
			app.play(t, "send a; close; recv UNAVAILABLE")
			if got := len(server.attempts()); got != want {
				t.Errorf("%s: %d attempts, want %d", method, got, want)
			}
		}
	})
}

// linkStreams links a proto with a service of streams.
func linkStreams(t *testing.T) {
	t.Helper()
	stream := func(name string, l level) *descriptorpb.MethodDescriptorProto {
		return &descriptorpb.MethodDescriptorProto{
			Name: &name, InputType: proto.String(".grpcretry.test.v1.EchoRequest"), OutputType: proto.String(".grpcretry.test.v1.EchoResponse"),
			ServerStreaming: proto.Bool(true), Options: &descriptorpb.MethodOptions{IdempotencyLevel: &l},
		}
	}
	file, err := protodesc.NewFile(&descriptorpb.FileDescriptorProto{
		Name: proto.String("leveled.proto"), Package: proto.String("leveled"), Syntax: proto.String("proto3"),
		Dependency: []string{(&echov1.EchoRequest{}).ProtoReflect().Descriptor().ParentFile().Path()},
		Service: []*descriptorpb.ServiceDescriptorProto{{Name: proto.String("Streams"), Method: []*descriptorpb.MethodDescriptorProto{
			stream("Read", noSideEffects), stream("Write", idempotent), stream("Other", levelUnknown)}}},
	}, protoregistry.GlobalFiles)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := protoregistry.GlobalFiles.FindFileByPath(file.Path()); err == nil {
		return // by an earlier run of the test
	}
	if err := protoregistry.GlobalFiles.RegisterFile(file); err != nil {
		t.Fatal(err)
	}
}

func TestNewRefusesBadLevels(t *testing.T) {
	for _, l := range []level{-1, 3, 1 << 30} {
		_, err := New(WithIdempotencyLevel(l, WithMaxAttempts(2)))
		wantRefused(t, err, "WithIdempotencyLevel", fmt.Sprint(int32(l)))
	}
	_, err := New(WithIdempotencyLevel(idempotent, WithMaxAttempts(0)))
	wantRefused(t, err, "WithMaxAttempts", "0 attempts", "WithIdempotencyLevel IDEMPOTENT")
	_, err = New(WithIdempotencyLevel(idempotent, nil))
	wantRefused(t, err, "WithIdempotencyLevel", "IDEMPOTENT", "nil")

	h := Hedging{Delay: HedgeAfter(time.Second)}
	_, err = New(WithIdempotencyLevel(levelUnknown, WithHedging(h)))
	wantRefused(t, err, "WithHedging", "IDEMPOTENCY_UNKNOWN", "AllMethodsAreSafe")
	for _, l := range []level{noSideEffects, idempotent} {
		if r := retrierOf(t, WithIdempotencyLevel(l, WithHedging(h))); r.Policy(echoMethod).Hedging != nil != (l == noSideEffects) {
			t.Errorf("hedging for %v shows as %v for a method with NO_SIDE_EFFECTS", l, r.Policy(echoMethod).Hedging)
		}
	}
}

// Hedging for a level reaches the methods of that level only.
func TestHedgingByLevel(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(ok().after(10*second)))
		client := server.client(t, WithIdempotencyLevel(noSideEffects,
			WithHedging(Hedging{Delay: HedgeAfter(second), Budget: Unlimited}), WithBudget(Unlimited)))
		client.Echo(t.Context(), request())
		client.Put(t.Context(), request())
		wantTimes(t, server, 0, second, 10*second)
	})
}

// A program that calls methods by names that others choose does not fill the memory.
func TestLevelsOfManyMethodsAreNotAllKept(t *testing.T) {
	var cache levelCache
	for i := range maxKnownLevels + 10 {
		cache.of(fmt.Sprintf("/many.Service/M%d", i))
	}
	if got := cache.count.Load(); got != maxKnownLevels {
		t.Errorf("%d levels are kept, want %d", got, maxKnownLevels)
	}
	if got := cache.of(echoMethod); got != noSideEffects {
		t.Errorf("level %v of a linked method, want NO_SIDE_EFFECTS", got)
	}
}

// The levels of linked methods are looked up once.
func TestLevelsAllocateNothing(t *testing.T) {
	r := retrierOf(t, WithIdempotencyLevel(noSideEffects, WithMaxAttempts(3)))
	policies := r.settings.current()
	policies.of(echoMethod)
	if got := testing.AllocsPerRun(100, func() { policies.of(echoMethod) }); got != 0 {
		t.Errorf("%v allocations, want none", got)
	}
}

// The level of a method counts from its first call on, so a proto may be registered after New, and after
// its method's policy was looked at.
func TestLevelsOfProtosThatAreRegisteredLate(t *testing.T) {
	service := fmt.Sprintf("Late%d", time.Now().UnixNano()) // for go test -count
	method := "/late.v1." + service + "/Read"
	r := retrierOf(t, WithIdempotencyLevel(idempotent, WithMaxAttempts(7)), WithMethod(method, WithCodes(codes.Aborted)))
	if n := r.Policy(method).MaxAttempts; n != 4 {
		t.Errorf("%d attempts before the proto is registered, want 4", n)
	}
	file := &descriptorpb.FileDescriptorProto{
		Name: proto.String(service + ".proto"), Package: proto.String("late.v1"), Syntax: proto.String("proto3"),
		Dependency: []string{"google/protobuf/empty.proto"},
		Service: []*descriptorpb.ServiceDescriptorProto{{Name: proto.String(service), Method: []*descriptorpb.MethodDescriptorProto{{
			Name: proto.String("Read"), InputType: proto.String(".google.protobuf.Empty"), OutputType: proto.String(".google.protobuf.Empty"),
			Options: &descriptorpb.MethodOptions{IdempotencyLevel: idempotent.Enum()},
		}}}},
	}
	linked, err := protodesc.NewFile(file, protoregistry.GlobalFiles)
	if err != nil {
		t.Fatal(err)
	}
	if err := protoregistry.GlobalFiles.RegisterFile(linked); err != nil {
		t.Fatal(err)
	}
	if n := r.Policy(method).MaxAttempts; n != 7 {
		t.Errorf("%d attempts in the policy that is shown, want 7", n)
	}
	if p, err := r.settings.current().forCall(nil, method, nil); err != nil || p.MaxAttempts != 7 {
		t.Errorf("%d attempts in a call, want 7: %v", p.MaxAttempts, err)
	}
}
