package grpcretry

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

func TestPerTargetBudgetIsNotSpentByAnotherTarget(t *testing.T) {
	for _, tt := range []struct {
		name    string
		option  []Option
		retries int // one target's, without a pause
	}{
		{"the default", nil, 3},
		{"WithRatioBudget", []Option{WithRatioBudget(RatioBudget{Ratio: 0.2, Reserve: 5})}, 5},
		{"PerTarget", []Option{WithBudget(PerTarget(func() Budget { return NewRateBudget(rate.NewLimiter(0.001, 7)) }))}, 7},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				r := retrierOf(t, append(tt.option, WithMaxAttempts(1000), WithBackoff(Constant(0)), WithPatience(0))...)
				down := serve(t, always(unavailable()))
				up := serve(t, script(unavailable(), unavailable(), ok(), unavailable(), ok()))
				failing := echov1.NewEchoServiceClient(down.connTo(t, "passthrough:///down", r.DialOptions()...))
				_, err := failing.Echo(t.Context(), request())
				wantStop(t, err, codes.Unavailable, ErrBudgetExhausted, 1+tt.retries)

				for range 2 {
					good := echov1.NewEchoServiceClient(up.connTo(t, "passthrough:///up", r.DialOptions()...))
					if _, err := good.Echo(t.Context(), request()); err != nil {
						t.Errorf("Echo at the other target: %v, want its own budget", err)
					}
				}
				// A second connection to the failing target shares the budget of the first.
				again := echov1.NewEchoServiceClient(down.connTo(t, "passthrough:///down", r.DialOptions()...))
				_, err = again.Echo(t.Context(), request())
				wantStop(t, err, codes.Unavailable, ErrBudgetExhausted, 1)
			})
		})
	}
}

func TestPerTargetJoinsTheFormsOfATarget(t *testing.T) {
	budgets := PerTarget(func() Budget { return NewRateBudget(rate.NewLimiter(0.001, 1)) }).(*perTarget)
	budgetOf := func(target string) Budget {
		cc, err := grpc.NewClient(target, grpc.WithTransportCredentials(insecure.NewCredentials()))
		if err != nil {
			t.Fatal(err)
		}
		defer cc.Close()
		return budgets.targets.Dialed(cc.Target(), cc.CanonicalTarget)
	}
	bare, full, triple := budgetOf("localhost:80"), budgetOf("dns:///localhost:80"), budgetOf("localhost:80")
	if bare != full || bare != triple {
		t.Error(`"localhost:80" and "dns:///localhost:80" have different budgets`)
	}
	if other := budgetOf("localhost:81"); other == bare {
		t.Error("localhost:80 and localhost:81 have one budget")
	}
	if other := budgetOf("passthrough:///localhost:80"); other == bare {
		t.Error("dns:///localhost:80 and passthrough:///localhost:80 have one budget")
	}
}

// budgetOfTarget returns the budget that calls to a target with that name get.
func budgetOfTarget(budgets Budget, name string) Budget {
	return budgets.(*perTarget).targets.Dialed(name, func() string { return "dns:///" + name })
}

func remembered(budgets Budget) int {
	return len(slices.Collect(budgets.(*perTarget).targets.All()))
}

// A client that keeps dialing new targets remembers only those of the last two minutes.
func TestPerTargetForgetsTargetsThatAreNotUsed(t *testing.T) {
	bubble(t, func(t *testing.T) {
		budgets := PerTarget(func() Budget { return realRatioBudget(t, RatioBudget{}) })
		most := 0
		for i := range 1000 { // one a second
			budgetOfTarget(budgets, fmt.Sprint(i)).Withdraw(time.Now())
			most = max(most, remembered(budgets))
			time.Sleep(second)
		}
		if most > 121 {
			t.Errorf("%d targets are remembered, want at most 121", most)
		}
		time.Sleep(time.Hour)
		for i := range 3 {
			budgetOfTarget(budgets, fmt.Sprint("new", i))
			time.Sleep(time.Minute)
		}
		if got := remembered(budgets); got != 2 {
			t.Errorf("%d targets are remembered, want the last two", got)
		}
	})
}

// All users of one WithRatioBudget share its budgets; another WithRatioBudget has its own.
func TestWithRatioBudgetIsOneSetOfBudgets(t *testing.T) {
	shared := WithRatioBudget(RatioBudget{Ratio: Nothing, Reserve: 2})
	other := WithRatioBudget(RatioBudget{Ratio: Nothing, Reserve: 2})
	budgetOf := func(name string, opts ...Option) Budget {
		r := retrierOf(t, opts...)
		return budgetOfTarget(r.Policy("/pkg.Service/Method").Budget, name)
	}
	one := budgetOf("x", shared)
	if budgetOf("x", shared) != one || budgetOf("x", other, WithMethod("/pkg.Service/", shared)) != one {
		t.Error("one WithRatioBudget has two budgets for one target")
	}
	if budgetOf("y", shared) == one {
		t.Error("two targets have one budget")
	}
	if budgetOf("x", other) == one {
		t.Error("two uses of WithRatioBudget have one budget")
	}
	wantBalance(t, one, epoch, 2)
}
