package grpcretry

import (
	"fmt"
	"slices"
	"sync"
	"sync/atomic"

	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"
)

// WithIdempotencyLevel applies opts to all methods whose proto declares the level l, with
// "option idempotency_level". Streams are included. The level is looked up on a method's first
// call, among the protos that are linked into the program: importing the generated code links
// them. IDEMPOTENCY_UNKNOWN stands for methods that declare nothing, and for those that are not
// linked.
//
// The scope is narrower than all methods and wider than a service: an option for the level wins over
// one for all methods, and one from [WithMethod] wins over both. [New] rejects other levels, nil
// options, and [WithHedging] for IDEMPOTENCY_UNKNOWN without AllMethodsAreSafe. A second
// WithIdempotencyLevel with the same level adds its options after those of the first.
func WithIdempotencyLevel(l descriptorpb.MethodOptions_IdempotencyLevel, opts ...CallOption) Option {
	opts = slices.Clone(opts)
	return configOption(func(c *config) {
		if l < 0 || l >= levels {
			c.reject(fmt.Errorf("grpcretry: WithIdempotencyLevel: level %d, want IDEMPOTENCY_UNKNOWN, NO_SIDE_EFFECTS or IDEMPOTENT", l))
			return
		}
		c.policies.addForLevel(level(l), c.narrower("WithIdempotencyLevel "+l.String(), opts), c.update)
	})
}

// A level is an idempotency level as the protos have it.
type level = descriptorpb.MethodOptions_IdempotencyLevel

const (
	levelUnknown = descriptorpb.MethodOptions_IDEMPOTENCY_UNKNOWN
	levels       = 3 // the number of levels
)

// levelOf returns a called method's level, for "/pkg.Service/Method". Others use lookUpLevel, because
// a level that is known does not change, and a proto may be linked, or registered, only after New.
func levelOf(method string) level { return knownLevels.of(method) }

// knownLevels serve all Retriers, because there is one registry of protos.
var knownLevels levelCache

// A levelCache holds the levels that were looked up.
type levelCache struct {
	byMethod sync.Map // string → level
	count    atomic.Int64
}

// maxKnownLevels bounds the memory of a program that calls methods by names that others choose. The
// levels of further methods are looked up for each call.
const maxKnownLevels = 10_000

func (c *levelCache) of(method string) level {
	if l, known := c.byMethod.Load(method); known {
		return l.(level)
	}
	l := lookUpLevel(method)
	if c.count.Load() < maxKnownLevels {
		if _, known := c.byMethod.LoadOrStore(method, l); !known {
			c.count.Add(1)
		}
	}
	return l
}

func lookUpLevel(method string) level {
	d := linkedMethod(method)
	if d == nil {
		return levelUnknown
	}
	options, _ := d.Options().(*descriptorpb.MethodOptions)
	if l := options.GetIdempotencyLevel(); l >= 0 && l < levels {
		return l
	}
	return levelUnknown
}

// linkedMethod returns the descriptor of "/pkg.Service/Method"; nil if the program does not link
// it. Generated code registers its methods.
func linkedMethod(method string) protoreflect.MethodDescriptor {
	service := linkedService(serviceOf(method))
	if service == nil {
		return nil
	}
	return service.Methods().ByName(protoreflect.Name(method[len(serviceOf(method)):]))
}

// linkedService returns the descriptor of "/pkg.Service/"; nil if the program does not link it.
func linkedService(service string) protoreflect.ServiceDescriptor {
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
