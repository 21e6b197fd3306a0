package grpcretry

import (
	"context"
	"encoding/json"
	"reflect"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// A basket is a reply of appendingCodec.
type basket struct {
	Items []int
	Note  string
}

// appendingCodec adds to what a reply holds, as vtprotobuf's UnmarshalVT does and as protobuf
// messages are defined to be merged.
type appendingCodec struct{}

func (appendingCodec) Name() string                  { return "proto" }
func (appendingCodec) Marshal(v any) ([]byte, error) { return json.Marshal(v) }
func (appendingCodec) Unmarshal(data []byte, v any) error {
	if m, ok := v.(proto.Message); ok {
		return proto.UnmarshalOptions{Merge: true}.Unmarshal(data, m)
	}
	var received basket
	if err := json.Unmarshal(data, &received); err != nil {
		return err
	}
	into := v.(*basket)
	into.Items = append(into.Items, received.Items...)
	if received.Note != "" {
		into.Note = received.Note
	}
	return nil
}

// serveBroken serves replies of appendingCodec. The connection of the first attempts breaks
// after the reply has arrived and before the status has.
func serveBroken(t *testing.T, broken int, reply func(n int) any) (cc *grpc.ClientConn) {
	var network cable
	var f *fixture
	f = serve(t, nil, grpc.ForceServerCodec(appendingCodec{}), grpc.UnknownServiceHandler(func(_ any, stream grpc.ServerStream) error {
		n := f.note(stream.Context(), "")
		if err := stream.RecvMsg(&basket{}); err != nil {
			return err
		}
		if err := stream.SendMsg(reply(n)); err != nil {
			return err
		}
		if n <= broken {
			time.Sleep(second / 2)
			network.cut()
		}
		return nil
	}))
	return f.conn(t, append(DialOptions(steady), network.to(f))...)
}

const brokenMethod = "/pkg.Service/Broken"

// A reply that the caller has filled is emptied, too.
func TestEveryRetryStartsWithAnEmptyReply(t *testing.T) {
	three := func(n int) any {
		if n == 1 {
			return basket{[]int{1, 2, 3}, "of attempt 1"}
		}
		return basket{Items: []int{1, 2, 3}}
	}
	for _, tt := range []struct {
		name  string
		found basket
		opts  []grpc.CallOption
	}{
		{"empty", basket{}, nil},
		{"not empty", basket{[]int{0}, "the application's"}, nil},
		{"with an attempt timeout", basket{[]int{0}, "the application's"}, []grpc.CallOption{WithAttemptTimeout(time.Minute)}},
		{"hedged", basket{[]int{0}, "the application's"}, []grpc.CallOption{
			WithHedging(Hedging{Delay: HedgeAfter(time.Minute), AllMethodsAreSafe: true})}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				cc, got := serveBroken(t, 2, three), tt.found
				if err := cc.Invoke(t.Context(), brokenMethod, &basket{}, &got, append(tt.opts, grpc.ForceCodec(appendingCodec{}))...); err != nil {
					t.Fatal(err)
				}
				if want := (basket{Items: []int{1, 2, 3}}); !reflect.DeepEqual(got, want) {
					t.Errorf("reply is %+v, want %+v", got, want)
				}
			})
		})
	}
}

// The first version of the protobuf API has messages whose zero value is no message, such as those that
// know their type by a descriptor.
func TestEveryRetryResetsAReplyThatCanDoSo(t *testing.T) {
	reply := &describedReply{descriptor: "echo.v1.EchoResponse"}
	err := UnaryClientInterceptor(WithBackoff(Constant(0)))(t.Context(), brokenMethod, nil, reply, nil,
		func(ctx context.Context, _ string, _, reply any, _ *grpc.ClientConn, _ ...grpc.CallOption) error {
			reply.(*describedReply).fields = append(reply.(*describedReply).fields, "received")
			return failOnce(ctx, "", nil, nil, nil)
		})
	if err != nil || len(reply.fields) != 1 || reply.descriptor == "" {
		t.Errorf("reply is %+v, %v, want its type and one field", reply, err)
	}
}

type describedReply struct {
	descriptor string
	fields     []string
}

func (m *describedReply) Reset()         { m.fields = nil }
func (m *describedReply) String() string { return m.descriptor }
func (*describedReply) ProtoMessage()    {}

// As with plain gRPC, a call that fails on its first attempt leaves what that has received. One that was retried leaves nothing.
func TestTheReplyOfAFailedCall(t *testing.T) {
	for _, tt := range []struct {
		name string
		opts []Option
		want []int
	}{
		{"retried", []Option{WithMaxAttempts(3), WithBackoff(Constant(0))}, nil},
		{"not retried", []Option{WithCodes(codes.Aborted)}, []int{0, 1}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				reply := &basket{Items: []int{0}}
				err := UnaryClientInterceptor(tt.opts...)(t.Context(), brokenMethod, nil, reply, nil,
					func(ctx context.Context, _ string, _, reply any, _ *grpc.ClientConn, _ ...grpc.CallOption) error {
						a, _ := AttemptFromContext(ctx)
						into := reply.(*basket)
						into.Items = append(into.Items, a.Number)
						return errUnavailable
					})
				if status.Code(err) != codes.Unavailable || !slices.Equal(reply.Items, tt.want) {
					t.Errorf("reply is %+v, %v, want %v", reply, err, tt.want)
				}
			})
		})
	}
}
