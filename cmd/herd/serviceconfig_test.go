package main

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/cmd/herd/internal/sim"
)

const goodPolicy = `"maxAttempts": 4, "initialBackoff": "0.1s", "maxBackoff": "1s", "backoffMultiplier": 2, ` +
	`"retryableStatusCodes": ["UNAVAILABLE"]`

func configOf(policy, rest string) string {
	return fmt.Sprintf(`{"methodConfig": [{"name": [{"service": "shop.Cart"}], "retryPolicy": {%s}}]%s}`, policy, rest)
}

func TestServiceConfigBecomesAStrategy(t *testing.T) {
	got, err := policyStrategies(`{
		"loadBalancingConfig": [{"round_robin": {}}],
		"methodConfig": [
			{"name": [{"service": "shop.Cart", "method": "Get"}, {"service": "shop.Cart", "method": "List"}], "timeout": "1s",
			 "retryPolicy": {"maxAttempts": 9, "initialBackoff": "0.25s", "maxBackoff": "10s", "backoffMultiplier": 1.5,
			                 "retryableStatusCodes": ["unavailable", 8, "DEADLINE_EXCEEDED"]}},
			{"name": [{"service": "shop.Cart", "method": "Buy"}], "timeout": "1s"},
			{"name": [{}], "retryPolicy": {`+goodPolicy+`}}],
		"retryThrottling": {"maxTokens": 10, "tokenRatio": 0.1}}`, "")
	if err != nil {
		t.Fatal(err)
	}
	throttle := sim.Budget{Kind: sim.ThrottleBudget, MaxTokens: 10, TokenRatio: 0.1}
	want := []sim.Strategy{
		{Name: "policy /shop.Cart/Get", Budget: throttle, Policy: grpcretry.Policy{
			Patience:    noPatience,
			MaxAttempts: 5, // gRPC's limit
			Backoff: grpcretry.Exponential{
				Base:       250 * time.Millisecond,
				Max:        10 * time.Second,
				Multiplier: 1.5,
				Jitter:     grpcretry.ProportionalJitter,
			},
			Codes: []codes.Code{codes.Unavailable, codes.ResourceExhausted, codes.DeadlineExceeded},
		}},
		{Name: "policy default", Budget: throttle, Policy: grpcretry.Policy{
			Patience:    noPatience,
			MaxAttempts: 4,
			Backoff:     grpcretry.Exponential{Base: 100 * time.Millisecond, Max: time.Second, Multiplier: 2, Jitter: grpcretry.ProportionalJitter},
			Codes:       []codes.Code{codes.Unavailable},
		}},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("strategies %+v, want %+v", got, want)
	}
}

// A6 #hedging-policy: without a delay all attempts are sent immediately, and without codes every failure is fatal.
func TestHedgingPolicyBecomesAStrategy(t *testing.T) {
	of := func(policy string) ([]sim.Strategy, error) {
		return policyStrategies(`{"methodConfig": [{"name": [{"service": "shop.Cart"}], "hedgingPolicy": {`+policy+`}}]}`, "")
	}
	for policy, want := range map[string]struct {
		delay    time.Duration
		attempts int
		codes    []codes.Code
	}{
		`"maxAttempts": 3, "hedgingDelay": "0.5s", "nonFatalStatusCodes": ["unavailable", 13]`: {500 * time.Millisecond, 3,
			[]codes.Code{codes.Unavailable, codes.Internal}},
		`"maxAttempts": 9`: {attempts: 5},
	} {
		got, err := of(policy)
		if err != nil || len(got) != 1 || got[0].Name != "policy /shop.Cart/" || got[0].Budget.Kind != sim.UnlimitedBudget {
			t.Fatalf("hedgingPolicy %s: %+v, %v", policy, got, err)
		}
		h, p := got[0].Hedging, got[0].Policy
		if h.Kind != sim.HedgeAfter || h.Delay != want.delay || p.MaxAttempts != want.attempts ||
			!slices.Equal(p.Codes, want.codes) || (p.Classifier == nil) != (want.codes != nil) || p.Patience != noPatience {
			t.Errorf("hedgingPolicy %s: %+v, %+v; want %+v", policy, h, p, want)
		}
	}
}

func TestServiceConfigOfAMethod(t *testing.T) {
	config := `{"methodConfig": [
		{"name": [{}], "retryPolicy": {` + goodPolicy + `}},
		{"name": [{"service": "shop.Cart"}], "retryPolicy": {` + goodPolicy + `}},
		{"name": [{"service": "shop.Cart", "method": "Get"}], "retryPolicy": {` + goodPolicy + `}}]}`
	for method, want := range map[string]string{
		"/shop.Cart/Get":  "policy /shop.Cart/Get",
		"/shop.Cart/List": "policy /shop.Cart/",
		"/shop.Till/Pay":  "policy default",
	} {
		got, err := policyStrategies(config, method)
		if err != nil || len(got) != 1 || got[0].Name != want {
			t.Errorf("for %s: %+v, %v; want %s alone", method, got, err, want)
		}
	}
	if _, err := policyStrategies(
		configOf(goodPolicy, ""),
		"/other.Service/Method",
	); err == nil ||
		!contains(err.Error(), "no retryPolicy or hedgingPolicy for the method /other.Service/Method") {
		t.Errorf("for a method without one: %v, want an error that names it", err)
	}
}

