package replies

import (
	"reflect"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/dynamicpb"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// A basket is a reply of some other codec.
type basket struct {
	items []int
	note  string
}

// An oldMessage is a protobuf message of the first API, whose zero value is not empty.
type oldMessage struct{ text string }

func (m *oldMessage) Reset()       { *m = oldMessage{"empty"} }
func (*oldMessage) String() string { return "" }
func (*oldMessage) ProtoMessage()  {}

// A v1Response is an EchoResponse of the first API.
type v1Response struct {
	Message string `protobuf:"bytes,1,opt,name=message,proto3"`
}

func (m *v1Response) Reset()         { *m = v1Response{} }
func (m *v1Response) String() string { return m.Message }
func (*v1Response) ProtoMessage()    {}

type notAPointer map[string]string

func dynamic(text string) *dynamicpb.Message {
	descriptor := (&echov1.EchoResponse{}).ProtoReflect().Descriptor()
	m := dynamicpb.NewMessage(descriptor)
	if text != "" {
		proto.Merge(m, &echov1.EchoResponse{Message: text})
	}
	return m
}

func TestIsPointer(t *testing.T) {
	for _, tt := range []struct {
		reply any
		want  bool
	}{
		{nil, false},
		{(*echov1.EchoResponse)(nil), false},
		{(*[]byte)(nil), false},
		{notAPointer{}, false},
		{basket{}, false},
		{&echov1.EchoResponse{}, true},
		{&basket{}, true},
		{new(any), true},
		{dynamic(""), true},
	} {
		if got := IsPointer(tt.reply); got != tt.want {
			t.Errorf("IsPointer(%T %v) = %v, want %v", tt.reply, tt.reply, got, tt.want)
		}
	}
}

func TestEmpty(t *testing.T) {
	text := []byte("x")
	for _, tt := range []struct{ m, want any }{
		{&echov1.EchoResponse{Message: "x"}, &echov1.EchoResponse{}},
		{dynamic("x"), dynamic("")},
		{&oldMessage{"x"}, &oldMessage{"empty"}},
		{&basket{[]int{1}, "x"}, &basket{}},
		{&text, new([]byte)},
		{notAPointer{"k": "v"}, notAPointer{}},
		{notAPointer(nil), notAPointer(nil)},
		{basket{nil, "x"}, basket{nil, "x"}},
		{(*basket)(nil), (*basket)(nil)},
		{nil, nil},
	} {
		Empty(tt.m)
		wantSame(t, "Empty", tt.m, tt.want)
	}
}

func TestNewRepliesOfAType(t *testing.T) {
	text := []byte("x")
	for _, tt := range []struct{ reply, want any }{
		{&echov1.EchoResponse{Message: "x"}, &echov1.EchoResponse{}},
		{dynamic("x"), dynamic("")},
		{&basket{[]int{1}, "x"}, &basket{}},
		{&text, new([]byte)},
	} {
		of := TypeOf(tt.reply)
		first, second := of.New(), of.New()
		wantSame(t, "New", first, tt.want)
		if first == second || first == tt.reply {
			t.Errorf("New returned the same %T twice", first)
		}
	}
}

func TestCopy(t *testing.T) {
	unknown := &echov1.EchoResponse{Message: "b"}
	unknown.ProtoReflect().SetUnknown([]byte{0x98, 0x06, 0x07})
	old, raw := []byte("old"), []byte("b")
	for _, tt := range []struct{ reply, response any }{
		{&echov1.EchoResponse{Message: "a"}, unknown},
		{&echov1.EchoResponse{Message: "a"}, &echov1.EchoResponse{}},
		{dynamic("a"), dynamic("b")},
		{&basket{[]int{1, 2}, "a"}, &basket{[]int{3}, ""}},
		{&old, &raw},
	} {
		Copy(tt.reply, tt.response)
		wantSame(t, "Copy", tt.reply, tt.response)
	}
}

func wantSame(t *testing.T, what string, got, want any) {
	t.Helper()
	if m, ok := got.(proto.Message); ok && IsPointer(got) {
		if w := want.(proto.Message); !proto.Equal(m, w) || string(m.ProtoReflect().GetUnknown()) != string(w.ProtoReflect().GetUnknown()) {
			t.Errorf("%s of %T = %v, want %v", what, got, got, want)
		}
	} else if !reflect.DeepEqual(got, want) {
		t.Errorf("%s of %T = %v, want %v", what, got, got, want)
	}
}

// A response of another type of the same message is handed over as well; one of anything else is an error.
func TestHand(t *testing.T) {
	response := &echov1.EchoResponse{Message: "new"}
	same, other, old := &echov1.EchoResponse{Message: "old"}, dynamic("old"), &basket{note: "old"}
	if err := Hand(same, proto.Clone(response)); err != nil || !proto.Equal(same, response) {
		t.Errorf("%v, %v, want %v", same, err, response)
	}
	if err := Hand(other, proto.Clone(response)); err != nil || !proto.Equal(other, dynamic("new")) {
		t.Errorf("%v, %v, want %v", other, err, response)
	}
	if v1 := new(v1Response); Hand(v1, proto.Clone(response)) != nil || v1.Message != "new" {
		t.Errorf("%v, want %v", v1, response)
	}
	if err := Hand(old, proto.Clone(response)); status.Code(err) != codes.Internal || old.note != "old" {
		t.Errorf("%+v, %v, want an error, and nothing in the reply", old, err)
	}
}
