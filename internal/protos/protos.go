// Package protos looks methods up among the protos that the program links. Importing the generated code links
// them. A method is named "/pkg.Service/Method".
package protos

import (
	"slices"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"

	"github.com/grpcretry/grpcretry/internal/bounded"
	"github.com/grpcretry/grpcretry/internal/patterns"
)

// Method returns the descriptor of a method; nil if the program does not link it.
func Method(method string) protoreflect.MethodDescriptor {
	service := Service(patterns.ServiceOf(method))
	if service == nil {
		return nil
	}
	return service.Methods().ByName(nameOf(method))
}

// NewReply returns an empty reply for a call with options; nil if its type is not certain: the program does not link it, or
// a codec of its own decides.
func NewReply(method string, options []grpc.CallOption) any {
	d := Method(method)
	if d == nil || slices.ContainsFunc(options, choosesCodec) {
		return nil
	}
	reply, err := protoregistry.GlobalTypes.FindMessageByName(d.Output().FullName())
	if err != nil {
		return nil
	}
	return reply.New().Interface()
}

func choosesCodec(o grpc.CallOption) bool {
	switch o.(type) {
	case grpc.ForceCodecCallOption, grpc.ForceCodecV2CallOption, grpc.CustomCodecCallOption, grpc.ContentSubtypeCallOption:
		return true
	default:
		return false
	}
}

// nameOf returns "Method" for "/pkg.Service/Method".
func nameOf(method string) protoreflect.Name {
	return protoreflect.Name(method[len(patterns.ServiceOf(method)):])
}

// Service returns the descriptor of "/pkg.Service/"; nil if the program does not link it.
func Service(service string) protoreflect.ServiceDescriptor {
	if len(service) < 3 || service[0] != '/' {
		return nil
	}
	found, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(service[1 : len(service)-1]))
	if err != nil {
		return nil
	}
	descriptor, _ := found.(protoreflect.ServiceDescriptor)
	return descriptor
}

// Qualified returns the full name of a linked service that a name without a package may mean: "/pkg.Service/" for "/Service/".
// A linked service that has no package means itself.
func Qualified(service string) (full string, ok bool) {
	if Service(service) != nil {
		return "", false
	}
	name := protoreflect.Name(strings.Trim(service, "/"))
	protoregistry.GlobalFiles.RangeFiles(func(f protoreflect.FileDescriptor) bool {
		if s := f.Services().ByName(name); s != nil {
			full = "/" + string(s.FullName()) + "/"
		}
		return full == ""
	})
	return full, full != ""
}

// Lacks returns a method's name without the service, and whether the program links the service, but it has no such method.
func Lacks(method string) (name string, lacks bool) {
	service := Service(patterns.ServiceOf(method))
	return string(nameOf(method)), nameOf(method) != "" && service != nil && Method(method) == nil
}

// A Level is what a proto says about a method with "option idempotency_level".
type Level = descriptorpb.MethodOptions_IdempotencyLevel

// Levels is the number of levels.
const Levels = 3

// LevelOf returns a called method's level. Those that only show a level use [LookUpLevel], because a level that
// is known does not change, and a proto may be linked, or registered, only later. The levels of methods after
// [bounded.MaxNames], and of those with long names, are looked up for each call.
func LevelOf(method string) Level {
	if l, known := knownLevels.Current()[method]; known {
		return l
	}
	if len(method) > longestKnown {
		return LookUpLevel(method)
	}
	return knownLevels.Get(strings.Clone(method), bounded.MaxNames, LookUpLevel) // it may be a part of something long
}

// longestKnown limits the names that are remembered, in bytes: a server that redirects HTTP requests may choose them.
const longestKnown = 512

// knownLevels serve the whole program, because there is one registry of protos.
var knownLevels bounded.Map[string, Level]

// LookUpLevel returns a method's level as the protos have it now: IDEMPOTENCY_UNKNOWN for methods that declare
// nothing, and for those that are not linked.
func LookUpLevel(method string) Level {
	d := Method(method)
	if d == nil {
		return descriptorpb.MethodOptions_IDEMPOTENCY_UNKNOWN
	}
	options, _ := d.Options().(*descriptorpb.MethodOptions)
	if l := options.GetIdempotencyLevel(); l >= 0 && l < Levels {
		return l
	}
	return descriptorpb.MethodOptions_IDEMPOTENCY_UNKNOWN
}
