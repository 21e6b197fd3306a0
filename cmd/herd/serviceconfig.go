package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"regexp"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/cmd/herd/internal/sim"
)

// This file reads the retryPolicy, the hedgingPolicy and the retryThrottling of a gRPC service
// config, as gRFC A6 has them (#integration-with-service-config, #validation-of-retrypolicy,
// #validation-of-hedgingpolicy).

type serviceConfig struct {
	MethodConfig []struct {
		Name []struct {
			Service, Method string
		}
		RetryPolicy   *retryPolicy
		HedgingPolicy *hedgingPolicy
	}
	RetryThrottling *struct {
		MaxTokens, TokenRatio *float64
	}
}

type retryPolicy struct {
	MaxAttempts          *float64
	InitialBackoff       *string
	MaxBackoff           *string
	BackoffMultiplier    *float64
	RetryableStatusCodes []json.RawMessage
}

type hedgingPolicy struct {
	MaxAttempts         *float64
	HedgingDelay        *string
	NonFatalStatusCodes []json.RawMessage
}

// readPolicy returns a strategy for each retryPolicy and hedgingPolicy in a service config; with a
// method, only for the one that applies to it.
func readPolicy(path, method string) ([]sim.Strategy, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("-policy: %w", err)
	}
	all, err := parseServiceConfig(text, method)
	if err != nil {
		return nil, fmt.Errorf("-policy %s: %w", path, err)
	}
	return all, nil
}

