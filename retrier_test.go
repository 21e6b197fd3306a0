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
func TestThePatienceForEndlessWaits(t *testing.T) {
	r := retrierOf(t, WithMaxAttempts(math.MaxInt32), WithBackoff(Constant(time.Microsecond)))
	if got, want := r.Policy(someMethod).Patience, 2*2147484*time.Millisecond; got != want {
		t.Errorf("Patience = %v, want %v, twice the waits", got, want)
	}
}
