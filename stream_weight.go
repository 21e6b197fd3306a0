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

// A weighing is what keeping a message costs, and what tells it from another one.
type weighing struct {
	size  int    // the memory that the message holds, roughly; negative if it cannot tell
	print uint64 // a hash of its contents; 0 if it has none
}

// weigh returns what m counts in the queue: nothing if it is the one request of a server stream.
func (s *retryStream) weigh(m any) weighing {
	if !s.desc.ClientStreams {
		return weighing{}
	}
	switch m := m.(type) {
	case proto.Message:
		return weighMessage(m)
	case protoadapt.MessageV1:
		return weighMessage(protoadapt.MessageV2Of(m))
	case interface{ Size() int }:
		return weighing{size: slotSize + structSize(m) + m.Size()}
	default:
		return weighing{size: -1}
	}
}

const (
	slotSize  = 16 // an interface value
	entrySize = 48 // of a map, without what the key and the value refer to
)

var hashSeed = maphash.MakeSeed()

func weighMessage(m proto.Message) weighing {
	w := weighing{size: slotSize}
	w.message(m.ProtoReflect(), 1)
	return w
}

// add takes in something that the message holds beside its struct. The order does not matter,
// because the fields of a message have none.
func (w *weighing) add(size int, place, hash uint64) {
	w.size += size
	w.print += bits.RotateLeft64(hash^place*0x9e3779b97f4a7c15, int(place%63)) * 0xff51afd7ed558ccd
}

// message takes in a message, and all that it refers to; place tells where that is.
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

// value takes in a value, whose own place is counted already.
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