func parseServiceConfig(text []byte, method string) (all []sim.Strategy, err error) {
	var config serviceConfig
	d := json.NewDecoder(bytes.NewReader(text))
	if err := d.Decode(&config); err != nil {
		return nil, fmt.Errorf("not a service config: %w", err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("something follows the service config, at byte %d", d.InputOffset())
	}
	budget := sim.Budget{Kind: sim.UnlimitedBudget}
	if t := config.RetryThrottling; t != nil {
		if budget, err = throttle(t.MaxTokens, t.TokenRatio); err != nil {
			return nil, err
		}
	}
	best := -1 // how closely the method's config matches
	for i, m := range config.MethodConfig {
		path := fmt.Sprintf("methodConfig[%d]", i)
		strategy := sim.Strategy{Budget: budget}
		switch {
		case m.RetryPolicy == nil && m.HedgingPolicy == nil:
			continue
		case m.RetryPolicy != nil && m.HedgingPolicy != nil:
			return nil, fmt.Errorf("%s has a retryPolicy and a hedgingPolicy, want one of them", path)
		case m.RetryPolicy != nil:
			strategy.Policy, err = m.RetryPolicy.policy(path + ".retryPolicy")
		default:
			strategy.Hedging, err = m.HedgingPolicy.hedging(path + ".hedgingPolicy")
		}
		if err != nil {
			return nil, err
		}
		name, fit := "", -1
		for _, n := range m.Name {
			full := "/" + n.Service + "/" + n.Method
			if n.Service == "" {
				full = "default"
			}
			if name == "" {
				name = full
			}
			fit = max(fit, fits(n.Service, n.Method, method))
		}
		if len(m.Name) == 0 {
			return nil, fmt.Errorf("%s.name is missing: it would apply to no method", path)
		}
		strategy.Name = "policy " + name
		switch {
		case method == "":
			all = append(all, strategy)
		case fit > best:
			best, all = fit, []sim.Strategy{strategy}
		}
	}
	if len(all) == 0 && method != "" {
		return nil, fmt.Errorf("there is no retryPolicy or hedgingPolicy for the method %s", method)
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("there is no retryPolicy or hedgingPolicy in methodConfig")
	}
	return all, nil
}

// fits returns how closely a name matches a method: exactly, by its service, by default, or not.
func fits(service, name, method string) int {
	switch {
	case method == "/"+service+"/"+name:
		return 2
	case name == "" && service != "" && strings.HasPrefix(method, "/"+service+"/"):
		return 1
	case name == "" && service == "":
		return 0
	default:
		return -1
	}
}

func throttle(maxTokens, tokenRatio *float64) (sim.Budget, error) {
	if maxTokens == nil || tokenRatio == nil {
		return sim.Budget{}, fmt.Errorf("retryThrottling needs maxTokens and tokenRatio")
	}
	b := sim.Budget{Kind: sim.ThrottleBudget, MaxTokens: *maxTokens, TokenRatio: *tokenRatio}
	if _, err := grpcretry.NewThrottle(*maxTokens, *tokenRatio); err != nil {
		return b, fmt.Errorf("retryThrottling: %w", err)
	}
	return b, nil
}

// policy returns the library's form of a retryPolicy: A6's backoff has a jitter of ±20%.
func (r *retryPolicy) policy(path string) (p grpcretry.Policy, err error) {
	if p.MaxAttempts, err = maxAttempts(path+".maxAttempts", r.MaxAttempts); err != nil {
		return p, err
	}
	b := grpcretry.Exponential{Jitter: grpcretry.ProportionalJitter}
	if b.Base, err = seconds(path+".initialBackoff", r.InitialBackoff); err != nil {
		return p, err
	}
	if b.Max, err = seconds(path+".maxBackoff", r.MaxBackoff); err != nil {
		return p, err
	}
	b.Base = min(b.Base, b.Max) // A6: min(initialBackoff × multiplier^n, maxBackoff)
	switch m := r.BackoffMultiplier; {
	case m == nil:
		return p, fmt.Errorf("%s.backoffMultiplier is missing", path)
	case *m <= 0:
		return p, fmt.Errorf("%s.backoffMultiplier is %v, want above 0", path, *m)
	case *m < 1:
		return p, fmt.Errorf("%s.backoffMultiplier is %v: this library has no backoff that shrinks", path, *m)
	default:
		b.Multiplier = *m
	}
	p.Backoff = b
	if len(r.RetryableStatusCodes) == 0 {
		return p, fmt.Errorf("%s.retryableStatusCodes is missing or empty", path)
	}
	p.Codes, err = statusCodes(path+".retryableStatusCodes", r.RetryableStatusCodes)
	return p, err
}

// hedging returns the library's form of a hedgingPolicy. Without a hedgingDelay all attempts are
// sent immediately, and without nonFatalStatusCodes every failure ends the call.
func (h *hedgingPolicy) hedging(path string) (*sim.Hedging, error) {
	out := &sim.Hedging{Kind: sim.HedgeAfter}
	var err error
	if out.MaxAttempts, err = maxAttempts(path+".maxAttempts", h.MaxAttempts); err != nil {
		return nil, err
	}
	if text := h.HedgingDelay; text != nil {
		d, err := time.ParseDuration(*text)
		if err != nil || !protoDuration.MatchString(*text) {
			return nil, fmt.Errorf("%s.hedgingDelay is %q, want seconds, such as \"0.1s\"", path, *text)
		}
		out.Delay = d
	}
	out.NonFatalCodes, err = statusCodes(path+".nonFatalStatusCodes", h.NonFatalStatusCodes)
	return out, err
}

func maxAttempts(path string, n *float64) (int, error) {
	switch {
	case n == nil:
		return 0, fmt.Errorf("%s is missing", path)
	case *n != math.Trunc(*n) || *n < 2:
		return 0, fmt.Errorf("%s is %v, want a whole number of at least 2", path, *n)
	default:
		return int(min(*n, 5)), nil // gRPC reduces more than 5 to 5
	}
}

// statusCodes never returns nil.
func statusCodes(path string, list []json.RawMessage) ([]codes.Code, error) {
	all := []codes.Code{}
	for i, raw := range list {
		c, err := statusCode(raw)
		if err != nil {
			return nil, fmt.Errorf("%s[%d]: %w", path, i, err)
		}
		all = append(all, c)
	}
	return all, nil
}

// protoDuration reads a google.protobuf.Duration in JSON.
var protoDuration = regexp.MustCompile(`^[0-9]+(\.[0-9]{1,9})?s$`)

func seconds(path string, text *string) (time.Duration, error) {
	if text == nil {
		return 0, fmt.Errorf("%s is missing", path)
	}
	d, err := time.ParseDuration(*text)
	if err != nil || !protoDuration.MatchString(*text) || d <= 0 {
		return 0, fmt.Errorf("%s is %q, want seconds above 0, such as \"0.1s\"", path, *text)
	}
	return d, nil
}

// statusCode reads a name, in upper or lower case, or a number.
func statusCode(raw json.RawMessage) (c codes.Code, err error) {
	if n, err := strconv.ParseUint(string(raw), 10, 32); err == nil {
		raw = []byte(strconv.FormatUint(n, 10))
	} else {
		raw = bytes.ToUpper(raw)
	}
	if err := c.UnmarshalJSON(raw); err != nil || c == codes.OK {
		return c, fmt.Errorf("%s is not a status code that can be retried", raw)
	}
	return c, nil
}
