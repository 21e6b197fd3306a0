package bench

import (
	"fmt"
	"sync"
	"testing"
	"time"

	"golang.org/x/time/rate"

	"github.com/grpcretry/grpcretry"
)

// Budgets are compared among themselves: no rival has one to call. Each is made so that it
// neither refuses nor runs over.
var budgets = []struct {
	name string
	make func() (grpcretry.Budget, error)
}{
	{"ratio", ratio},
	{"rate", func() (grpcretry.Budget, error) { return grpcretry.NewRateBudget(rate.NewLimiter(1e12, 1e9)), nil }},
	{"throttle", throttle},
	{"concurrency", func() (grpcretry.Budget, error) { return grpcretry.NewConcurrencyBudget(1 << 40) }},
	{"unlimited", func() (grpcretry.Budget, error) { return grpcretry.Unlimited, nil }},
	{"ratio,throttle", func() (grpcretry.Budget, error) {
		first, err := ratio()
		if err != nil {
			return nil, err
		}
		second, err := throttle()
		return grpcretry.AllBudgets(first, second), err
	}},
}

func ratio() (grpcretry.Budget, error) {
	return grpcretry.NewRatioBudget(grpcretry.RatioBudget{Ratio: 0.2, MinPerSecond: 1e12})
}

func throttle() (grpcretry.Budget, error) { return grpcretry.NewThrottle(1000, 0.1) }

// BenchmarkBudget is what a budget costs with so many goroutines at it at once. Deposit is
// on the path of every call, Withdraw on that of every retry, with the time read before.
func BenchmarkBudget(b *testing.B) {
	for _, operation := range []struct {
		name string
		do   func(grpcretry.Budget, time.Time)
	}{
		{"Deposit", func(budget grpcretry.Budget, _ time.Time) {
			budget.Deposit(grpcretry.Outcome{Attempt: 1, Result: grpcretry.Succeeded})
		}},
		{"Withdraw", func(budget grpcretry.Budget, now time.Time) { budget.Withdraw(now) }},
	} {
		b.Run("op="+operation.name, func(b *testing.B) {
			for _, kind := range budgets {
				b.Run("budget="+kind.name, func(b *testing.B) {
					for _, goroutines := range []int{1, 2, 8, 64} {
						b.Run(fmt.Sprintf("goroutines=%d", goroutines), func(b *testing.B) {
							budget, err := kind.make()
							if err != nil {
								b.Fatal(err)
							}
							b.ReportAllocs()
							share(b, goroutines, func(times int) {
								now := time.Now()
								for range times {
									operation.do(budget, now)
								}
							})
						})
					}
				})
			}
		})
	}
}

// share has goroutines do b.N things together.
func share(b *testing.B, goroutines int, do func(times int)) {
	var all sync.WaitGroup
	for i := range goroutines {
		times := b.N / goroutines
		if i < b.N%goroutines {
			times++
		}
		all.Go(func() { do(times) })
	}
	all.Wait()
}
