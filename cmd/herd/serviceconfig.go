package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/cmd/herd/internal/sim"
	"github.com/grpcretry/grpcretry/internal/serviceconfig"
)

// This file turns the policies of a gRPC service config into strategies.

// readPolicy returns a strategy for each retryPolicy and hedgingPolicy in a service config; with a
// method, only for the one that applies to it.
func readPolicy(path, method string) ([]sim.Strategy, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("-policy: %w", err)
	}
	all, err := policyStrategies(string(text), method)
	if err != nil {
		return nil, fmt.Errorf("-policy %s: %w", path, err)
	}
	return all, nil
}

func policyStrategies(text, method string) ([]sim.Strategy, error) {
	config, err := serviceconfig.Parse(text)
	if err != nil {
		return nil, err
	}
	entries := config.Methods
	if method != "" {
		entries = nil
		if m := config.Of(method); m != nil {
			entries = []serviceconfig.Method{*m}
		}
	}
	var all []sim.Strategy
	for _, m := range entries {
		if m.Retry != nil || m.Hedging != nil {
			all = append(all, strategyOf(m, config.Throttling))
		}
	}
	if len(all) == 0 {
		return nil, noPolicy(config, method)
	}
	return all, nil
}

// noPolicy explains that there is no policy, with the notes on the config, one of which may be the
// reason.
func noPolicy(config *serviceconfig.Config, method string) error {
	text := "there is no retryPolicy or hedgingPolicy in methodConfig"
	if method != "" {
		text = "there is no retryPolicy or hedgingPolicy for the method " + method
	}
	return errors.New(strings.Join(append([]string{text}, config.Notes...), "; "))
}

func strategyOf(m serviceconfig.Method, t *serviceconfig.Throttling) sim.Strategy {
	name := m.Names[0]
	if name == "" {
		name = "default"
	}
	s := sim.Strategy{Name: "policy " + name, Budget: sim.Budget{Kind: sim.UnlimitedBudget}}
	if t != nil {
		s.Budget = sim.Budget{Kind: sim.ThrottleBudget, MaxTokens: t.MaxTokens, TokenRatio: t.TokenRatio}
	}
	if m.Retry != nil {
		s.Policy = retryPolicy(m.Retry)
	} else {
		s.Policy = asHedgingPolicy(m.Hedging.MaxAttempts, m.Hedging.NonFatalCodes)
		s.Hedging = &sim.Hedging{Kind: sim.HedgeAfter, Delay: m.Hedging.Delay}
	}
	return s
}

// inLibrary returns a strategy of a service config as WithServiceConfig makes it: with the library's patience and, if there is no
// throttle, its budget.
func inLibrary(s sim.Strategy) sim.Strategy {
	s.Policy.Patience = 0
	if s.Budget.Kind == sim.UnlimitedBudget {
		s.Budget = sim.Budget{}
	}
	return s
}

// noPatience is gRPC's own: a retry is sent after its backoff, whatever other calls know.
const noPatience time.Duration = -1

// asHedgingPolicy returns the library's form of a hedgingPolicy: after the non-fatal codes the next attempt
// follows immediately. There may be none.
func asHedgingPolicy(attempts int, nonFatal []codes.Code) grpcretry.Policy {
	p := grpcretry.Policy{MaxAttempts: attempts, Codes: nonFatal, Patience: noPatience,
		Backoff: grpcretry.Constant(0), OverloadBackoff: grpcretry.Constant(0)}
	if len(nonFatal) == 0 { // a policy must have codes
		p.Codes = nil
		p.Classifier = func(context.Context, grpcretry.Attempt) grpcretry.Classification { return grpcretry.Stop }
	}
	return p
}

// retryPolicy returns the library's form of a retryPolicy: A6's backoff has a jitter of ±20%.
func retryPolicy(r *serviceconfig.Retry) grpcretry.Policy {
	if len(r.Codes) == 0 {
		return grpcretry.Policy{MaxAttempts: 1} // nothing is retried
	}
	b := grpcretry.Exponential{
		Base:       r.InitialBackoff,
		Max:        r.MaxBackoff,
		Multiplier: r.BackoffMultiplier,
		Jitter:     grpcretry.ProportionalJitter,
	}
	p := grpcretry.Policy{MaxAttempts: r.MaxAttempts, Codes: r.Codes, Patience: noPatience}
	if b.Multiplier < 1 {
		p.Backoff = shrinking(b)
		return p
	}
	b.Base = min(b.Base, b.Max) // if initialBackoff is the larger one, all waits are maxBackoff
	p.Backoff = b
	return p
}

// shrinking is an Exponential with a Multiplier below 1, from a Base that may be above Max. A
// service config may have one; the library's options reject it.
type shrinking grpcretry.Exponential

func (s shrinking) Delay(retry int, prev time.Duration, u float64) time.Duration {
	return grpcretry.Exponential(s).Delay(retry, prev, u)
}
