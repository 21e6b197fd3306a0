package main

import (
	"context"
	"errors"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/internal/drive"
	"github.com/grpcretry/grpcretry/internal/layers"
)

// The services of the time lines: A calls B, B calls C, and C calls D.
const (
	deadline = time.Second           // of A's call
	hop      = 5 * time.Millisecond  // from a service to the next
	working  = 20 * time.Millisecond // how long D takes to succeed
	failing  = 150 * time.Millisecond
	luck     = 0.8 // the random number for every jitter
)

// A course is what D does, and how C calls it.
type course struct {
	title    string
	detached bool               // C calls D with a context without the deadline
	opts     []grpcretry.Option // of C
	hangs    bool               // D hangs in the first attempt and then works; otherwise it fails
}

var courses = []course{
	{title: "C passes its handler's context on"},
	{title: "C calls D with context.Background()", detached: true},
	{title: "D hangs once; C has an attempt timeout of 300 ms", hangs: true,
		opts: []grpcretry.Option{grpcretry.WithAttemptTimeout(300 * time.Millisecond)}},
	{title: "D hangs once; there is no attempt timeout", hangs: true},
}

// A bar is an attempt, as its caller sees it.
type bar struct {
	caller   int // 0 for A
	from, to time.Duration
	err      error
}

// A reply is what a caller gets.
type reply struct {
	at      time.Time
	err     error
	trailer metadata.MD
}

// A timeline is a course with all its attempts, in virtual time.
type timeline struct {
	course
	retriers []*grpcretry.Retrier // of A, B and C
	bars     []bar
	asked    int // attempts that have reached D
	end      reply
}

var begin = time.Unix(0, 0)

// run makes the call.
func (c course) run() (*timeline, error) {
	t := &timeline{course: c}
	for _, opts := range [][]grpcretry.Option{nil, nil, c.opts} {
		r, err := grpcretry.New(opts...)
		if err != nil {
			return nil, err
		}
		t.retriers = append(t.retriers, r)
	}
	t.end = t.call(limited{context.Background(), begin.Add(deadline)}, 0, begin)
	return t, nil
}

// call makes the call of a service to the next, as the interceptors do.
func (t *timeline) call(ctx context.Context, caller int, now time.Time) reply {
	plan := drive.New[grpcretry.Attempt](ctx, t.retriers[caller], "/shop.Service/Method", services[caller+1], now, nil)
	for {
		a, timeout := plan.Sent(now)
		r := t.handle(ctx, caller+1, now.Add(hop))
		r.at = r.at.Add(hop)
		if overdue := now.Add(timeout); timeout > 0 && r.at.After(overdue) {
			r = unlessReplaced(r, plan, a, overdue)
		}
		if end, ok := ctx.Deadline(); ok && r.at.After(end) {
			r = reply{end, status.FromContextError(context.DeadlineExceeded).Err(), nil}
		}
		t.bars = append(t.bars, bar{caller, now.Sub(begin), r.at.Sub(begin), r.err})
		a.Err, a.Trailer, a.Duration = r.err, r.trailer, r.at.Sub(now)
		now = r.at
		step := plan.Ended(a, now, luck)
		for !step.End && !step.Send {
			now = plan.DueAt()
			step = plan.Due(now)
		}
		if step.End {
			r.at = now
			return r
		}
	}
}

// unlessReplaced returns r, the reply to an attempt that is overdue from now on, unless another attempt
// replaces it before.
func unlessReplaced(r reply, plan drive.Plan[grpcretry.Attempt], a grpcretry.Attempt, now time.Time) reply {
	step := plan.Overdue(a, now, luck)
	for step.Cut == 0 {
		if now = plan.DueAt(); now.IsZero() || !now.Before(r.at) {
			return r
		}
		step = plan.Due(now)
	}
	return reply{now, grpcretry.ErrAttemptTimeout, nil}
}

// handle handles a request, as a server with the interceptors does.
func (t *timeline) handle(ctx context.Context, service int, now time.Time) reply {
	if service == len(services)-1 {
		return t.last(ctx, now)
	}
	request := layers.New(ctx, false)
	ctx = request
	if t.detached && service == len(services)-2 {
		ctx = context.Background()
	}
	r := t.call(ctx, service, now)
	r.trailer = nil
	if r.err != nil && request.GaveUp() {
		r.trailer = metadata.Pairs("grpc-retry-pushback-ms", "-1")
	}
	return r
}

// last is what D does.
func (t *timeline) last(ctx context.Context, now time.Time) reply {
	t.asked++
	end, ok := ctx.Deadline()
	switch {
	case !t.hangs:
		return reply{now.Add(failing), status.Error(codes.Unavailable, "down"), nil}
	case t.asked > 1:
		return reply{now.Add(working), nil, nil}
	case ok:
		return reply{end, status.FromContextError(context.DeadlineExceeded).Err(), nil}
	default:
		return reply{now.Add(time.Hour), errors.New("hangs"), nil}
	}
}

// A limited context has a deadline in virtual time.
type limited struct {
	context.Context
	end time.Time
}

func (l limited) Deadline() (time.Time, bool) { return l.end, true }
