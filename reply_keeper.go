package grpcretry

import (
	"reflect"
	"slices"
)

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
