package reconcile_test

import (
	"errors"
	"fmt"
	"math"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	ctrl "sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/reconcile"
)

func tooManyRequests(seconds int) error {
	return apierrors.NewTooManyRequests("slow down", seconds)
}

func pushback(values ...string) error {
	return &grpcretry.Error{Last: statusError(codes.Unavailable, 0), Reason: grpcretry.ErrAttemptsExhausted,
		Attempts: []grpcretry.Attempt{{}, {Trailer: metadata.MD{"grpc-retry-pushback-ms": values}}}}
}

// A noCode error has a status whose code was never set.
type noCode struct{ error }

func (noCode) GRPCStatus() *status.Status { return status.New(codes.OK, "") }

func TestResult(t *testing.T) {
	plain := errors.New("plain")
	for _, tt := range []struct {
		name     string
		err      error
		min, max time.Duration // of RequeueAfter
		terminal bool
	}{
		{"pushback", pushback("7000"), 7 * time.Second, 7 * time.Second, false},
		{"pushback of no time", pushback("0"), 1, 1, false},
		{"pushback says no", pushback("-1"), 0, 0, false},
		{"repeated pushback says no", pushback("1", "1"), 0, 0, false},
		{"pushback over the limit", pushback("300001"), 0, 0, false},
		{"RetryInfo", statusError(codes.Unavailable, 10*time.Second), 10 * time.Second, 12 * time.Second, false},
		{"RetryInfo with any code", statusError(codes.Internal, 10*time.Second), 10 * time.Second, 12 * time.Second, false},
		{"RetryInfo over the limit", statusError(codes.Unavailable, time.Hour), 0, 0, false},
		{"too many requests", tooManyRequests(5), 5 * time.Second, 6 * time.Second, false},
		{"server timeout", apierrors.NewServerTimeout(schemaResource, "get", 3), 3 * time.Second, 3600 * time.Millisecond, false},
		{"Kubernetes without a wait", tooManyRequests(0), 0, 0, false},
		{"Kubernetes over the limit", tooManyRequests(math.MaxInt32), 0, 0, false},
		{"conflict", apierrors.NewConflict(schemaResource, "a", plain), 0, 0, false},
		{"permanent", grpcretry.Permanent(plain), 0, 0, true},
		{"permanent with RetryInfo", grpcretry.Permanent(statusError(codes.Unavailable, time.Second)), 0, 0, true},
		{"terminal already", ctrl.TerminalError(plain), 0, 0, true},
		{"the request is at fault", statusError(codes.InvalidArgument, 0), 0, 0, false},
		{"unavailable", statusError(codes.Unavailable, 0), 0, 0, false},
		{"plain", plain, 0, 0, false},
		{"an error whose status is OK", noCode{plain}, 0, 0, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			err := fmt.Errorf("sync: %w", tt.err)
			limiter := reconcile.NewRateLimiter[string](newRetrier(t, grpcretry.WithBudget(grpcretry.Unlimited)), name)
			for way, result := range map[string]func(error) (ctrl.Result, error){
				"Result":         reconcile.Result,
				"limiter.Result": func(err error) (ctrl.Result, error) { return limiter.Result("a", err) },
			} {
				tt := tt
				if way == "Result" && tt.max == 1 {
					tt.min, tt.max = 0, 0 // nothing would limit the repeats
				}
				got, gotErr := result(err)
				if got.RequeueAfter < tt.min || got.RequeueAfter > tt.max {
					t.Errorf("%s: RequeueAfter = %v, want %v to %v", way, got.RequeueAfter, tt.min, tt.max)
				}
				if terminal := errors.Is(gotErr, ctrl.TerminalError(nil)); terminal != tt.terminal {
					t.Errorf("%s: error %v, terminal %v, want %v", way, gotErr, terminal, tt.terminal)
				}
				if want := tt.max == 0; errors.Is(gotErr, tt.err) != want {
					t.Errorf("%s: error %v, want the original: %v", way, gotErr, want)
				}
				isItself := !tt.terminal || errors.Is(tt.err, ctrl.TerminalError(nil))
				if isItself && tt.max == 0 && gotErr != err {
					t.Errorf("%s: error %v, want it untouched", way, gotErr)
				}
			}
		})
	}
	if got, err := reconcile.Result(nil); got != (ctrl.Result{}) || err != nil {
		t.Errorf("Result(nil) = %v, %v", got, err)
	}
}

// A Forget that follows a RequeueAfter is no success: the failures still count, and nothing is earned.
func TestResultThenForget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := ratio(t, 1, 3)
		limiter := reconcile.NewRateLimiter[string](newRetrier(t, grpcretry.WithBudget(b)), name, slow)
		for n := 1; n <= 3; n++ {
			if got, _ := limiter.Result("a", pushback("1000")); got.RequeueAfter != time.Second {
				t.Fatalf("RequeueAfter number %d = %v, want 1s", n, got.RequeueAfter)
			}
			limiter.Forget("a")
			if got, balance := limiter.NumRequeues("a"), b.Balance(time.Now()); got != n || balance != float64(3-n) {
				t.Errorf("NumRequeues = %d, balance %v, want %d and %d", got, balance, n, 3-n)
			}
			time.Sleep(time.Second)
		}
		if got, _ := limiter.Result("a", pushback("1000")); got.RequeueAfter != 7*time.Second {
			t.Errorf("RequeueAfter with an empty budget = %v, want the slow lane's 7s", got.RequeueAfter)
		}
		limiter.Forget("a")
		if got, err := limiter.Result("b", grpcretry.Permanent(errors.New("never"))); err == nil || got.RequeueAfter != 0 ||
			limiter.NumRequeues("b") != 0 {
			t.Errorf("Result of a permanent error = %v, %v, and NumRequeues %d, want the key forgotten", got, err, limiter.NumRequeues("b"))
		}
	})
}

var schemaResource = schema.GroupResource{Group: "shop", Resource: "orders"}
