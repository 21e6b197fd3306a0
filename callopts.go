package grpcretry

import (
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
)

// callerOptions is what the grpc.CallOptions of a call mean to us.
type callerOptions struct {
	nested    bool          // the call is an attempt of ours: an outer interceptor retries it
	static    bool          // a generated stub makes the call
	overrides []*callOption // our options for this call
}

// targets are where the caller wants header and trailer, nil for nowhere.
type targets struct {
	header, trailer *metadata.MD
	any             bool // there are some, or there is one for the peer
}

func readOptions(cc *grpc.ClientConn, method string, opts []grpc.CallOption) (o callerOptions) {
	for _, opt := range opts {
		switch opt := opt.(type) {
		case *call:
			// The same options for another ClientConn or method are a call of its own.
			o.nested = o.nested || opt.cc == cc && opt.method == method
		case *callOption:
			o.overrides = append(o.overrides, opt)
		case grpc.StaticMethodCallOption:
			o.static = true
		case grpc.MaxRetryRPCBufferSizeCallOption: // gRPC's name for it
			o.overrides = append(o.overrides, WithBufferLimit(opt.MaxRetryRPCBufferSize).callOption())
		}
	}
	return o
}

// targets finds where the caller wants header and trailer. It is asked for again rather
// than kept: every call would pay for the room.
func (c *call) targets() (t targets) {
	for _, opt := range c.opts {
		switch opt := opt.(type) {
		case grpc.TrailerCallOption:
			t.trailer, t.any = opt.TrailerAddr, true
		case grpc.HeaderCallOption:
			t.header, t.any = opt.HeaderAddr, true
		case grpc.PeerCallOption:
			t.any = true
		}
	}
	return t
}

// attemptOptions are the options of one attempt: the caller's, less what belongs to
// the call as a whole, plus the mark for nested interceptors and what we read ourselves.
// The first attempt's are part of the call; others may still read them after its end.
func (c *call) attemptOptions(a *attempt) []grpc.CallOption {
	opts := c.buf[:0]
	if a.number > 1 {
		opts = make([]grpc.CallOption, 0, len(c.opts)+4)
	}
	own, targets := c.ownTargets(a), c.targets()
	for _, opt := range c.opts {
		switch opt.(type) {
		case *call, grpc.OnFinishCallOption:
		case grpc.HeaderCallOption, grpc.TrailerCallOption, grpc.PeerCallOption:
			if !own {
				opts = append(opts, opt)
			}
		default:
			opts = append(opts, opt)
		}
	}
	opts = append(opts, c)
	if c.stream {
		return opts[:len(opts):len(opts)]
	}
	opts = append(opts, grpc.Peer(&a.peer))
	if targets.trailer == nil || own {
		opts = append(opts, grpc.Trailer(&a.trailer))
	}
	if targets.header == nil && c.wantsHeader() || targets.header != nil && own {
		opts = append(opts, grpc.Header(&a.header))
	}
	return opts[:len(opts):len(opts)] // what is chained below must not append into buf
}

// ownTargets says whether an attempt must not be given the caller's own header, trailer
// and peer: gRPC may fill those of a stream late, on another goroutine, and attempts of a
// hedged call fill theirs at the same time. See show.
func (c *call) ownTargets(a *attempt) bool { return c.stream || c.policy.hedges && a.number > 1 }

// wantsHeader says whether a rule needs the response headers; copying them costs gRPC
// three allocations.
func (c *call) wantsHeader() bool {
	return c.policy.CommitOnHeaders || c.policy.Classifier != nil || c.observed()
}

// collect takes over what gRPC wrote to the unary caller's own header and trailer.
func (c *call) collect(a *attempt) {
	if c.ownTargets(a) {
		return
	}
	targets := c.targets()
	if targets.trailer != nil {
		a.trailer = *targets.trailer
	}
	if targets.header != nil {
		a.header = *targets.header
	}
}

// show puts what an attempt had where the caller wants it.
func (c *call) show(a *attempt) {
	for _, opt := range c.opts {
		switch opt := opt.(type) {
		case grpc.HeaderCallOption:
			*opt.HeaderAddr = a.header
		case grpc.TrailerCallOption:
			*opt.TrailerAddr = a.trailer
		case grpc.PeerCallOption:
			*opt.PeerAddr = a.peer
		}
	}
}

// forget clears what the last attempt left in the caller's header, trailer and peer, so
// that they show the attempt whose result is returned even if that reaches no server.
func (c *call) forget() { c.show(&attempt{}) }

// finish runs the caller's OnFinish options, once for the call.
func finish(opts []grpc.CallOption, err error) {
	for _, opt := range opts {
		if o, ok := opt.(grpc.OnFinishCallOption); ok {
			o.OnFinish(err)
		}
	}
}
