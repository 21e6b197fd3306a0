package grpcretry

import (
	"reflect"
	"slices"
	"strings"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	"github.com/grpcretry/grpcretry/internal/wire"
)

// grpcOptions are the grpc.CallOptions of a call, and where it wants header and trailer.
type grpcOptions struct {
	list            []grpc.CallOption
	header, trailer *metadata.MD // nil if unwanted

	others bool // there are other outputs: a peer, also that of another call's attempt, or more than one header or trailer
	mixed  bool // some are not for attempts: OnFinish, and those of another call's attempt, which an interceptor has handed on
}

// read reads a call's options, and returns this library's own. nested reports that the call is an
// attempt of ours: an outer interceptor retries it.
func (o *grpcOptions) read(list []grpc.CallOption, f *facts, report *reporter) (own []*policyOption, nested bool) {
	*o = grpcOptions{list: list}
	for _, opt := range list {
		switch opt := opt.(type) {
		case grpc.StaticMethodCallOption:
			f.static = true
		case grpc.HeaderCallOption:
			o.header, o.others = opt.HeaderAddr, o.others || o.header != nil
		case grpc.TrailerCallOption:
			o.trailer, o.others = opt.TrailerAddr, o.others || o.trailer != nil
		case grpc.PeerCallOption:
			o.others = true
		case grpc.OnFinishCallOption:
			o.mixed = true
		case *attempt:
			// With another ClientConn or method, the same options belong to a call in its own right.
			nested = nested || opt.cc == f.cc && opt.method == f.method
			o.mixed, o.others = true, true // that attempt's peer
		case grpc.MaxRetryRPCBufferSizeCallOption: // gRPC's name for it
			own = append(own, WithBufferLimit(opt.MaxRetryRPCBufferSize).callOption())
		case CallOption:
			own = append(own, opt.callOption())
		default:
			if isLeftover(opt) {
				report.leftover(f)
			}
		}
	}
	o.mixed = o.mixed && !nested
	return own, nested
}

// outputs reports whether the caller wants to know something of the response.
func (o *grpcOptions) outputs() bool { return o.header != nil || o.trailer != nil || o.others }

// isLeftover reports whether a call option belongs to go-grpc-middleware's retry package, of any
// major version. Only its own interceptor obeys such an option, so that a call which still passes
// one after a migration is retried by other rules than its author thinks. The package is recognized by
// its path, because importing it would put it into every user's binary:
// ".../go-grpc-middleware/retry" in version 1, ".../go-grpc-middleware/v2/interceptors/retry" later.
func isLeftover(opt grpc.CallOption) bool {
	t := reflect.TypeOf(opt)
	return t != nil && strings.HasSuffix(t.PkgPath(), "/retry") &&
		strings.HasPrefix(t.PkgPath(), "github.com/grpc-ecosystem/go-grpc-middleware/")
}

// attemptOptions returns the options of one attempt: the caller's, without those that apply to the
// call as a whole, plus the mark for nested interceptors and the library's own outputs. Interceptors
// may still read them after the attempt's end.
func (c *call) attemptOptions(a *attempt) []grpc.CallOption {
	o, own, x := &c.options, c.ownOutputs(a), a.extras()
	opts := o.forAttempt(a.optionSpace[:0], own)
	if c.policy.dryRun { // which does nothing, so interceptors below may retry
		opts = append(opts, a.PeerCallOption)
	} else {
		opts = append(opts, a)
	}
	if c.stopsGRPC || x != nil && x.stopsGRPC {
		opts = append(opts, noReplay{})
	}
	if c.stream == nil {
		if o.trailer == nil || own {
			opts = append(opts, grpc.Trailer(&a.trailer))
		}
		if x != nil && (o.header == nil && c.retrier.report.wantsHeader(&c.facts) || o.header != nil && own) {
			opts = append(opts, grpc.Header(&x.header))
		}
	}
	if c.policy.UnsentOnly {
		opts = x.witness(opts)
	}
	return opts[:len(opts):len(opts)] // interceptors below must not append into the space
}

// plainOptions returns what attemptOptions does for the first attempt of a plain call.
func (a *attempt) plainOptions(o *grpcOptions) []grpc.CallOption {
	opts := a.optionSpace[:0]
	for _, opt := range o.list { //nolint:staticcheck // one by one, because a write barrier for all takes 4 ns
		opts = append(opts, opt)
	}
	opts = append(opts, a)
	if o.trailer == nil {
		opts = append(opts, grpc.Trailer(&a.trailer))
	}
	return opts[:len(opts):len(opts)] // interceptors below must not append into the space
}

