package main

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/cmd/herd/internal/sim"
)

const goodPolicy = `"maxAttempts": 4, "initialBackoff": "0.1s", "maxBackoff": "1s", "backoffMultiplier": 2, "retryableStatusCodes": ["UNAVAILABLE"]`

func configOf(policy, rest string) string {
	return fmt.Sprintf(`{"methodConfig": [{"name": [{"service": "shop.Cart"}], "retryPolicy": {%s}}]%s}`, policy, rest)
}

func TestServiceConfigBecomesAStrategy(t *testing.T) {
	got, err := parseServiceConfig([]byte(`{
		"loadBalancingConfig": [{"round_robin": {}}],
		"methodConfig": [
			{"name": [{"service": "shop.Cart", "method": "Get"}, {"service": "shop.Cart", "method": "List"}], "timeout": "1s",
			 "retryPolicy": {"maxAttempts": 9, "initialBackoff": "0.25s", "maxBackoff": "10s", "backoffMultiplier": 1.5,
			                 "retryableStatusCodes": ["unavailable", 8, "DEADLINE_EXCEEDED"]}},
			{"name": [{"service": "shop.Cart", "method": "Buy"}], "timeout": "1s"},
			{"name": [{}], "retryPolicy": {`+goodPolicy+`}}],
		"retryThrottling": {"maxTokens": 10, "tokenRatio": 0.1}}`), "")
	if err != nil {
		t.Fatal(err)
	}
	throttle := sim.Budget{Kind: sim.ThrottleBudget, MaxTokens: 10, TokenRatio: 0.1}
	want := []sim.Strategy{
		{Name: "policy /shop.Cart/Get", Budget: throttle, Policy: grpcretry.Policy{
			MaxAttempts: 5, // gRPC's limit
			Backoff:     grpcretry.Exponential{Base: 250 * time.Millisecond, Max: 10 * time.Second, Multiplier: 1.5, Jitter: grpcretry.ProportionalJitter},
			Codes:       []codes.Code{codes.Unavailable, codes.ResourceExhausted, codes.DeadlineExceeded},
		}},
		{Name: "policy default", Budget: throttle, Policy: grpcretry.Policy{
			MaxAttempts: 4,
			Backoff:     grpcretry.Exponential{Base: 100 * time.Millisecond, Max: time.Second, Multiplier: 2, Jitter: grpcretry.ProportionalJitter},
			Codes:       []codes.Code{codes.Unavailable},
		}},
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("strategies %+v, want %+v", got, want)
	}
}

