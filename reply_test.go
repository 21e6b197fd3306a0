package grpcretry

import (
	"context"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

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
		cc := server.conn(t, append(DialOptions(hedged(2, Hedging{Delay: HedgeAfter(second)})), grpc.WithChainUnaryInterceptor(below))...)
		reply, err := echov1.NewEchoServiceClient(cc).Echo(t.Context(), request())
		if reply.GetMessage() != "b" || !slices.Equal(reply.ProtoReflect().GetUnknown(), unknown) {
			t.Errorf("Echo = %v, %v with the unknown fields %x, want b and %x", reply, err, reply.ProtoReflect().GetUnknown(), unknown)
		}
	})
}

// Any pointer that a codec takes can be a reply.
func TestRepliesThatAreNoMessages(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(says("a").after(time.Hour), says("b"), says("a").after(time.Hour), says("b"), says("c")))
		cc := server.conn(t, DialOptions(hedged(2, Hedging{Delay: HedgeAfter(second)}))...)
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
