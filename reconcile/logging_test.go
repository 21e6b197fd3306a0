package reconcile_test

import (
	"bytes"
	"errors"
	"log/slog"
	"regexp"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/time/rate"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/reconcile"
)

// logged returns an option and a function that returns the lines so far, without their time, and empties the log.
func logged() (reconcile.Option, func() []string) {
	var log bytes.Buffer
	handler := slog.NewTextHandler(&log, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return a
	}})
	return reconcile.WithLogger(slog.New(handler)), func() []string {
		lines := strings.Split(strings.TrimSuffix(log.String(), "\n"), "\n")
		log.Reset()
		return lines
	}
}

func TestLog(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		option, lines := logged()
		r := newRetrier(t, grpcretry.WithBudget(ratio(t, 1, 1)), grpcretry.WithBackoff(grpcretry.Constant(0)))
		limiter := reconcile.NewRateLimiter[string](r, name, option, reconcile.WithSlowLane(reconcile.SlowLane{
			Rate: rate.Inf, Backoff: grpcretry.Exponential{Base: time.Second, Max: 100 * time.Second, Multiplier: 100, Jitter: grpcretry.NoJitter}}))
		for range 100 {
			limiter.Failed("shop/a", errors.New("orders are down"))
			time.Sleep(limiter.When("shop/a"))
		}
		limiter.Forget("shop/a")
		time.Sleep(10 * time.Second)
		limiter.When("shop/b")
		want := []string{
			`level=INFO msg="grpcretry: key fails" name=/reconcile/orders key=shop/a wait=0s reason=backoff error="orders are down"`,
			`level=WARN msg="grpcretry: retry budget is empty, failing keys wait in the slow lane" name=/reconcile/orders`,
			`level=INFO msg="grpcretry: key's backoff grows" name=/reconcile/orders key=shop/a wait=1s passed=1s failures=2 reason=budget`,
			`level=INFO msg="grpcretry: key's backoff grows" name=/reconcile/orders key=shop/a wait=1m40s passed=1m0s failures=3 reason=budget`,
			`level=WARN msg="grpcretry: key fails repeatedly" name=/reconcile/orders key=shop/a failures=10` +
				` wait=1m40s reason=exhausted error="orders are down"`,
			`level=WARN msg="grpcretry: key fails repeatedly" name=/reconcile/orders key=shop/a failures=100` +
				` wait=1m40s reason=exhausted error="orders are down"`,
			`level=INFO msg="grpcretry: retry budget pays again" name=/reconcile/orders`,
			`level=INFO msg="grpcretry: key fails" name=/reconcile/orders key=shop/b wait=0s reason=backoff error="reconciliation failed"`,
		}
		if got := lines(); strings.Join(got, "\n") != strings.Join(want, "\n") {
			t.Errorf("the log is\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
	})
}

// Ten thousand keys that fail together write ten lines of each kind, and then one a second that says how
// many are missing. A long key is cut.
// A key that does not return has no wait.
func TestLogOfTerminalError(t *testing.T) {
	option, lines := logged()
	limiter := reconcile.NewRateLimiter[string](newRetrier(t), name, option)
	limiter.Result("shop/a", grpcretry.Permanent(errors.New("no such shop")))
	want := `level=INFO msg="grpcretry: key fails" name=/reconcile/orders key=shop/a wait=0s reason=terminal error="no such shop"`
	if got := lines(); len(got) != 1 || got[0] != want {
		t.Errorf("the log is %q, want %q", got, want)
	}
}

func TestLogIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		option, lines := logged()
		limiter := reconcile.NewRateLimiter[int](newRetrier(t), name, option)
		for item := range 10000 {
			limiter.When(item)
		}
		got := lines()
		if len(got) != 10+10+1 {
			t.Errorf("%d lines, want 10 first failures, 10 backoffs, and one about the budget", len(got))
		}
		time.Sleep(time.Second)
		limiter.When(10000)
		if got := lines(); len(got) != 2 || !strings.HasSuffix(got[0], "suppressed=9990") {
			t.Errorf("a second later: %q, want the number of lines that were suppressed", got)
		}

		option, lines = logged()
		long := reconcile.NewRateLimiter[string](newRetrier(t), name, option)
		long.Failed(strings.Repeat("é", 200), errors.New(strings.Repeat("x", 300)))
		if got, want := strings.Join(lines(), ""),
			regexp.MustCompile(`key=é{128}… wait=\S+ reason=backoff error=x{256}…$`); !want.MatchString(got) {
			t.Errorf("the line is %s, want key and error cut", got)
		}
	})
}