// A6 #hedging-policy: what is left out means at once, and every failure is fatal.
func TestHedgingPolicyBecomesAStrategy(t *testing.T) {
	of := func(policy string) ([]sim.Strategy, error) {
		return parseServiceConfig([]byte(`{"methodConfig": [{"name": [{"service": "shop.Cart"}], "hedgingPolicy": {`+policy+`}}]}`), "")
	}
	for policy, want := range map[string]sim.Hedging{
		`"maxAttempts": 3, "hedgingDelay": "0.5s", "nonFatalStatusCodes": ["unavailable", 13]`: {MaxAttempts: 3, Delay: 500 * time.Millisecond,
			NonFatalCodes: []codes.Code{codes.Unavailable, codes.Internal}},
		`"maxAttempts": 9`: {MaxAttempts: 5, NonFatalCodes: []codes.Code{}},
	} {
		want.Kind = sim.HedgeAfter
		got, err := of(policy)
		if err != nil || len(got) != 1 || !reflect.DeepEqual(got[0].Hedging, &want) || got[0].Name != "policy /shop.Cart/" || got[0].Budget.Kind != sim.UnlimitedBudget {
			t.Errorf("hedgingPolicy %s: %+v, %v; want %+v", policy, got, err, want)
		}
	}
	for policy, want := range map[string]string{
		``:                 "methodConfig[0].hedgingPolicy.maxAttempts is missing",
		`"maxAttempts": 1`: "hedgingPolicy.maxAttempts is 1, want a whole number of at least 2",
		`"maxAttempts": 2, "hedgingDelay": "-1s"`:         `hedgingPolicy.hedgingDelay is "-1s", want seconds`,
		`"maxAttempts": 2, "hedgingDelay": "5ms"`:         `hedgingPolicy.hedgingDelay is "5ms", want seconds`,
		`"maxAttempts": 2, "nonFatalStatusCodes": ["OK"]`: `hedgingPolicy.nonFatalStatusCodes[0]: "OK" is not a status code`,
	} {
		if _, err := of(policy); err == nil || !contains(err.Error(), want) {
			t.Errorf("hedgingPolicy %s: %v, want an error with %q", policy, err, want)
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
		got, err := parseServiceConfig([]byte(config), method)
		if err != nil || len(got) != 1 || got[0].Name != want {
			t.Errorf("for %s: %+v, %v; want %s alone", method, got, err, want)
		}
	}
	if _, err := parseServiceConfig([]byte(configOf(goodPolicy, "")), "/other.Service/Method"); err == nil || !contains(err.Error(), "no retryPolicy or hedgingPolicy for the method /other.Service/Method") {
		t.Errorf("for a method without one: %v, want an error that names it", err)
	}
}

// A6 #validation-of-retrypolicy: every field that is missing or cannot be meant.
func TestServiceConfigIsValidated(t *testing.T) {
	without := func(field string) string {
		var kept []string
		for _, part := range strings.Split(goodPolicy, ", ") {
			if !strings.HasPrefix(part, `"`+field) {
				kept = append(kept, part)
			}
		}
		return configOf(strings.Join(kept, ", "), "")
	}
	with := func(field, value string) string {
		return strings.Replace(without(field), `"retryPolicy": {`, `"retryPolicy": {"`+field+`": `+value+", ", 1)
	}
	for _, tt := range []struct{ config, want string }{
		{"", "not a service config"},
		{"{} 7", "something follows"},
		{"{}", "there is no retryPolicy or hedgingPolicy in methodConfig"},
		{without("maxAttempts"), "methodConfig[0].retryPolicy.maxAttempts is missing"},
		{with("maxAttempts", "1"), "maxAttempts is 1, want a whole number of at least 2"},
		{with("maxAttempts", "2.5"), "maxAttempts is 2.5, want a whole number"},
		{with("maxAttempts", `"4"`), "not a service config"},
		{without("initialBackoff"), "initialBackoff is missing"},
		{with("initialBackoff", `"100ms"`), `initialBackoff is "100ms", want seconds above 0`},
		{with("initialBackoff", `"0s"`), `initialBackoff is "0s", want seconds above 0`},
		{with("initialBackoff", `"-1s"`), `initialBackoff is "-1s", want seconds above 0`},
		{without("maxBackoff"), "maxBackoff is missing"},
		{without("backoffMultiplier"), "backoffMultiplier is missing"},
		{with("backoffMultiplier", "0"), "backoffMultiplier is 0, want above 0"},
		{with("backoffMultiplier", "0.5"), "backoffMultiplier is 0.5: this library has no backoff that shrinks"},
		{without("retryableStatusCodes"), "retryableStatusCodes is missing or empty"},
		{with("retryableStatusCodes", `[]`), "retryableStatusCodes is missing or empty"},
		{with("retryableStatusCodes", `["BUSY"]`), "retryableStatusCodes[0]: \"BUSY\" is not a status code"},
		{with("retryableStatusCodes", `["OK"]`), "retryableStatusCodes[0]: \"OK\" is not a status code that can be retried"},
		{with("retryableStatusCodes", `[14, 99]`), "retryableStatusCodes[1]: 99 is not a status code"},
		{configOf(goodPolicy, `, "retryThrottling": {"maxTokens": 10}`), "retryThrottling needs maxTokens and tokenRatio"},
		{configOf(goodPolicy, `, "retryThrottling": {"maxTokens": 2000, "tokenRatio": 1}`), "maxTokens is 2000"},
		{strings.Replace(configOf(goodPolicy, ""), `"retryPolicy"`, `"hedgingPolicy": {}, "retryPolicy"`, 1), "a retryPolicy and a hedgingPolicy"},
		{strings.Replace(configOf(goodPolicy, ""), `[{"service": "shop.Cart"}]`, `[]`, 1), "methodConfig[0].name is missing"},
	} {
		if _, err := parseServiceConfig([]byte(tt.config), ""); err == nil || !contains(err.Error(), tt.want) {
			t.Errorf("parseServiceConfig(%s) = %v, want an error with %q", tt.config, err, tt.want)
		}
	}
	shrunk := configOf(strings.Replace(goodPolicy, `"0.1s"`, `"5s"`, 1), "")
	if got, err := parseServiceConfig([]byte(shrunk), ""); err != nil || got[0].Policy.Backoff.(grpcretry.Exponential).Base != time.Second {
		t.Errorf("initialBackoff over maxBackoff: %+v, %v; want maxBackoff", got, err)
	}
}

func TestPolicyIsComparedToo(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config.json")
	if err := os.WriteFile(file, []byte(configOf(goodPolicy, "")), 0o600); err != nil {
		t.Fatal(err)
	}
	out, errs, status := herd(t, "-policy", file, "-strategy", "policy,full", "-charts=false")
	if status != 0 || !contains(out, "policy /shop.Cart/") || !contains(out, "full jitter") {
		t.Errorf("herd -policy: status %d, %s\n%s", status, errs, out)
	}
}

// Whatever the file says, no panic, and a strategy that can be run.
func FuzzServiceConfig(f *testing.F) {
	f.Add(configOf(goodPolicy, ""), "")
	f.Add(configOf(goodPolicy, `, "retryThrottling": {"maxTokens": 10, "tokenRatio": 0.1}`), "/shop.Cart/Get")
	f.Add(`{"methodConfig": [{"name": [{}], "hedgingPolicy": {"maxAttempts": 3, "hedgingDelay": "0.1s", "nonFatalStatusCodes": [14]}}]}`, "")
	f.Add(`{"methodConfig": [{"name": [{}], "retryPolicy": {"retryableStatusCodes": [1e99]}}]}`, "")
	f.Fuzz(func(t *testing.T, config, method string) {
		all, err := parseServiceConfig([]byte(config), method)
		if err != nil {
			return
		}
		for _, s := range all {
			scenario := smallOutage()
			scenario.Strategies = []sim.Strategy{s}
			if err := scenario.Check(); err != nil {
				t.Errorf("%s is accepted and then refused: %v", config, err)
			}
		}
	})
}
