package bench

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// BenchmarkLimit compares a call that succeeds on its first attempt, through the interceptor alone, with the least that any
// interceptor must do that knows as much of the call as ours: a record of 224 bytes, a look at the clock and an atomic addition.
// The record is the attempt's context, its mark among the call options, and the place of its outputs. What is reported as %over is
// what our rules cost beyond that. Our own record has 192 bytes by now, because what only other attempts need is elsewhere.
func BenchmarkLimit(b *testing.B) {
	eachAlternative(b, []alternative{limit, ours}, perOperation, func(r *alternative) func(times int) {
		cc, intercept, opts := unconnected(b), r.unary(asUsed), callOptions(false)
		return serial(b, func() func() error {
			ctx, req, reply := callContext(b), request(0), new(echov1.EchoResponse)
			return func() error {
				return intercept(ctx, echov1.EchoService_Echo_FullMethodName, req, reply, cc, succeed, opts...)
			}
		})
	})
}

var limit = alternative{name: "limit", unary: func(setting) grpc.UnaryClientInterceptor {
	return (&leastInterceptor{origin: time.Now()}).unary
}}

// A leastInterceptor passes calls on, after a record of each.
type leastInterceptor struct {
	origin time.Time
	calls  atomic.Int64
}

// A leastRecord is what the record of an attempt is, and has the size that it had when the goal was set.
type leastRecord struct {
	context.Context
	grpc.PeerCallOption
	start   time.Duration
	peer    peer.Peer
	trailer metadata.MD
	options [4]grpc.CallOption
	_       [9]uintptr
}

func (l *leastInterceptor) unary(
	ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption,
) error {
	record := &leastRecord{Context: ctx, start: time.Since(l.origin)}
	record.PeerAddr = &record.peer
	l.calls.Add(1)
	return invoker(record, method, req, reply, cc, append(append(record.options[:0], opts...), record, grpc.Trailer(&record.trailer))...)
}
