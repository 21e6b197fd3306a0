package grpcretry

import (
	"reflect"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// weight is what m counts in the queue: the memory that it holds, roughly; 0 for the one
// request of a server stream, negative if m cannot tell.
func (s *retryStream) weight(m any) int {
	if !s.desc.ClientStreams {
		return 0
	}
	switch m := m.(type) {
	case proto.Message:
		return slotSize + memoryOf(m.ProtoReflect())
	case protoadapt.MessageV1:
		return slotSize + memoryOf(protoadapt.MessageV2Of(m).ProtoReflect())
	case interface{ Size() int }:
		return slotSize + structSize(m) + m.Size()
	default:
		return -1
	}
}

const (
	slotSize  = 16 // an interface value
	entrySize = 48 // of a map, without what the key and the value refer to
)

// memoryOf is about what a message holds: its struct, and all that this refers to.
func memoryOf(m protoreflect.Message) int {
	size := structSize(m.Interface()) + len(m.GetUnknown())
	m.Range(func(field protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case field.IsList():
			for i, list := 0, v.List(); i < list.Len(); i++ {
				size += slotSize + referred(field, list.Get(i))
			}
		case field.IsMap():
			v.Map().Range(func(key protoreflect.MapKey, value protoreflect.Value) bool {
				size += entrySize + referred(field.MapKey(), key.Value()) + referred(field.MapValue(), value)
				return true
			})
		default:
			size += referred(field, v)
		}
		return true
	})
	return size
}

// referred is what a value holds beside the place where it is stored.
func referred(field protoreflect.FieldDescriptor, v protoreflect.Value) int {
	switch field.Kind() {
	case protoreflect.MessageKind, protoreflect.GroupKind:
		return memoryOf(v.Message())
	case protoreflect.BytesKind:
		return len(v.Bytes())
	case protoreflect.StringKind:
		return len(v.String())
	default:
		return 0
	}
}

func structSize(m any) int {
	t := reflect.TypeOf(m)
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	return int(t.Size())
}