// What the reader rejects is an error with the file's name; its own tests have the rest.
func TestServiceConfigIsRejected(t *testing.T) {
	for _, tt := range []struct{ config, method, want string }{
		{"{} 7", "", "line 1, column 4: not JSON"},
		{"{}", "", "there is no retryPolicy or hedgingPolicy in methodConfig"},
		{"{}", "/a/b", "there is no retryPolicy or hedgingPolicy for the method /a/b"},
		{configOf(strings.Replace(goodPolicy, "UNAVAILABLE", "BUSY", 1), ""), "",
			`methodConfig[0].retryPolicy.retryableStatusCodes[0]: "BUSY" is not a status code`},
		{strings.Replace(configOf(goodPolicy, ""), `"name"`, `"names"`, 1), "",
			"there is no retryPolicy or hedgingPolicy in methodConfig; " +
				`methodConfig[0]: the key "names" is unknown, so it is ignored; methodConfig[0].name: missing, so the entry applies to no method`},
		{`{"methodConfig": [{"name": [{}], "retryPolicy": {` + goodPolicy + `}}, {"name": [{"service": "a", "method": "b"}]}]}`, "/a/b",
			"there is no retryPolicy or hedgingPolicy for the method /a/b"}, // one entry applies
	} {
		file := filepath.Join(t.TempDir(), "config.json")
		if err := os.WriteFile(file, []byte(tt.config), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := readPolicy(file, tt.method); err == nil || !strings.HasPrefix(err.Error(), "-policy "+file+": "+tt.want) {
			t.Errorf("readPolicy of %s for %q = %v, want an error with %q", tt.config, tt.method, err, tt.want)
		}
	}
	if _, err := readPolicy(filepath.Join(t.TempDir(), "none.json"), ""); err == nil || !strings.HasPrefix(err.Error(), "-policy: ") {
		t.Errorf("readPolicy without a file = %v, want an error that names the flag", err)
	}
}

// A6's min(initialBackoff × multiplier^(n-1), maxBackoff), whichever of the two is larger.
func TestBackoffsOfAServiceConfig(t *testing.T) {
	for _, tt := range []struct {
		initial, longest, multiplier string
		want                         []time.Duration // in the middle of the jitter
	}{
		{"1s", "3s", "2", []time.Duration{time.Second, 2 * time.Second, 3 * time.Second}},
		{"4s", "3s", "2", []time.Duration{3 * time.Second, 3 * time.Second, 3 * time.Second}},
		{"4s", "9s", "0.5", []time.Duration{4 * time.Second, 2 * time.Second, time.Second}},
		{"4s", "3s", "0.5", []time.Duration{3 * time.Second, 2 * time.Second, time.Second}},
	} {
		config := configOf(
			fmt.Sprintf(`"maxAttempts": 4, "initialBackoff": %q, "maxBackoff": %q, "backoffMultiplier": %s, "retryableStatusCodes": [14]`,
				tt.initial, tt.longest, tt.multiplier),
			"",
		)
		all, err := policyStrategies(config, "")
		if err != nil {
			t.Fatal(err)
		}
		for i, want := range tt.want {
			if got := all[0].Policy.Backoff.Delay(i+1, 0, 0.5); got != want {
				t.Errorf("%s to %s × %s: wait %d is %v, want %v", tt.initial, tt.longest, tt.multiplier, i+1, got, want)
			}
		}
		scenario := smallOutage()
		scenario.Strategies = all
		if err := scenario.Check(); err != nil {
			t.Errorf("%s is accepted and then rejected: %v", config, err)
		}
	}
}

// OK is the only code: nothing is retried, as in grpc-go.
func TestServiceConfigThatRetriesNothing(t *testing.T) {
	all, err := policyStrategies(configOf(strings.Replace(goodPolicy, "UNAVAILABLE", "OK", 1), ""), "")
	if err != nil || len(all) != 1 || !reflect.DeepEqual(all[0].Policy, grpcretry.Policy{MaxAttempts: 1}) {
		t.Errorf("strategies %+v, %v; want one with a single attempt", all, err)
	}
}

func TestPolicyIsComparedToo(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config.json")
	if err := os.WriteFile(file, []byte(configOf(goodPolicy, "")), 0o600); err != nil {
		t.Fatal(err)
	}
	out, errs, status := herd(t, "-policy", file, "-strategy", "policy,full")
	if status != 0 || !contains(out, "policy /shop.Cart/") || !contains(out, "full jitter") {
		t.Errorf("herd -policy: status %d, %s\n%s", status, errs, out)
	}
}

// Whatever the file says, no panic, and a strategy that can be run.
func FuzzServiceConfig(f *testing.F) {
	f.Add(configOf(goodPolicy, ""), "")
	f.Add(configOf(strings.Replace(goodPolicy, `2, "retry`, `0.5, "retry`, 1), ""), "")
	f.Add(
		configOf(`"maxAttempts": 2, "initialBackoff": "9s", "maxBackoff": "1s", "backoffMultiplier": 5e-324, "retryableStatusCodes": ["OK"]`, ""),
		"",
	)
	f.Add(configOf(goodPolicy, `, "retryThrottling": {"maxTokens": 0.0010001, "tokenRatio": 1e300}`), "")
	f.Add(configOf(goodPolicy, `, "retryThrottling": {"maxTokens": 10, "tokenRatio": 0.1}`), "/shop.Cart/Get")
	f.Add(`{"methodConfig": [{"name": [{}], "hedgingPolicy": {"maxAttempts": 3, "hedgingDelay": "0.1s", "nonFatalStatusCodes": [14]}}]}`, "")
	f.Add(`{"methodConfig": [{"name": [{}], "retryPolicy": {"retryableStatusCodes": [1e99]}}]}`, "")
	f.Fuzz(func(t *testing.T, config, method string) {
		all, err := policyStrategies(config, method)
		if err != nil {
			return
		}
		for _, s := range all {
			scenario := smallOutage()
			scenario.Strategies = []sim.Strategy{s}
			if err := scenario.Check(); err != nil {
				t.Errorf("%s is accepted and then rejected: %v", config, err)
			}
		}
	})
}
