package grpcretry_test

import (
	"context"
	"log/slog"
	"net"
	"time"

	"go.opentelemetry.io/otel/trace"
	"golang.org/x/time/rate"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/types/descriptorpb"

	"github.com/grpcretry/grpcretry"
)

// This file compiles as long as the names that programs outside this repository were written against have
// their types. A change here is a change for every user.

type (
	retrier        = grpcretry.Retrier
	option         = grpcretry.Option
	callOption     = grpcretry.CallOption
	budget         = grpcretry.Budget
	attemptOfCall  = grpcretry.Attempt
	serverOption   = grpcretry.ServerOption
	classification = grpcretry.Classification
)

// Construction.
var (
	_ func(...option) (*retrier, error)                                                         = grpcretry.New
	_ func(*retrier) grpc.UnaryClientInterceptor                                                = (*retrier).UnaryClientInterceptor
	_ func(*retrier) grpc.StreamClientInterceptor                                               = (*retrier).StreamClientInterceptor
	_ func(*retrier) []grpc.DialOption                                                          = (*retrier).DialOptions
	_ func(*retrier, string) grpcretry.Policy                                                   = (*retrier).Policy
	_ func(*retrier, ...option) error                                                           = (*retrier).Update
	_ func(*retrier, context.Context, string, func(context.Context) error, ...callOption) error = (*retrier).Do
	_ func(...option) grpc.UnaryClientInterceptor                                               = grpcretry.UnaryClientInterceptor
	_ func(...option) grpc.StreamClientInterceptor                                              = grpcretry.StreamClientInterceptor
	_ func(...option) []grpc.DialOption                                                         = grpcretry.DialOptions
	_ func(...serverOption) grpc.UnaryServerInterceptor                                         = grpcretry.UnaryServerInterceptor
	_ func(...serverOption) grpc.StreamServerInterceptor                                        = grpcretry.StreamServerInterceptor
	_ func(error) error                                                                         = grpcretry.Permanent
	_ interface{ option }                                                                       = callOption(nil)
	_ grpc.CallOption                                                                           = callOption(nil)
)

// Options.
var (
	_ func(grpcretry.Policy) callOption                                       = grpcretry.WithPolicy
	_ func(int) callOption                                                    = grpcretry.WithMaxAttempts
	_ func(grpcretry.Backoff) callOption                                      = grpcretry.WithBackoff
	_ func(grpcretry.Backoff) callOption                                      = grpcretry.WithOverloadBackoff
	_ func(...codes.Code) callOption                                          = grpcretry.WithCodes
	_ func(func(context.Context, attemptOfCall) classification) callOption    = grpcretry.WithClassifier
	_ func(time.Duration) callOption                                          = grpcretry.WithAttemptTimeout
	_ func(time.Duration) callOption                                          = grpcretry.WithMaxElapsed
	_ func(time.Duration) callOption                                          = grpcretry.WithMaxServerDelay
	_ func(budget) callOption                                                 = grpcretry.WithBudget
	_ func(grpcretry.RatioBudget) callOption                                  = grpcretry.WithRatioBudget
	_ func(time.Duration) callOption                                          = grpcretry.WithPatience
	_ func(bool) callOption                                                   = grpcretry.WithUnsentOnly
	_ func(int) callOption                                                    = grpcretry.WithBufferLimit
	_ func(grpcretry.Hedging) callOption                                      = grpcretry.WithHedging
	_ func(func(error) bool) callOption                                       = grpcretry.WithRetryIf
	_ func(bool) callOption                                                   = grpcretry.WithDryRun
	_ func() callOption                                                       = grpcretry.Disable
	_ func(string, ...callOption) option                                      = grpcretry.WithMethod
	_ func(descriptorpb.MethodOptions_IdempotencyLevel, ...callOption) option = grpcretry.WithIdempotencyLevel
	_ func() option                                                           = grpcretry.WithSafeMethods
	_ func(string) option                                                     = grpcretry.WithServiceConfig
	_ func(bool) option                                                       = grpcretry.WithResolverServiceConfig
	_ func(func(context.Context, grpcretry.Event)) option                     = grpcretry.WithObserver
	_ func(*slog.Logger) option                                               = grpcretry.WithLogger
	_ func(trace.TracerProvider) option                                       = grpcretry.WithTracerProvider
	_ func(bool) option                                                       = grpcretry.WithCallSpan
	_ func() option                                                           = grpcretry.WithBuiltInRetryDisabled
)

