package grpcretry

import (
	"reflect"
	"slices"

	"google.golang.org/protobuf/proto"
)

// A reply is what the application receives into, and what that was like before the first
// attempt: codecs may add to what is there, so what a failed attempt has left must go.
type reply struct {
	message any
	found   any     // a copy of the protobuf message as it was; nil if it was empty
	kept    *keeper // of what is no protobuf message; nil if that was empty
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
	if canHedge(m) && !isEmpty(m) {
		r.kept = &keeper{}
		r.kept.keep(reflect.ValueOf(m))
	}
	return r
}

// restore makes the message what it was. A message that is neither a protobuf message nor a
// pointer is left as it is.
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

// isEmpty reports whether a reply, a pointer that is not nil, refers to a zero value.
func isEmpty(m any) bool { return reflect.ValueOf(m).Elem().IsZero() }

// A keeper remembers what a value refers to: the contents of pointers, slices and maps, and of
// those that they refer to. They are restored in place, because the application may hold them
// itself. A struct behind a pointer that has unexported fields is left as it is: it may be no data.
type keeper struct {
	undo []func()
	seen map[any]bool // pointers, which may form a circle
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

// keepTarget remembers what a pointer points to.
func (k *keeper) keepTarget(target reflect.Value) {
	was := reflect.New(target.Type()).Elem()
	was.Set(target)
	k.undo = append(k.undo, func() { target.Set(was) })
	k.follow(target)
}

// follow remembers what v refers to.
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

// followSlice also remembers what lies beyond the end if codecs may add to it when they make the
// slice longer.
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

// refers reports whether a value of the type may have contents that a codec adds to.
func refers(t reflect.Type) bool {
	switch t.Kind() {
	case reflect.Pointer, reflect.Interface, reflect.Struct, reflect.Array, reflect.Slice, reflect.Map:
		return true
	default:
		return false
	}
}
