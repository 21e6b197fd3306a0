package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/grpcretry/grpcretry"
)

// tokens are in the budget when everything fails.
const tokens = 2

// A failure is that of a first attempt.
type failure struct {
	name string        // of the policy
	asks time.Duration // the wait that the server asks for; 0 for none
	luck float64       // the random number for the jitter
}

// failures happen in this order.
var failures = []failure{
	{name: "/shop.Catalog/Get", luck: 0.8},
	{name: "/http/api.shop.com/GET", asks: 2 * time.Second, luck: 0.5},
	{name: "/reconcile/orders", luck: 0.3},
}

// An answer is the library's decision after a failure.
type answer struct {
	wait     time.Duration
	admitted bool
}

// ask asks the library about all failures. They share a budget.
func ask() ([]answer, error) {
	budget, err := grpcretry.NewRatioBudget(grpcretry.RatioBudget{Ratio: 0.2, Reserve: tokens})
	if err != nil {
		return nil, err
	}
	r, err := grpcretry.New(
		grpcretry.WithBudget(budget),
		grpcretry.WithPatience(0), // otherwise a call without a token waits again
		grpcretry.WithMethod("/reconcile/", grpcretry.WithBackoff(grpcretry.Exponential{Base: time.Second, Max: time.Minute})),
	)
	if err != nil {
		return nil, err
	}
	var all []answer
	for _, f := range failures {
		wait, reason := f.decide(r, grpcretry.WithBudget(grpcretry.Unlimited))
		if reason != nil {
			return nil, fmt.Errorf("%s: %w", f.name, reason)
		}
		_, reason = f.decide(r)
		if reason != nil && !errors.Is(reason, grpcretry.ErrBudgetExhausted) {
			return nil, fmt.Errorf("%s: %w", f.name, reason)
		}
		all = append(all, answer{wait: wait, admitted: reason == nil})
	}
	return all, nil
}

// decide returns the wait before the next attempt, and the reason why none follows, which may be known at its end only.
func (f failure) decide(r *grpcretry.Retrier, opts ...grpcretry.CallOption) (time.Duration, error) {
	now := time.Unix(0, 0)
	p := r.Plan(context.Background(), f.name, "shop", now, opts...)
	a, _ := p.Sent(now)
	a.Err = f.err()
	step, due := p.Ended(a, now, f.luck), p.DueAt()
	if !step.End {
		step = p.Due(due)
	}
	return due.Sub(now), step.Reason
}

func (f failure) err() error {
	s := status.New(codes.Unavailable, "down for maintenance")
	if f.asks > 0 {
		if with, err := s.WithDetails(&errdetails.RetryInfo{RetryDelay: durationpb.New(f.asks)}); err == nil {
			s = with
		}
	}
	return s.Err()
}