// forAttempt appends the options that each attempt gets; if the attempt has outputs of its own,
// the caller's are left out.
func (o *grpcOptions) forAttempt(opts []grpc.CallOption, own bool) []grpc.CallOption {
	for _, opt := range o.list {
		opt = handedOn(opt)
		switch opt.(type) {
		case grpc.OnFinishCallOption:
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

// handedOn returns the option that a call hands on for one of its own. The mark of another call's attempt stays behind, and what
// it asks for, the peer, goes on.
func handedOn(opt grpc.CallOption) grpc.CallOption {
	if another, is := opt.(*attempt); is {
		return another.PeerCallOption
	}
	return opt
}

// passedOn returns the options of a call that passes through: all, without the marks of another call's attempt. A stream's
// peer might come late, and is not handed on.
func (o *grpcOptions) passedOn(unary, stopsGRPC bool) []grpc.CallOption {
	list := o.list
	if o.mixed {
		list = nil
		for _, opt := range o.list {
			if _, is := opt.(*attempt); !is || unary {
				list = append(list, handedOn(opt))
			}
		}
	}
	if stopsGRPC {
		list = append(slices.Clip(list), noReplay{})
	}
	return list
}

// ownOutputs reports whether an attempt must have outputs of its own instead of the caller's
// header, trailer and peer: gRPC may fill a stream's outputs late, on another goroutine, and a
// hedged call's attempts fill theirs at the same time. See show.
func (c *call) ownOutputs(a *attempt) bool {
	return c.stream != nil || c.mode == modeHedged && a.number > 1
}

// wantsHeader reports whether a Classifier or an observer needs the response headers; copying them costs
// gRPC three allocations.
func (r *reporter) wantsHeader(f *facts) bool { return f.policy.Classifier != nil || r.observed() }

// collect completes an attempt that has ended with the trailer, if gRPC wrote that to a unary caller's own variable. It returns the
// header, for which an attempt without extras has no place.
func (c *call) collect(a *attempt) (header metadata.MD) {
	if x := a.extras(); x != nil {
		header = x.header
	}
	if c.ownOutputs(a) {
		return header
	}
	if c.options.trailer != nil {
		a.trailer = *c.options.trailer
	}
	if c.options.header == nil {
		return header
	}
	header = *c.options.header
	if a.number > 1 {
		c.options.set(a, header) // the caller's header gets the number of previous attempts
	}
	return header
}

// show makes an attempt that has ended the one that the application sees: its header, trailer and peer are copied to the
// caller's outputs, and are those of the stream.
func (c *call) show(a *attempt) {
	switch {
	case !c.options.outputs():
	case c.ownOutputs(a):
		c.options.set(a, a.extras().header)
	default: // it has failed
		c.options.set(a, c.history().headerOf(a.number))
	}
	if c.stream != nil {
		c.stream.show(a)
	}
}

// clear empties the caller's outputs before an attempt, so that they show the attempt whose result
// is returned even if that attempt reaches no server.
func (o *grpcOptions) clear() {
	if o.header != nil {
		*o.header = nil
	}
	if o.trailer != nil {
		*o.trailer = nil
	}
	if o.others {
		o.set(&attempt{}, nil)
	}
}

// set fills in the caller's outputs with those of an attempt.
func (o *grpcOptions) set(a *attempt, header metadata.MD) {
	for _, opt := range o.list {
		switch opt := opt.(type) {
		case grpc.HeaderCallOption:
			*opt.HeaderAddr = wire.WithPreviousAttempts(header, int(a.number)-1)
		case grpc.TrailerCallOption:
			*opt.TrailerAddr = a.trailer
		case grpc.PeerCallOption:
			*opt.PeerAddr = a.peer
		case *attempt:
			// Without a peer, it may keep one that it has already; a stream's might be written while it is read.
			if a.hasPeer() && !a.hasStream() {
				*opt.PeerAddr = a.peer
			}
		}
	}
}

// finish runs the caller's OnFinish options, once per call.
func (o *grpcOptions) finish(err error) {
	if !o.mixed {
		return
	}
	list := o.list
	o.list = nil // also if one of them panics
	for _, opt := range list {
		if f, ok := opt.(grpc.OnFinishCallOption); ok {
			f.OnFinish(err)
		}
	}
}
