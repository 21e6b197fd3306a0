package grpcretry

import (
	"context"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/dynamicpb"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

type notAPointer map[string]string

// oddCodec sends protobuf and receives into anything, or nothing.
type oddCodec struct{}

func (oddCodec) Name() string                  { return "proto" }
func (oddCodec) Marshal(v any) ([]byte, error) { return proto.Marshal(v.(proto.Message)) }
func (oddCodec) Unmarshal(b []byte, v any) error {
	switch v := v.(type) {
	case *oddReply:
		v.raw = slices.Clone(b)
		v.received++
	case *[]byte:
		*v = slices.Clone(b)
	}
	return nil
}

type oddReply struct {
	raw      []byte
	received int
}

func TestWhatCanBeHedged(t *testing.T) {
	for _, tt := range []struct {
		reply any
		want  bool
	}{
		{nil, false},
		{(*echov1.EchoResponse)(nil), false},
		{(*[]byte)(nil), false},
		{notAPointer{}, false},
		{oddReply{}, false},
		{&echov1.EchoResponse{}, true},
		{&oddReply{}, true},
		{new(any), true},
		{dynamicpb.NewMessage((&echov1.EchoResponse{}).ProtoReflect().Descriptor()), true},
	} {
		if got := canHedge(tt.reply); got != tt.want {
			t.Errorf("canHedge(%T %v) = %v, want %v", tt.reply, tt.reply, got, tt.want)
		}
	}
}

// All kinds of protobuf messages are replies: generated, without generated code, and
// those of the first version of the API, which gogo/protobuf still makes.
func TestRepliesOfAnyProtobuf(t *testing.T) {
	generated := &echov1.EchoResponse{}
	dynamic := dynamicpb.NewMessage(generated.ProtoReflect().Descriptor())
	for _, tt := range []struct {
		reply any
		text  func() string
	}{
		{generated, generated.GetMessage},
		{dynamic, func() string { return dynamic.Get(dynamic.Descriptor().Fields().ByName("message")).String() }},
		{v1, func() string { return v1.Message }},
	} {
		bubble(t, func(t *testing.T) {
			server := serve(t, script(says("a").after(time.Hour), says("b"), says("").after(time.Hour), says("")))
			cc := server.conn(t, DialOptions(hedged(Hedging{Delay: HedgeAfter(second)}))...)
			for _, want := range []string{"b", "hello"} {
				if err := cc.Invoke(t.Context(), echoMethod, request(), tt.reply); err != nil || tt.text() != want {
					t.Errorf("Invoke = %v, the hedge's answer in %T is %q, want %q", err, tt.reply, tt.text(), want)
				}
			}
		})
	}
}

// What this program does not know of a reply is part of it, also of a hedge's.
func TestAHedgesReplyIsWhole(t *testing.T) {
	bubble(t, func(t *testing.T) {
		unknown := protowire.AppendVarint(protowire.AppendTag(nil, 99, protowire.VarintType), 7)
		below := func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker,
			opts ...grpc.CallOption) error {
			err := invoker(ctx, method, req, reply, cc, opts...)
			if a, _ := AttemptFromContext(ctx); a.Number == 2 {
				reply.(proto.Message).ProtoReflect().SetUnknown(unknown)
			}
			return err
		}
		server := serve(t, script(says("a").after(time.Hour), says("b")))
		cc := server.conn(t, append(DialOptions(hedged(Hedging{Delay: HedgeAfter(second)})), grpc.WithChainUnaryInterceptor(below))...)
		reply, err := echov1.NewEchoServiceClient(cc).Echo(t.Context(), request())
		if reply.GetMessage() != "b" || !slices.Equal(reply.ProtoReflect().GetUnknown(), unknown) {
			t.Errorf("Echo = %v, %v with the unknown fields %x, want b and %x", reply, err, reply.ProtoReflect().GetUnknown(), unknown)
		}
	})
}