// Policies, backoffs and budgets.
var (
	_ = grpcretry.Policy{
		MaxAttempts:     1,
		Backoff:         grpcretry.Exponential{Base: 1, Max: 1, Multiplier: 1.0, Jitter: grpcretry.FullJitter},
		OverloadBackoff: grpcretry.Decorrelated{Base: 1, Max: 1},
		Codes:           []codes.Code{},
		Classifier:      func(context.Context, attemptOfCall) classification { return grpcretry.Default },
		AttemptTimeout:  time.Second, MaxElapsed: time.Second, MaxServerDelay: time.Second, Patience: time.Second,
		Budget:      grpcretry.Unlimited,
		BufferLimit: -1,
		Hedging:     &grpcretry.Hedging{Delay: grpcretry.HedgeAfter(1), Budget: grpcretry.Unlimited},
	}
	_ = [...]grpcretry.Jitter{grpcretry.FullJitter, grpcretry.EqualJitter, grpcretry.ProportionalJitter, grpcretry.NoJitter}
	_ = [...]classification{grpcretry.Default, grpcretry.Retry, grpcretry.Stop}

	_ interface {
		Delay(retry int, prev time.Duration, u float64) time.Duration
	} = grpcretry.Constant(time.Second)
	_ interface {
		Deposit(grpcretry.Outcome)
		Withdraw(time.Time) bool
		Balance(time.Time) float64
	} = budget(nil)
	_ = grpcretry.Outcome{Attempt: 1, Hedge: true, Result: grpcretry.Succeeded}
	_ = [...]grpcretry.Result{grpcretry.Succeeded, grpcretry.Answered, grpcretry.Failed, grpcretry.Unsent, grpcretry.Ignored}
	_ = grpcretry.RatioBudget{Ratio: 1.0, Reserve: 1.0, MinPerSecond: 1.0, Window: time.Second}

	_ func(grpcretry.RatioBudget) (budget, error) = grpcretry.NewRatioBudget
	_ func(*rate.Limiter) budget                  = grpcretry.NewRateBudget
	_ func(float64, float64) (budget, error)      = grpcretry.NewThrottle
	_ func(int) (budget, error)                   = grpcretry.NewConcurrencyBudget
	_ func(...budget) budget                      = grpcretry.AllBudgets

	_ func(time.Duration) grpcretry.HedgeDelay                              = grpcretry.HedgeAfter
	_ func(q float64, shortest, longest time.Duration) grpcretry.HedgeDelay = grpcretry.HedgeAtQuantile
)

// Pushback, attempts, events and errors.
var (
	_ = grpcretry.Pushback{Delay: time.Second, Stop: true, Source: grpcretry.WaitSource(0)}

	_ func(metadata.MD, error) (grpcretry.Pushback, bool) = grpcretry.PushbackFrom
	_ func(context.Context, time.Duration) error          = grpcretry.SetPushback
	_ func(context.Context) error                         = grpcretry.SetNoRetry
	_ func(context.Context) int                           = grpcretry.PreviousAttempts
	_ func(context.Context) (attemptOfCall, bool)         = grpcretry.AttemptFromContext

	_ = attemptOfCall{
		Method: "", Number: 1, Hedge: true, Start: time.Time{}, Duration: time.Second, Err: error(nil),
		Header: metadata.MD{}, Trailer: metadata.MD{}, Peer: net.Addr(nil), Wait: time.Second, WaitSource: grpcretry.WaitSource(0),
	}
	_ func(attemptOfCall) codes.Code = attemptOfCall.Code

	_ = grpcretry.Event{Kind: grpcretry.AttemptStart}
	_ = [...]grpcretry.EventKind{grpcretry.AttemptStart, grpcretry.AttemptEnd, grpcretry.Decision, grpcretry.CallEnd}

	_ error = &grpcretry.Error{Last: error(nil), Reason: error(nil), Attempts: []attemptOfCall{}, Elapsed: time.Second}
	_       = []error{
		grpcretry.ErrAttemptsExhausted, grpcretry.ErrBudgetExhausted, grpcretry.ErrDeadline, grpcretry.ErrMaxElapsed,
		grpcretry.ErrPushback, grpcretry.ErrNotRetryable, grpcretry.ErrMayHaveRun, grpcretry.ErrCommitted,
		grpcretry.ErrTargetDown, grpcretry.ErrHedgeLost,
	}
)
