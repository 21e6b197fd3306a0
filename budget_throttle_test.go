package grpcretry

import (
	"encoding/json"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
)

func throttleOf(t *testing.T, maxTokens, tokenRatio float64) *throttle {
	t.Helper()
	b, err := NewThrottle(maxTokens, tokenRatio)
	if err != nil {
		t.Fatal(err)
	}
	return b.(*throttle)
}

var resultsByName = map[string]Result{"succeeded": Succeeded, "failed": Failed, "ignored": Ignored}

func TestThrottleCountsAsA6(t *testing.T) {
	for _, c := range readJSON[struct {
		Name       string
		MaxTokens  float64 `json:"max_tokens"`
		TokenRatio float64 `json:"token_ratio"`
		Steps      []struct {
			Result       string
			TokensAfter  json.Number `json:"tokens_after"`
			AllowedAfter bool        `json:"allowed_after"`
		}
	}](t, "testdata/a6/throttle.json") {
		t.Run(c.Name, func(t *testing.T) {
			b := throttleOf(t, c.MaxTokens, c.TokenRatio)
			for i, step := range c.Steps {
				result, known := resultsByName[step.Result]
				if !known {
					t.Fatalf("step %d: unknown result %q", i+1, step.Result)
				}
				// A6 counts all attempts alike, including retries.
				b.Deposit(Outcome{Attempt: i%3 + 1, Result: result})
				want := inThousandths(t, step.TokensAfter.String())
				if got := b.tokens.Load(); got != want {
					t.Fatalf("step %d, %s: %d thousandths of a token, want %d", i+1, step.Result, got, want)
				}
				if got := b.Withdraw(epoch); got != step.AllowedAfter {
					t.Errorf("step %d, %s: Withdraw = %t, want %t", i+1, step.Result, got, step.AllowedAfter)
				}
				if got := b.tokens.Load(); got != want {
					t.Errorf("step %d: Withdraw took tokens, %d are left of %d", i+1, got, want)
				}
				retries := 0.0 // that can fail one after the other
				for left := 2*want - b.full; left > 0; left -= 2000 {
					retries++
				}
				if got := b.Balance(epoch); got != retries {
					t.Errorf("step %d: Balance = %v, want %v", i+1, got, retries)
				}
			}
		})
	}
}

// inThousandths reads a decimal with at most three places, without going through float64.
func inThousandths(t *testing.T, s string) int64 {
	t.Helper()
	whole, places, _ := strings.Cut(s, ".")
	if len(places) > 3 {
		t.Fatalf("%s has more than three decimals", s)
	}
	n, err := strconv.ParseInt(whole+places+strings.Repeat("0", 3-len(places)), 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// In a call through the interceptor, the second failure brings 4 tokens down to half, and the
// throttle refuses a retry that MaxAttempts would still allow.
func TestThrottleThroughTheInterceptor(t *testing.T) {
	bubble(t, func(t *testing.T) {
		b := throttleOf(t, 4, 1)
		server := serve(t, func(n int) answer {
			if n == 3 {
				return fail(codes.PermissionDenied, "not retryable, so not counted")
			}
			return unavailable()
		})
		cc := server.client(t, steady, WithBudget(b), WithMaxAttempts(10))
		_, err := cc.Echo(t.Context(), request()) // 4 → 3: above 2; → 2: not above
		wantStop(t, err, codes.Unavailable, ErrBudgetExhausted, 2)
		wantTimes(t, server, 0, time.Second)
		if _, err := cc.Echo(t.Context(), request()); err == nil {
			t.Error("Echo succeeded")
		}
		if got := b.tokens.Load(); got != 2000 {
			t.Errorf("%d thousandths after two failures and one that is none, want 2000", got)
		}
	})
}

// What a service config may say, a throttle takes: both round to thousandths.
func TestAThrottleOfHardlyMoreThanNothing(t *testing.T) {
	retrierOf(t, WithServiceConfig(`{"methodConfig": [], "retryThrottling": {"maxTokens": 0.0009999999, "tokenRatio": 0.0009999999}}`))
	throttleOf(t, 0.0009999999, 0.0009999999)
	throttleOf(t, 1000, 1e300)
}
