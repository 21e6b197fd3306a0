package reconcile_test

import (
	"testing"

	"k8s.io/client-go/util/workqueue"

	"github.com/grpcretry/grpcretry/reconcile"
)

// BenchmarkLimiter compares what a success and a failure cost, with client-go's default.
func BenchmarkLimiter(b *testing.B) {
	for _, limiter := range []struct {
		name string
		workqueue.TypedRateLimiter[int]
	}{
		{"default", workqueue.DefaultTypedControllerRateLimiter[int]()},
		{"reconcile", reconcile.NewRateLimiter[int](newRetrier(b), name)},
	} {
		b.Run("success/limiter="+limiter.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				limiter.Forget(1)
			}
		})
		b.Run("failure/limiter="+limiter.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				limiter.When(1)
				limiter.Forget(1)
			}
		})
	}
}
