package bench

import (
	"fmt"
	"math"
	"testing"
	"time"

	"golang.org/x/time/rate"

	"github.com/grpcretry/grpcretry"
)

// Budgets are compared among themselves: no alternative has one to call. Each is made so that it
// neither refuses nor runs over.
var budgets = []struct {
	name string
	make func() (grpcretry.Budget, error)
}{
	{"ratio", ratio},
	{"rate", func() (grpcretry.Budget, error) { return grpcretry.NewRateBudget(rate.NewLimiter(1e12, 1e9)), nil }},
	{"throttle", throttle},
	{"concurrency", func() (grpcretry.Budget, error) { return grpcretry.NewConcurrencyBudget(math.MaxInt) }},
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
					var contenders []contender
					for _, goroutines := range []int{1, 2, 8, 64} {
						budget, err := kind.make()
						if err != nil {
							b.Fatal(err)
						}
						contenders = append(contenders, contender{fmt.Sprintf("goroutines=%d", goroutines), func(times int) {
							share(goroutines, times, func(_, times int) {
								now := time.Now()
								for range times {
									operation.do(budget, now)
								}
							})
						}})
					}
					inTurns(b, contenders, perOperation)
				})
			}
		})
	}
}
