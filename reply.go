package grpcretry

import (
	"reflect"
	"slices"

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

// A keeper remembers the contents of all pointers, slices and maps that can be reached from a value.
// They are restored in place, because the application may hold them itself. A struct behind a
// pointer stays as it is if it has unexported fields, because it may be something other than data.
type keeper struct {
	undo []func()
	seen map[any]bool // the pointers so far, because they may form a circle
}

// keep remembers a pointer that is not nil.
func (k *keeper) keep(pointer reflect.Value) {
	k.seen = map[any]bool{pointer.Interface(): true}
	k.keepTarget(pointer.Elem())
}

func (k *keeper) restore() {
	for _, undo := range k.undo {
		undo()
	}
}

// keepTarget remembers a pointer's target.
func (k *keeper) keepTarget(target reflect.Value) {
	was := reflect.New(target.Type()).Elem()
	was.Set(target)
	k.undo = append(k.undo, func() { target.Set(was) })
	k.follow(target)
}

// follow remembers everything that a value refers to.
func (k *keeper) follow(v reflect.Value) {
	switch v.Kind() {
	case reflect.Pointer:
		k.followPointer(v)
	case reflect.Interface:
		k.follow(v.Elem())
	case reflect.Struct:
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				k.follow(v.Field(i))
			}
		}
	case reflect.Array:
		k.followElements(v)
	case reflect.Slice:
		k.followSlice(v)
	case reflect.Map:
		k.followMap(reflect.ValueOf(v.Interface())) // the map, rather than the variable that holds it
	}
}

func (k *keeper) followPointer(v reflect.Value) {
	pointer := v.Interface()
	switch {
	case v.IsNil() || k.seen[pointer]:
		return
	case isProto(pointer):
		k.undo = append(k.undo, newReply(pointer).restore)
	case hasUnexported(v.Type().Elem()):
		return
	default:
		k.seen[pointer] = true
		k.keepTarget(v.Elem())
	}
}

// followSlice also remembers the elements beyond the end, up to the capacity, if a codec that makes
// the slice longer may merge into them.
func (k *keeper) followSlice(v reflect.Value) {
	end := v.Len()
	if refers(v.Type().Elem()) {
		end = v.Cap()
	}
	if end == 0 {
		return
	}
	v = v.Slice(0, end)
	was := reflect.MakeSlice(v.Type(), end, end)
	reflect.Copy(was, v)
	k.undo = append(k.undo, func() { reflect.Copy(v, was) })
	k.followElements(v)
}

func (k *keeper) followElements(v reflect.Value) {
	if !refers(v.Type().Elem()) {
		return
	}
	for i := range v.Len() {
		k.follow(v.Index(i))
	}
}

func (k *keeper) followMap(v reflect.Value) {
	if v.IsNil() {
		return
	}
	was := reflect.MakeMapWithSize(v.Type(), v.Len())
	for entries := v.MapRange(); entries.Next(); {
		was.SetMapIndex(entries.Key(), entries.Value())
		k.follow(entries.Value())
	}
	k.undo = append(k.undo, func() {
		v.Clear()
		for entries := was.MapRange(); entries.Next(); {
			v.SetMapIndex(entries.Key(), entries.Value())
		}
	})
}

func hasUnexported(t reflect.Type) bool {
	return t.Kind() == reflect.Struct && slices.ContainsFunc(reflect.VisibleFields(t), func(f reflect.StructField) bool {
		return !f.IsExported()
	})
}

// refers reports whether a value of the type may have contents that a codec merges into.
func refers(t reflect.Type) bool {
	switch t.Kind() {
	case reflect.Pointer, reflect.Interface, reflect.Struct, reflect.Array, reflect.Slice, reflect.Map:
		return true
	default:
		return false
	}
}
