package grpcretry

import (
	"context"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
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

// A message that the application has filled is emptied at the first retry. Without one, it stays as with plain gRPC.
func TestAMessageThatWasFilledBefore(t *testing.T) {
	for _, tt := range []struct {
		name    string
		opt     Option
		scripts []string
		want    string
	}{
		{"an end", WithMaxAttempts(2), []string{"recv hello"}, "old"},
		{"a failure", WithMaxAttempts(2), []string{"recv hello; fail NOT_FOUND"}, "old"},
		{"a dry run", WithDryRun(true), []string{"recv hello; fail UNAVAILABLE"}, "old"},
		{"a retry", WithMaxAttempts(2), []string{"recv hello; fail UNAVAILABLE", "recv hello"}, ""},
		{"a retry that fails", WithMaxAttempts(2), []string{"recv hello; fail UNAVAILABLE", "recv hello; fail UNAVAILABLE"}, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				cc := serveScripts(t, tt.scripts...).conn(t, DialOptions(tt.opt, WithBackoff(Constant(0)))...)
				stream, err := cc.NewStream(t.Context(), bidiStream, anyMethod)
				if err != nil {
					t.Fatal(err)
				}
				if err := stream.SendMsg(request()); err != nil {
					t.Fatal(err)
				}
				m := &echov1.EchoResponse{Message: "old"}
				if err := stream.RecvMsg(m); err == nil || m.GetMessage() != tt.want {
					t.Errorf("RecvMsg = %v with %q, want %q", err, m.GetMessage(), tt.want)
				}
			})
		})
	}
}

// After a retry, a unary call that fails returns nothing of its attempts, with a contest, too.
func TestTheReplyOfARetriedCallThatFails(t *testing.T) {
	for name, opt := range map[string]Option{
		"attempt timeout": WithAttemptTimeout(time.Minute),
		"hedged":          hedged(2, Hedging{Delay: HedgeAfter(second)}),
	} {
		t.Run(name, func(t *testing.T) {
			reply := &echov1.EchoResponse{}
			err := UnaryClientInterceptor(opt, WithMaxAttempts(2), WithBackoff(Constant(0)))(t.Context(), echoMethod, request(), reply, nil,
				func(_ context.Context, _ string, _, reply any, _ *grpc.ClientConn, _ ...grpc.CallOption) error {
					reply.(*echov1.EchoResponse).Message = "left"
					return errUnavailable
				})
			wantStop(t, err, codes.Unavailable, ErrAttemptsExhausted, 2)
			if reply.GetMessage() != "" {
				t.Errorf("the reply is %q, want nothing", reply.GetMessage())
			}
		})
	}
}

// Nothing of the first attempt stays if the second cannot be opened.
func TestTheResponseOfAnAttemptBeforeOneThatCannotBeOpened(t *testing.T) {
	for _, kind := range []callKind{{"client stream", clientStream}, {"bidi stream", bidiStream}} {
		t.Run(kind.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				denies := belowStream(func(ctx context.Context, next streamOpener) (grpc.ClientStream, error) {
					if a, _ := AttemptFromContext(ctx); a.Number > 1 {
						return nil, status.Error(codes.PermissionDenied, "no")
					}
					return next(ctx)
				})
				merging := below(func(stream grpc.ClientStream) grpc.ClientStream { return fillingStream{stream} })
				cc := serveScripts(t, "recv hello; fail UNAVAILABLE").conn(t, append(DialOptions(WithBackoff(Constant(0))), denies, merging)...)
				stream, err := cc.NewStream(t.Context(), kind.desc, anyMethod)
				if err != nil {
					t.Fatal(err)
				}
				if err := stream.SendMsg(request()); err != nil {
					t.Fatal(err)
				}
				m := &echov1.EchoResponse{}
				if err := stream.RecvMsg(m); status.Code(err) != codes.PermissionDenied || m.GetMessage() != "" {
					t.Errorf("RecvMsg = %v with %q, want PERMISSION_DENIED, and nothing", err, m.GetMessage())
				}
			})
		})
	}
}

// A fillingStream leaves something in a message that it fails to receive.
type fillingStream struct{ grpc.ClientStream }

func (s fillingStream) RecvMsg(m any) error {
	m.(*echov1.EchoResponse).Message = "left"
	return s.ClientStream.RecvMsg(m)
}
