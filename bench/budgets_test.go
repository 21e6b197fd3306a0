package bench

import (
	"fmt"
	"testing"
	"time"

	"github.com/grpcretry/grpcretry"
)

// BenchmarkBudget is what the default kind of budget costs with so many goroutines at it at once: Deposit is
// on the path of every call, Withdraw on that of every retry, with the time read before. It neither refuses nor
// runs over.
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
			var contenders []contender
			for _, goroutines := range []int{1, 2} {
				budget, err := grpcretry.NewRatioBudget(grpcretry.RatioBudget{Ratio: 0.2, MinPerSecond: 1e12})
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
}
