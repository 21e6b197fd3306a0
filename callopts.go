package grpcretry

import (
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
)

// callOptions are a call's grpc.CallOptions, and the settings that the library reads from them.
type callOptions struct {
	list []grpc.CallOption

	// The addresses where the caller wants header and trailer; nil if unwanted.
	header, trailer *metadata.MD

	creds credentials.PerRPCCredentials // the call's own; nil if there are none

	outputs  bool // the caller wants header, trailer or peer
	nested   bool // the call is an attempt of ours: an outer interceptor retries it
	static   bool // a generated stub makes the call
	finishes bool // there is an OnFinish
	perCall  bool // some options apply to the call as a whole, and not to its attempts
	foreign  bool // some options are those of another call's attempt
	leftover bool // an option belongs to another retry library, see isLeftover
}

// read reads a call's options, and returns this library's own.
func (o *callOptions) read(list []grpc.CallOption, cc *grpc.ClientConn, method string) (overrides []*callOption) {
	o.list = list
	for _, opt := range list {
		switch opt := opt.(type) {
		case grpc.StaticMethodCallOption:
			o.static = true
		case grpc.HeaderCallOption:
			o.header, o.outputs = opt.HeaderAddr, true
		case grpc.TrailerCallOption:
			o.trailer, o.outputs = opt.TrailerAddr, true
		case grpc.PeerCallOption:
			o.outputs = true
		case grpc.PerRPCCredsCallOption:
			o.creds = opt.Creds
		case grpc.OnFinishCallOption:
			o.finishes, o.perCall = true, true
		case *attempt:
			// With another ClientConn or method, the same options belong to a call in its own right.
			o.nested = o.nested || opt.cc == cc && opt.method == method
			o.perCall, o.foreign = true, true
		case *headerOption:
			o.perCall, o.foreign = true, true
		case *callOption:
			overrides = append(overrides, opt)
		case grpc.MaxRetryRPCBufferSizeCallOption: // gRPC's name for it
			overrides = append(overrides, WithBufferLimit(opt.MaxRetryRPCBufferSize).callOption())
		case CallOption: // in a type of the application's own
			overrides = append(overrides, opt.callOption())
		default:
			o.leftover = o.leftover || isLeftover(opt)
		}
	}
	return overrides
}

// attemptOptions returns the options of one attempt: the caller's, without those that apply to the
// call as a whole, plus the mark for nested interceptors and the library's own outputs. Interceptors
// may still read them after the attempt's end.
func (c *rpc) attemptOptions(a *attempt) []grpc.CallOption {
	o, own := &c.options, c.ownOutputs(a)
	opts := a.optionSpace[:0]
	if o.perCall || own && o.outputs {
		opts = o.forAttempt(opts, own)
	} else {
		opts = append(opts, o.list...)
	}
	opts = append(opts, a)
	if c.retrier.stopsGRPC(c.policy, c.cc, c.method) {
		opts = append(opts, noBuiltInRetry())
	}
	if a.number > 1 || c.worksFor.IsRetry() {
		opts = append(opts, attemptHeader{int(a.number) - 1, c.worksFor.IsRetry()}.option(o.creds))
	}
	if c.stream == nil {
		if o.trailer == nil || own {
			opts = append(opts, grpc.Trailer(&a.trailer))
		}
		if o.header == nil && c.wantsHeader() || o.header != nil && own {
			opts = append(opts, grpc.Header(&a.header))
		}
	}
	if c.policy.UnsentOnly {
		opts = a.witness(opts)
	}
	return opts[:len(opts):len(opts)] // interceptors below must not append into the space
}

// forAttempt appends the options that each attempt gets; if the attempt has outputs of its own,
// the caller's are left out.
func (o *callOptions) forAttempt(opts []grpc.CallOption, own bool) []grpc.CallOption {
	for _, opt := range o.list {
		switch opt.(type) {
		case *attempt, *headerOption, grpc.OnFinishCallOption:
		case grpc.HeaderCallOption, grpc.TrailerCallOption, grpc.PeerCallOption:
			if !own {
				opts = append(opts, opt)
			}
		default:
			opts = append(opts, opt)
		}
	}
	return opts
}

// own returns the options without those of another call's attempt, which an interceptor has handed on.
func (o *callOptions) own() []grpc.CallOption {
	if !o.foreign || o.nested {
		return o.list
	}
	return slices.DeleteFunc(slices.Clone(o.list), func(opt grpc.CallOption) bool {
		switch opt.(type) {
		case *attempt, *headerOption:
			return true
		default:
			return false
		}
	})
}

// ownOutputs reports whether an attempt must have outputs of its own instead of the caller's
// header, trailer and peer: gRPC may fill a stream's outputs late, on another goroutine, and a
// hedged call's attempts fill theirs at the same time. See show.
func (c *rpc) ownOutputs(a *attempt) bool {
	return c.stream != nil || c.mode == modeHedged && a.number > 1
}

// wantsHeader reports whether a rule or an observer needs the response headers; copying them costs
// gRPC three allocations.
func (c *rpc) wantsHeader() bool {
	return c.policy.CommitOnHeaders || c.policy.Classifier != nil || c.retrier.report.observed()
}

// collect copies, once, the header and trailer that gRPC wrote to a unary caller's own variables.
func (c *call) collect(a *attempt) {
	if c.ownOutputs(a) || a.collected {
		return
	}
	a.collected = true
	if c.options.trailer != nil {
		a.trailer = *c.options.trailer
	}
	if c.options.header != nil {
		a.header = *c.options.header
		c.options.setHeader(a)
	}
}

// show copies an attempt's header, trailer and peer to the caller's outputs.
func (o *callOptions) show(a *attempt) {
	if o.outputs {
		o.set(a)
	}
}

// clear empties the caller's outputs before an attempt, so that they show the attempt whose result
// is returned even if that attempt reaches no server.
func (o *callOptions) clear() {
	if o.outputs {
		o.set(&attempt{})
	}
}

func (o *callOptions) set(a *attempt) {
	for _, opt := range o.list {
		switch opt := opt.(type) {
		case grpc.HeaderCallOption:
			*opt.HeaderAddr = a.withPreviousAttempts(a.header)
		case grpc.TrailerCallOption:
			*opt.TrailerAddr = a.trailer
		case grpc.PeerCallOption:
			*opt.PeerAddr = a.peer
		}
	}
}

// setHeader adds the number of previous attempts to the caller's header.
func (o *callOptions) setHeader(a *attempt) {
	if a.number == 1 {
		return
	}
	for _, opt := range o.list {
		if opt, ok := opt.(grpc.HeaderCallOption); ok {
			*opt.HeaderAddr = a.withPreviousAttempts(a.header)
		}
	}
}

// finish runs the caller's OnFinish options, once per call.
func (o *callOptions) finish(err error) {
	if !o.finishes {
		return
	}
	o.finishes = false // also if one of them panics
	for _, opt := range o.list {
		if f, ok := opt.(grpc.OnFinishCallOption); ok {
			f.OnFinish(err)
		}
	}
}
