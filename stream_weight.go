package grpcretry

import (
	"hash/maphash"
	"math"
	"math/bits"
	"reflect"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// A weighing is the cost of keeping a message, and a hash to detect changes.
type weighing struct {
	size  int    // the memory that the message holds, roughly; negative if that is unknown
	print uint64 // a hash of the contents; 0 if there is none
}

// weigh returns the weighing of a message. The one request of a server stream does not count towards
// the stream's own limit, and is not compared with a later one.
func (s *retryStream) weigh(m any) weighing {
	if !s.desc.ClientStreams {
		return weighing{size: int(min(slotSize+sizeOf(m), math.MaxInt))}
	}
	switch m := m.(type) {
	case proto.Message:
		return weighMessage(m)
	case protoadapt.MessageV1:
		return weighMessage(protoadapt.MessageV2Of(m))
	case interface{ Size() int }:
		if n, ok := sizeBy(m); ok {
			return weighing{size: slotSize + structSize(m) + n}
		}
	}
	return weighing{size: -1}
}

const (
	slotSize  = 16 // an interface value
	entrySize = 48 // a map entry, without the memory that key and value refer to
)

var hashSeed = maphash.MakeSeed()

func weighMessage(m proto.Message) weighing {
	w := weighing{size: slotSize}
	w.message(m.ProtoReflect(), 1)
	return w
}

// add adds a part of a message. The order of parts does not matter, because a message's fields have
// none; place identifies the part.
func (w *weighing) add(size int, place, hash uint64) {
	w.size += size
	w.print += bits.RotateLeft64(hash^place*0x9e3779b97f4a7c15, int(place%63)) * 0xff51afd7ed558ccd
}

// message adds a message, and everything that it refers to.
func (w *weighing) message(m protoreflect.Message, place uint64) {
	w.add(structSize(m.Interface())+len(m.GetUnknown()), place, maphash.Bytes(hashSeed, m.GetUnknown()))
	m.Range(func(field protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		place := place*31 + uint64(field.Number())
		switch {
		case field.IsList():
			for i, list := 0, v.List(); i < list.Len(); i++ {
				w.size += slotSize
				w.value(field, list.Get(i), place*31+uint64(i))
			}
		case field.IsMap():
			v.Map().Range(func(key protoreflect.MapKey, value protoreflect.Value) bool {
				w.size += entrySize
				place := place*31 + maphash.String(hashSeed, key.String())
				w.value(field.MapKey(), key.Value(), place)
				w.value(field.MapValue(), value, place)
				return true
			})
		default:
			w.value(field, v, place)
		}
		return true
	})
}

// value adds the memory that a value refers to; the value's own slot is counted already.
func (w *weighing) value(field protoreflect.FieldDescriptor, v protoreflect.Value, place uint64) {
	switch field.Kind() {
	case protoreflect.MessageKind, protoreflect.GroupKind:
		w.message(v.Message(), place)
	case protoreflect.BytesKind:
		w.add(len(v.Bytes()), place, maphash.Bytes(hashSeed, v.Bytes()))
	case protoreflect.StringKind:
		w.add(len(v.String()), place, maphash.String(hashSeed, v.String()))
	default:
		w.add(0, place, scalar(field, v))
	}
}

func scalar(field protoreflect.FieldDescriptor, v protoreflect.Value) uint64 {
	switch field.Kind() {
	case protoreflect.BoolKind:
		if v.Bool() {
			return 1
		}
		return 0
	case protoreflect.EnumKind:
		return uint64(v.Enum())
	case protoreflect.FloatKind, protoreflect.DoubleKind:
		return math.Float64bits(v.Float())
	case protoreflect.Uint32Kind, protoreflect.Uint64Kind, protoreflect.Fixed32Kind, protoreflect.Fixed64Kind:
		return v.Uint()
	default:
		return uint64(v.Int())
	}
}

func structSize(m any) int {
	t := reflect.TypeOf(m)
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	return int(t.Size())
}
