package grpcretry

import (
	"context"
	"encoding/json"
	"errors"
	"reflect"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
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

func TestEveryRetryStartsWithTheReplyAsItWas(t *testing.T) {
	three := func(n int) any {
		if n == 1 {
			return basket{[]int{1, 2, 3}, "of attempt 1"}
		}
		return basket{Items: []int{1, 2, 3}}
	}
	for _, tt := range []struct {
		name        string
		found, want basket
	}{
		{"empty", basket{}, basket{Items: []int{1, 2, 3}}},
		{"not empty", basket{[]int{0}, "the application's"}, basket{[]int{0, 1, 2, 3}, "the application's"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				cc, got := serveBroken(t, 2, three), tt.found
				if err := cc.Invoke(t.Context(), brokenMethod, &basket{}, &got, grpc.ForceCodec(appendingCodec{})); err != nil {
					t.Fatal(err)
				}
				if !reflect.DeepEqual(got, tt.want) {
					t.Errorf("reply is %+v, want %+v", got, tt.want)
				}
			})
		})
	}
}

func TestEveryRetryStartsWithTheProtobufReplyAsItWas(t *testing.T) {
	for _, tt := range []struct {
		name        string
		found, want *echov1.EchoResponse
	}{
		{"empty", &echov1.EchoResponse{}, &echov1.EchoResponse{Message: "2"}},
		{"not empty", &echov1.EchoResponse{Payload: []byte("mine")}, &echov1.EchoResponse{Message: "2", Payload: []byte("mine")}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			reply := proto.Clone(tt.found).(*echov1.EchoResponse)
			intercept := UnaryClientInterceptor(WithBackoff(Constant(0)))
			err := intercept(t.Context(), brokenMethod, nil, reply, nil, func(ctx context.Context, _ string, _, reply any, _ *grpc.ClientConn, _ ...grpc.CallOption) error {
				if a, _ := AttemptFromContext(ctx); a.Number == 1 {
					proto.Merge(reply.(proto.Message), &echov1.EchoResponse{Message: "1", Payload: []byte("1"), Sequence: 1})
					return errUnavailable
				}
				proto.Merge(reply.(proto.Message), &echov1.EchoResponse{Message: "2"})
				return nil
			})
			if err != nil || !proto.Equal(reply, tt.want) {
				t.Errorf("reply is %v, %v, want %v", reply, err, tt.want)
			}
		})
	}
}

// As with plain gRPC, a call that fails leaves what the attempt has received whose failure it
// returns, and nothing of those before.
func TestTheReplyOfAFailedCallHasNothingOfEarlierAttempts(t *testing.T) {
	for _, tt := range []struct {
		name string
		opts []Option
		want []int
	}{
		{"retried", []Option{WithMaxAttempts(3), WithBackoff(Constant(0))}, []int{0, 3}},
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

func TestAReplyThatCannotBeKeptIsLeftAlone(t *testing.T) {
	intercept := UnaryClientInterceptor(WithBackoff(Constant(0)))
	for _, reply := range []any{nil, (*basket)(nil), (*echov1.EchoResponse)(nil), basket{}, map[string]string{"k": "v"}} {
		seen := []any{}
		err := intercept(t.Context(), brokenMethod, nil, reply, nil, func(ctx context.Context, _ string, _, reply any, _ *grpc.ClientConn, _ ...grpc.CallOption) error {
			seen = append(seen, reply)
			return failOnce(ctx, "", nil, nil, nil)
		})
		if err != nil || !reflect.DeepEqual(seen, slices.Repeat([]any{reply}, 2)) {
			t.Errorf("attempts receive into %v, %v, want %v", seen, err, reply)
		}
	}
}

// A reply that is empty, as those of generated stubs are, is not copied.
func TestAnEmptyReplyCostsNothing(t *testing.T) {
	intercept := UnaryClientInterceptor()
	for _, reply := range []any{&echov1.EchoResponse{}, &basket{}} {
		got := testing.AllocsPerRun(1000, func() {
			if err := intercept(t.Context(), brokenMethod, nil, reply, nil, succeed, stubOptions...); err != nil {
				t.Fatal(err)
			}
		})
		if got > 1 {
			t.Errorf("%T: %v allocations, want at most 1", reply, got)
		}
	}
}

type nested struct {
	Map   map[string]int
	List  []map[string]int
	To    *nested
	Any   any
	Array [1]map[string]int
}

// What a reply refers to is restored as well, in place: the application may hold that itself.
func TestEveryRetryStartsWithWhatTheReplyRefersTo(t *testing.T) {
	held := &nested{Map: map[string]int{"mine": 1}}
	circle := &nested{Map: map[string]int{}}
	circle.To = circle
	for _, tt := range []struct {
		name        string
		reply       any
		first, last string
		want        string
	}{
		{"a map", &map[string]int{}, `{"a":1}`, `{"b":2}`, `{"b":2}`},
		{"a map in it", &nested{Map: map[string]int{"mine": 1}}, `{"Map":{"a":1,"mine":2}}`, `{"Map":{"b":2}}`,
			`{"Map":{"b":2,"mine":1},"List":null,"To":null,"Any":null,"Array":[null]}`},
		{"elements", &[]int{7, 8, 9}, `[1]`, `null`, `null`},
		{"elements of a list that is used again", &nested{List: make([]map[string]int, 0, 1)}, `{"List":[{"a":1}]}`, `{"List":[{"b":2}]}`,
			`{"Map":null,"List":[{"b":2}],"To":null,"Any":null,"Array":[null]}`},
		{"what a pointer points to", &nested{To: held}, `{"To":{"Map":{"a":1}}}`, `{"To":{"Map":{"b":2}}}`,
			`{"Map":null,"List":null,"To":{"Map":{"b":2,"mine":1},"List":null,"To":null,"Any":null,"Array":[null]},"Any":null,"Array":[null]}`},
		{"what an interface holds", &nested{Any: &map[string]int{}}, `{"Any":{"a":1}}`, `{"Any":{"b":2}}`,
			`{"Map":null,"List":null,"To":null,"Any":{"b":2},"Array":[null]}`},
		{"an array", &nested{Array: [1]map[string]int{{}}}, `{"Array":[{"a":1}]}`, `{"Array":[{"b":2}]}`,
			`{"Map":null,"List":null,"To":null,"Any":null,"Array":[{"b":2}]}`},
		{"a circle", &struct{ To any }{circle}, `{"To":{"Map":{"a":1}}}`, `{}`, ``},
	} {
		t.Run(tt.name, func(t *testing.T) {
			err := UnaryClientInterceptor(WithBackoff(Constant(0)))(t.Context(), brokenMethod, nil, tt.reply, nil,
				func(ctx context.Context, _ string, _, reply any, _ *grpc.ClientConn, _ ...grpc.CallOption) error {
					if a, _ := AttemptFromContext(ctx); a.Number == 1 {
						return errors.Join(errUnavailable, json.Unmarshal([]byte(tt.first), reply))
					}
					return json.Unmarshal([]byte(tt.last), reply)
				})
			if err != nil {
				t.Fatal(err)
			}
			if tt.want == "" {
				return // JSON has no circles
			}
			if got, err := json.Marshal(tt.reply); err != nil || string(got) != tt.want {
				t.Errorf("reply is %s, %v, want %s", got, err, tt.want)
			}
		})
	}
	if held.Map["b"] != 2 || len(held.Map) != 2 {
		t.Errorf("the application holds %v, want what the last attempt has received", held.Map)
	}
	if len(circle.Map) != 0 {
		t.Errorf("the circle has %v of the first attempt", circle.Map)
	}
}
