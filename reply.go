package grpcretry

import (
	"reflect"

	"google.golang.org/protobuf/proto"
)

// A reply is what the application receives into, and what that was like before the first
// attempt: codecs may add to what is there, so what a failed attempt has left must go.
type reply struct {
	message any
	found   any // a copy of the message as it was; nil if it was empty
}

// newReply is on the path of every unary call. It costs no allocation if m is empty.
func newReply(m any) reply {
	r := reply{message: m}
	if p, ok := m.(proto.Message); ok {
		if proto.Size(p) > 0 {
			r.found = proto.Clone(p)
		}
		return r
	}
	if v := reflect.ValueOf(m); v.Kind() == reflect.Pointer && !v.IsNil() && !v.Elem().IsZero() {
		found := reflect.New(v.Type().Elem())
		found.Elem().Set(v.Elem())
		r.found = found.Interface()
	}
	return r
}

// restore makes the message what it was. A message that is neither a protobuf message nor a
// pointer is left as it is; of what another one refers to, only the references are restored.
func (r reply) restore() {
	switch {
	case !canHedge(r.message):
	case isProto(r.message):
		m := r.message.(proto.Message)
		proto.Reset(m)
		if r.found != nil {
			proto.Merge(m, r.found.(proto.Message))
		}
	case r.found == nil:
		reflect.ValueOf(r.message).Elem().SetZero()
	default:
		reflect.ValueOf(r.message).Elem().Set(reflect.ValueOf(r.found).Elem())
	}
}

func isProto(m any) bool {
	_, ok := m.(proto.Message)
	return ok
}
