// Package replies empties, makes and copies the messages that an application receives into, whatever codec it uses.
package replies

import (
	"cmp"
	"reflect"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// Empty empties the message that the application receives into, before another attempt does:
// codecs may merge into a message, so the remains of a failed attempt must go. A message that is
// no protobuf message, pointer or map stays as it is.
func Empty(m any) {
	if v := reflect.ValueOf(m); v.Kind() == reflect.Map {
		v.Clear()
	}
	if !IsPointer(m) {
		return
	}
	switch m := m.(type) {
	case proto.Message:
		proto.Reset(m)
	case protoadapt.MessageV1:
		m.Reset() // its zero value need not be a message of the same type
	default:
		reflect.ValueOf(m).Elem().SetZero()
	}
}

// IsPointer reports whether m points to something, so that [TypeOf] can make another message like it.
func IsPointer(m any) bool {
	v := reflect.ValueOf(m)
	return v.Kind() == reflect.Pointer && !v.IsNil()
}

// A Type makes empty replies of the type of the caller's, for the further attempts of a hedged
// call: the first attempt alone receives into the caller's reply. Two kinds of replies can be made a
// second time: protobuf messages, and pointers, because every codec that unmarshals can start from
// their zero value.
type Type struct {
	of any // a protoreflect.MessageType or, for any other reply, a reflect.Type
}

// TypeOf returns the type of a reply, which is a pointer. It is called before the first attempt, which writes
// to the reply.
func TypeOf(reply any) Type {
	if m, ok := reply.(proto.Message); ok {
		return Type{m.ProtoReflect().Type()}
	}
	return Type{reflect.TypeOf(reply).Elem()}
}

// New returns an empty reply.
func (t Type) New() any {
	if message, ok := t.of.(protoreflect.MessageType); ok {
		return message.New().Interface()
	}
	return reflect.New(t.of.(reflect.Type)).Interface()
}

// Hand is Copy for a reply that may be of another Go type for the same message.
func Hand(reply, response any) error {
	if reflect.TypeOf(reply) == reflect.TypeOf(response) {
		Copy(reply, response)
		return nil
	}
	from, isMessage := asMessage(response)
	to, wantsMessage := asMessage(reply)
	if !isMessage || !wantsMessage {
		return status.Errorf(codes.Internal, "grpcretry: a message was received ahead as %T, which is no %T", response, reply)
	}
	encoded, err := proto.Marshal(from)
	if err = cmp.Or(err, proto.Unmarshal(encoded, to)); err != nil {
		return status.Errorf(codes.Internal, "grpcretry: a message was received ahead as %T, and cannot be given as %T: %v", response, reply, err)
	}
	return nil
}

// Copy copies a response into the caller's reply, which has the same type. Nobody may use the response after
// that, because the reply may refer to its contents.
func Copy(reply, response any) {
	if m, ok := reply.(proto.Message); ok {
		proto.Reset(m)
		proto.Merge(m, response.(proto.Message))
		return
	}
	reflect.ValueOf(reply).Elem().Set(reflect.ValueOf(response).Elem())
}

// asMessage returns a protobuf message of either API.
func asMessage(v any) (m proto.Message, is bool) {
	switch m := v.(type) {
	case proto.Message:
		return m, true
	case protoadapt.MessageV1:
		return protoadapt.MessageV2Of(m), true
	default:
		return nil, false
	}
}
