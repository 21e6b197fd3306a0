package grpcretry

import (
	"context"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"
)

// A Retrier that New has not made says so: when it is given to a client, in general, and not at a call.
func TestUnusableRetrier(t *testing.T) {
	for name, r := range map[string]*Retrier{"nil": nil, "zero": {}} {
		for method, use := range map[string]func(){
			"UnaryClientInterceptor":  func() { r.UnaryClientInterceptor() },
			"StreamClientInterceptor": func() { r.StreamClientInterceptor() },
			"DialOptions":             func() { r.DialOptions() },
			"Policy":                  func() { r.Policy("/pkg.Service/Method") },
			"Update":                  func() { panic(r.Update(WithMaxAttempts(2))) },
			"Do":                      func() { panic(r.Do(t.Context(), "/sql/read", func(context.Context) error { return nil })) },
		} {
			func() {
				defer func() {
					said := fmt.Sprint(recover())
					if want := "the Retrier is " + name + ": create it with New"; !strings.HasSuffix(said, want) {
						t.Errorf("%s of a %s Retrier: %q, want … %q", method, name, said, want)
					}
				}()
				use()
			}()
		}
	}
}

// The waits of a policy are added up, but not one by one.
func TestThePatienceForManyWaits(t *testing.T) {
	for _, tt := range []struct {
		backoff  Backoff
		attempts int
		want     time.Duration
	}{
		{Constant(time.Microsecond), math.MaxInt32, 2 * 2147484 * time.Millisecond},
		{Constant(2 * second), 4, 12 * second},
		{Exponential{Base: second, Max: 10 * second}, 7, 2 * (1 + 2 + 4 + 8 + 10 + 10) * second},
		{Exponential{Base: second, Max: 10 * second}, 1001, 2 * (1 + 2 + 4 + 8 + 996*10) * second},
		// 1 + 1.5 + 2.25 + 3.375 + 5.0625 s
		{Exponential{Base: second, Max: time.Hour, Multiplier: 1.5, Jitter: NoJitter}, 6, 2 * 13188 * time.Millisecond},
		// 0, 1 µs, 1 ms, 1 s, 1 min
		{Exponential{Base: 1, Max: time.Minute, Multiplier: 1000}, 6, 2 * 61001 * time.Millisecond},
		{Exponential{Base: 1, Max: time.Hour, Multiplier: 1 + 1e-7}, 1_000_000_000, 48 * time.Hour}, // adding up each of them would take minutes
		{Constant(30 * time.Hour), 4, 48 * time.Hour},
	} {
		want := max(tt.want, defaultPatience)
		if got := retrierOf(t, WithMaxAttempts(tt.attempts), WithBackoff(tt.backoff)).Policy(someMethod).Patience; got != want {
			t.Errorf("%+v, %d attempts: Patience = %v, want %v, twice the waits", tt.backoff, tt.attempts, got, want)
		}
	}
}
