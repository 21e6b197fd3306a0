package grpcretry

import (
	"bytes"
	"reflect"
	"unsafe"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// A reply is the message that the application receives into, and its contents before the first
// attempt. A retry starts with those: codecs may merge into a message, so the remains of a failed
// attempt must go.
type reply struct {
	message any
	found   any     // a copy of a protobuf message as it was; nil if it was empty
	kept    *keeper // remembers any other message; nil if it was empty
}

// newReply is on the path of every unary call. It allocates nothing if m is empty.
func newReply(m any) reply {
	r := reply{message: m}
	if isUntouched(m) {
		return r
	}
	if p, ok := m.(proto.Message); ok {
		if proto.Size(p) > 0 {
			r.found = proto.Clone(p)
		}
		return r
	}
	if canHedge(m) && !isEmpty(m) {
		r.kept = &keeper{}
		r.kept.keep(reflect.ValueOf(m))
	}
	return r
}

// isUntouched reports whether m points to nothing but zeros, as the new replies of generated stubs do. It
// takes a fraction of the time of proto.Size, which looks at each field; a protobuf message that is empty
// without that has been used before.
func isUntouched(m any) bool {
	v := reflect.ValueOf(m)
	if v.Kind() != reflect.Pointer || v.IsNil() {
		return false
	}
	rest := unsafe.Slice((*byte)(v.UnsafePointer()), v.Type().Elem().Size())
	for len(rest) > len(zeros) {
		if !bytes.Equal(rest[:len(zeros)], zeros[:]) {
			return false
		}
		rest = rest[len(zeros):]
	}
	return bytes.Equal(rest, zeros[:len(rest)])
}

var zeros [512]byte

// restore gives the message its first contents back. A message that is neither a protobuf message
// nor a pointer stays as it is.
func (r reply) restore() {
	switch {
	case !canHedge(r.message):
	case isProto(r.message):
		m := r.message.(proto.Message)
		proto.Reset(m)
		if r.found != nil {
			proto.Merge(m, r.found.(proto.Message))
		}
	case r.kept == nil:
		reflect.ValueOf(r.message).Elem().SetZero()
	default:
		r.kept.restore()
	}
}

func isProto(m any) bool {
	_, ok := m.(proto.Message)
	return ok
}

// A replyType makes replies like the caller's, for the further attempts of a hedged call: the
// first attempt alone receives into the caller's reply. Two kinds of replies can be made a second
// time: protobuf messages, and pointers, because every codec that unmarshals can start from their
// zero value. A replyType is made before the first attempt, which writes to the caller's reply.
type replyType struct {
	of    any // a protoreflect.MessageType or, for any other reply, a reflect.Type
	found any // a copy of a protobuf reply as it was found; nil if it was empty
}

func typeOfReply(r any) replyType {
	if m, ok := r.(proto.Message); ok {
		return replyType{m.ProtoReflect().Type(), newReply(r).found}
	}
	return replyType{of: reflect.TypeOf(r).Elem()} // a copy might share memory with the caller's
}

// make returns a reply like the caller's. A protobuf message has the contents that the first attempt
// found, any other reply is empty.
func (t replyType) make() any {
	if message, ok := t.of.(protoreflect.MessageType); ok {
		if t.found != nil {
			return proto.Clone(t.found.(proto.Message))
		}
		return message.New().Interface()
	}
	return reflect.New(t.of.(reflect.Type)).Interface()
}

// canHedge reports whether typeOfReply can make another reply like this one.
func canHedge(reply any) bool {
	v := reflect.ValueOf(reply)
	return v.Kind() == reflect.Pointer && !v.IsNil()
}

// copyReply copies a winning attempt's response into the caller's reply.
func copyReply(to, from any) {
	if m, ok := to.(proto.Message); ok {
		proto.Reset(m)
		proto.Merge(m, from.(proto.Message))
		return
	}
	reflect.ValueOf(to).Elem().Set(reflect.ValueOf(from).Elem()) // nobody else refers to its contents
}

// isEmpty reports whether a reply, a pointer that is not nil, refers to a zero value.
func isEmpty(m any) bool { return reflect.ValueOf(m).Elem().IsZero() }
