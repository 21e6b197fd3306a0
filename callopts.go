package grpcretry

import (
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
)

// callOptions are the grpc.CallOptions of a call, and what they mean to us.
type callOptions struct {
	list []grpc.CallOption

	// Where the caller wants header and trailer, nil for nowhere.
	header, trailer *metadata.MD

	creds credentials.PerRPCCredentials // of the call; nil without

	targets  bool // the caller wants header, trailer or peer
	nested   bool // the call is an attempt of ours: an outer interceptor retries it
	static   bool // a generated stub makes the call
	finishes bool // there is an OnFinish
	kept     bool // some are not for the attempts, but for the call
}

// read returns our own options for the call.
func (o *callOptions) read(list []grpc.CallOption, cc *grpc.ClientConn, method string) (overrides []*callOption) {
	o.list = list
	for _, opt := range list {
		switch opt := opt.(type) {
		case grpc.StaticMethodCallOption:
			o.static = true
		case grpc.HeaderCallOption:
			o.header, o.targets = opt.HeaderAddr, true
		case grpc.TrailerCallOption:
			o.trailer, o.targets = opt.TrailerAddr, true
		case grpc.PeerCallOption:
			o.targets = true
		case grpc.PerRPCCredsCallOption:
			o.creds = opt.Creds
		case grpc.OnFinishCallOption:
			o.finishes, o.kept = true, true
		case *attempt:
			// The same options for another ClientConn or method are a call of its own.
			o.nested = o.nested || opt.cc == cc && opt.method == method
			o.kept = true
		case *previousAttempts:
			o.kept = true
		case *callOption:
			overrides = append(overrides, opt)
		case grpc.MaxRetryRPCBufferSizeCallOption: // gRPC's name for it
			overrides = append(overrides, WithBufferLimit(opt.MaxRetryRPCBufferSize).callOption())
		}
	}
	return overrides
}

// attemptOptions are the options of one attempt: the caller's, less what belongs to
// the call as a whole, plus the mark for nested interceptors and what we read ourselves.
// Others may still read them after its end.
func (c *rpc) attemptOptions(a *attempt) []grpc.CallOption {
	o, own := &c.options, c.ownTargets(a)
	opts := a.room[:0]
	if o.kept || own && o.targets {
		opts = o.forAttempt(opts, own)
	} else {
		opts = append(opts, o.list...)
	}
	opts = append(opts, a)
	if a.number > 1 {
		opts = append(opts, previousAttemptsOption(int(a.number)-1, o.creds))
	}
	if c.stream == nil {
		if o.trailer == nil || own {
			opts = append(opts, grpc.Trailer(&a.trailer))
		}
		if o.header == nil && c.wantsHeader() || o.header != nil && own {
			opts = append(opts, grpc.Header(&a.header))
		}
	}
	return opts[:len(opts):len(opts)] // what is chained below must not append into the room
}

// forAttempt adds those that are not for the call as a whole: without the targets where
// attempts have their own.
func (o *callOptions) forAttempt(opts []grpc.CallOption, own bool) []grpc.CallOption {
	for _, opt := range o.list {
		switch opt.(type) {
		case *attempt, *previousAttempts, grpc.OnFinishCallOption:
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

// ownTargets says whether an attempt must not be given the caller's own header, trailer
// and peer: gRPC may fill those of a stream late, on another goroutine, and attempts of a
// hedged call fill theirs at the same time. See show.
func (c *rpc) ownTargets(a *attempt) bool {
	return c.stream != nil || c.mode == modeHedged && a.number > 1
}

// wantsHeader says whether a rule needs the response headers; copying them costs gRPC
// three allocations.
func (c *rpc) wantsHeader() bool {
	return c.policy.CommitOnHeaders || c.policy.Classifier != nil || c.retrier.report.observed()
}

// collect takes over, once, what gRPC wrote to the unary caller's own header and trailer.
func (c *call) collect(a *attempt) {
	if c.ownTargets(a) || a.collected {
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

// show puts what an attempt had where the caller wants it.
func (o *callOptions) show(a *attempt) {
	if o.targets {
		o.set(a)
	}
}

// forget clears what the last attempt left in the caller's header, trailer and peer, so
// that they show the attempt whose result is returned even if that reaches no server.
func (o *callOptions) forget() {
	if o.targets {
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

// setHeader tells the caller how many attempts were made before.
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

// finish runs the caller's OnFinish options, once for the call.
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
