package serviceconfig

import (
	"cmp"
	"maps"
	"reflect"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"
)

// A reading is what this package and grpc-go can both say about a service config.
type reading struct {
	policies   map[string]*Retry // by name; nil for an entry without a retryPolicy
	throttling *Throttling
}

// grpcRead returns grpc-go's own reading of a service config.
func grpcRead(text string) (reading, error) {
	result := grpcParser().ParseServiceConfig(text)
	if result.Err != nil {
		return reading{}, result.Err
	}
	config := result.Config.(*grpc.ServiceConfig) //nolint:staticcheck // deprecated, but nothing else shows what grpc-go has read
	r := reading{policies: map[string]*Retry{}}
	for name, m := range config.Methods {
		r.policies[name] = nil
		if p := m.RetryPolicy; p != nil {
			r.policies[name] = &Retry{p.MaxAttempts, p.InitialBackoff, p.MaxBackoff, p.BackoffMultiplier, retryable(p.RetryableStatusCodes)}
		}
	}
	if t := reflect.ValueOf(config).Elem().FieldByName("retryThrottling"); !t.IsNil() {
		r.throttling = &Throttling{t.Elem().FieldByName("MaxTokens").Float(), t.Elem().FieldByName("TokenRatio").Float()}
	}
	return r, nil
}

// grpcTimeout returns the timeout that grpc-go reads, 0 for none.
func grpcTimeout(text, name string) (time.Duration, error) {
	result := grpcParser().ParseServiceConfig(text)
	if result.Err != nil {
		return 0, result.Err
	}
	config := result.Config.(*grpc.ServiceConfig) //nolint:staticcheck // as above
	if d := config.Methods[name].Timeout; d != nil {
		return *d, nil
	}
	return 0, nil
}

// grpcParser returns the parser that grpc-go gives to its resolvers.
var grpcParser = sync.OnceValue(func() resolver.ClientConn {
	r := manual.NewBuilderWithScheme("parser")
	cc, err := grpc.NewClient("parser:///", grpc.WithResolvers(r), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		panic(err)
	}
	cc.Connect()
	defer cc.Close()
	return r.CC()
})

// read returns the same of a Config.
func read(c *Config) reading {
	r := reading{policies: map[string]*Retry{}, throttling: c.Throttling}
	for _, m := range c.Methods {
		for _, name := range m.Names {
			r.policies[name] = nil
			if m.Retry != nil {
				p := *m.Retry
				p.Codes = sorted(p.Codes)
				r.policies[name] = &p
			}
		}
	}
	return r
}

// retryable returns the codes of a set in order, without OK.
func retryable(set map[codes.Code]bool) []codes.Code {
	list := slices.Collect(maps.Keys(set))
	return sorted(slices.DeleteFunc(list, func(c codes.Code) bool { return c == codes.OK }))
}

// sorted never returns nil.
func sorted(list []codes.Code) []codes.Code {
	return slices.SortedFunc(slices.Values(append([]codes.Code{}, list...)), cmp.Compare)
}
