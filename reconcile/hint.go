package reconcile

import (
	"context"
	"errors"
	"math"
	"math/rand/v2"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/internal/drive"
	"github.com/grpcretry/grpcretry/internal/inside"
)

// A judged error is an error as the engine sees it: with a status, and unwrapped to the original.
type judged struct {
	error
	status *status.Status
}

func (e judged) Unwrap() error              { return e.error }
func (e judged) GRPCStatus() *status.Status { return e.status }

// forEngine returns err with a status. Kubernetes' Retry-After becomes a RetryInfo. A cancelled
// context says nothing about the backend. Any other error without a status is UNAVAILABLE, and so is one
// whose status is OK: it is an error nevertheless.
func forEngine(err error) error {
	if seconds, ok := apierrors.SuggestsClientDelay(err); ok && seconds > 0 {
		return judged{err, retryAfter(err.Error(), seconds)}
	}
	if st, ok := status.FromError(err); ok && st.Code() != codes.OK {
		return err
	}
	code := codes.Unavailable
	if errors.Is(err, context.Canceled) {
		code = codes.Canceled
	}
	return judged{err, status.New(code, err.Error())}
}

// retryAfter returns the status of an overloaded server that names a wait.
func retryAfter(message string, seconds int) *status.Status {
	overloaded := status.New(codes.ResourceExhausted, message)
	info := &errdetails.RetryInfo{RetryDelay: &durationpb.Duration{Seconds: int64(min(seconds, math.MaxInt32))}}
	if detailed, err := overloaded.WithDetails(info); err == nil {
		return detailed
	}
	return overloaded
}

// trailerOf returns the trailer of a call that this library made. gRPC's own errors have none.
func trailerOf(err error) metadata.MD {
	if call, _ := errors.AsType[*grpcretry.Error](err); call != nil {
		return inside.TrailerOf(call)
	}
	return nil
}

// A reading is what an error alone says about the next attempt.
type reading struct {
	named    bool          // a server named a wait, within the policy's limit
	wait     time.Duration // that wait; with RetryInfo, spread
	terminal bool          // the error is Permanent
}

// read has the engine judge a single failure, with every code retryable and nothing to limit retries.
func read(r *grpcretry.Retrier, name string, err error, now time.Time) reading {
	trailer := trailerOf(err)
	err = forEngine(err)
	_, hinted := grpcretry.PushbackFrom(trailer, err)
	p := drive.New[grpcretry.Attempt](context.Background(), r, name, name, now, append(alone(r, name, math.MaxInt32, grpcretry.Unlimited),
		grpcretry.WithMaxElapsed(0), grpcretry.WithDryRun(false), grpcretry.WithClassifier(retryAll)))
	a, _ := p.Sent(now)
	a.Err, a.Trailer = err, trailer
	step := p.Ended(a, now, rand.Float64())
	switch {
	case !step.End:
		return reading{named: hinted, wait: max(0, p.DueAt().Sub(now))}
	case errors.Is(step.Reason, grpcretry.ErrPushback):
		return reading{} // a server named a longer wait, or forbade a retry
	default:
		return reading{terminal: true}
	}
}

func retryAll(context.Context, grpcretry.Attempt) grpcretry.Classification { return grpcretry.Retry }

// alone returns the options of a plan that makes up to n attempts, one at a time, and does not wait
// for a connection. UnsentOnly is for calls: to reconcile once more is what a reconciler is for.
func alone(r *grpcretry.Retrier, name string, n int, b grpcretry.Budget) []grpcretry.CallOption {
	opts := []grpcretry.CallOption{grpcretry.WithMaxAttempts(n), grpcretry.WithPatience(0), grpcretry.WithBudget(b),
		grpcretry.WithUnsentOnly(false)}
	if r.Policy(name).Hedging != nil {
		opts = append(opts, grpcretry.WithHedging(grpcretry.Hedging{Delay: neverHedge{}}))
	}
	return opts
}

// neverHedge turns the hedging that is set for all methods off.
type neverHedge struct{}

func (neverHedge) Delay(string, time.Time) (time.Duration, bool)   { return 0, false }
func (neverHedge) Answered(string, time.Duration, bool, time.Time) {}