// What an interceptor below keeps of a hedge's reply is not the caller's.
func TestAHedgesReplyIsNotSharedWithWhatIsBelow(t *testing.T) {
	bubble(t, func(t *testing.T) {
		kept := map[int]*echov1.EchoResponse{}
		below := func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker,
			opts ...grpc.CallOption) error {
			err := invoker(ctx, method, req, reply, cc, opts...)
			a, _ := AttemptFromContext(ctx)
			kept[a.Number] = reply.(*echov1.EchoResponse) // the losers end before the winner's caller goes on
			kept[a.Number].Payload = []byte("payload")
			return err
		}
		server := serve(t, script(says("a").after(time.Hour), says("b")))
		cc := server.conn(t, append(DialOptions(hedged(Hedging{Delay: HedgeAfter(second)})), grpc.WithChainUnaryInterceptor(below))...)
		reply, err := echov1.NewEchoServiceClient(cc).Echo(t.Context(), request())
		clear(reply.GetPayload())
		if got := kept[2]; got.GetMessage() != "b" || string(got.GetPayload()) != "payload" {
			t.Errorf("Echo = %v, %v, and what was kept of the hedge's reply is %v after the caller has changed its own", reply, err, got)
		}
	})
}

var v1 = &v1Reply{Old: true}

type v1Reply struct {
	Message string `protobuf:"bytes,1,opt,name=message,proto3"`
	Payload []byte `protobuf:"bytes,2,opt,name=payload,proto3"`
	Old     bool   // not of the message: as in any reply, gone when a new one comes
}

func (m *v1Reply) Reset()         { *m = v1Reply{} }
func (m *v1Reply) String() string { return m.Message }
func (*v1Reply) ProtoMessage()    {}

// Any pointer that a codec takes can be a reply.
func TestRepliesThatAreNoMessages(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(says("a").after(time.Hour), says("b"), says("a").after(time.Hour), says("b"), says("c")))
		cc := server.conn(t, DialOptions(hedged(Hedging{Delay: HedgeAfter(second)}))...)
		want, err := proto.Marshal(&echov1.EchoResponse{Message: "b"})
		if err != nil {
			t.Fatal(err)
		}
		reply := &oddReply{raw: []byte("old"), received: 41}
		if err := cc.Invoke(t.Context(), echoMethod, request(), reply, grpc.ForceCodec(oddCodec{})); err != nil ||
			!slices.Equal(reply.raw, want) || reply.received != 1 {
			t.Errorf("Invoke = %v with reply %+v, want what the hedge received, once", err, reply)
		}
		var raw []byte
		if err := cc.Invoke(t.Context(), echoMethod, request(), &raw, grpc.ForceCodec(oddCodec{})); err != nil || !slices.Equal(raw, want) {
			t.Errorf("Invoke = %v with reply %q, want %q", err, raw, want)
		}
	})
}

// A stub makes a new reply for each call. To find out that it is empty must not take longer the more fields it has.
func TestANewReplyIsNotMeasured(t *testing.T) {
	for name, tt := range map[string]struct {
		reply *measuredReply
		want  bool // its fields are looked at
	}{
		"new":                 {&measuredReply{}, false},
		"with contents":       {&measuredReply{EchoResponse: echov1.EchoResponse{Message: "found"}}, true},
		"filled and emptied":  {emptied(), true},
		"a bit at the end":    {&measuredReply{last: true}, true},
		"no reply, but a nil": {nil, true},
	} {
		before := measured
		if got := newReply(tt.reply); tt.reply != nil && (got.found != nil) != (tt.reply.Message != "") {
			t.Errorf("%s: newReply found %v", name, got.found)
		}
		if got := measured > before; got != tt.want {
			t.Errorf("%s: looked at its fields: %v, want %v", name, got, tt.want)
		}
	}
}

var measured int // how often a measuredReply was asked for its fields

type measuredReply struct {
	echov1.EchoResponse
	_    [2000]byte
	last bool
}

func (m *measuredReply) ProtoReflect() protoreflect.Message {
	measured++
	if m == nil {
		return (*echov1.EchoResponse)(nil).ProtoReflect()
	}
	return m.EchoResponse.ProtoReflect()
}

func emptied() *measuredReply {
	m := &measuredReply{EchoResponse: echov1.EchoResponse{Message: "found"}}
	proto.Reset(&m.EchoResponse)
	m.EchoResponse.ProtoReflect()
	return m
}
