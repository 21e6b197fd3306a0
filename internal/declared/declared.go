// Package declared links the protos of methods that only tests have.
package declared

import (
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// Echo declares methods of a service, whose messages are those of the echo service, to the program.
func Echo(service string, methods ...string) {
	message := func(m proto.Message) *string {
		return proto.String("." + string(m.ProtoReflect().Descriptor().FullName()))
	}
	declared := &descriptorpb.ServiceDescriptorProto{Name: &service}
	for _, name := range methods {
		declared.Method = append(declared.Method, &descriptorpb.MethodDescriptorProto{
			Name: &name, InputType: message(new(echov1.EchoRequest)), OutputType: message(new(echov1.EchoResponse)),
		})
	}
	file, err := protodesc.NewFile(&descriptorpb.FileDescriptorProto{
		Name: proto.String("declared/" + service + ".proto"), Syntax: proto.String("proto3"),
		Dependency: []string{echov1.File_proto_echo_v1_echo_proto.Path()},
		Service:    []*descriptorpb.ServiceDescriptorProto{declared},
	}, protoregistry.GlobalFiles)
	if err == nil {
		err = protoregistry.GlobalFiles.RegisterFile(file)
	}
	if err != nil {
		panic(err) //nolint:forbidigo // a test would test something else
	}
}
