package explore

import (
	"flag"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/internal/inside"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// The policies with which programs are explored.
var policies = map[string]func() []grpcretry.Option{
	"default": nil,
	"many attempts": func() []grpcretry.Option {
		return []grpcretry.Option{grpcretry.WithMaxAttempts(7), grpcretry.WithBackoff(grpcretry.Decorrelated{Base: 5 * time.Millisecond}),
			grpcretry.WithCodes(codes.Unavailable, codes.Aborted, codes.ResourceExhausted), grpcretry.WithBudget(grpcretry.Unlimited)}
	},
	"limits": func() []grpcretry.Option {
		return []grpcretry.Option{grpcretry.WithMaxServerDelay(100 * time.Millisecond),
			grpcretry.WithAttemptTimeout(40 * time.Millisecond), grpcretry.WithRatioBudget(grpcretry.RatioBudget{Ratio: 0.5, Reserve: 2})}
	},
	"unsent only": func() []grpcretry.Option {
		return []grpcretry.Option{grpcretry.WithUnsentOnly(true), grpcretry.WithAttemptTimeout(40 * time.Millisecond)}
	},
	"impatient": func() []grpcretry.Option {
		return []grpcretry.Option{grpcretry.WithMaxElapsed(time.Second), grpcretry.WithPatience(0), grpcretry.WithBufferLimit(100)}
	},
	"hedging": func() []grpcretry.Option {
		return []grpcretry.Option{grpcretry.WithMaxAttempts(3), grpcretry.WithMethod("/grpcretry.test.v1.EchoService/Echo", hedged),
			grpcretry.WithMethod("/grpcretry.test.v1.EchoService/Expand", hedged)}
	},
	"hedging without a budget": func() []grpcretry.Option {
		h := grpcretry.WithPolicy(grpcretry.Policy{MaxAttempts: 4,
			Hedging: &grpcretry.Hedging{Delay: grpcretry.HedgeAfter(10 * time.Millisecond), Budget: grpcretry.Unlimited}})
		opts := []grpcretry.Option{grpcretry.WithBudget(grpcretry.Unlimited)}
		for _, name := range []string{"Echo", "Append", "Put", "Expand"} {
			opts = append(opts, grpcretry.WithMethod("/grpcretry.test.v1.EchoService/"+name, h))
		}
		return opts
	},
	"small memory": func() []grpcretry.Option { return []grpcretry.Option{inside.WithReplayMemory(600).(grpcretry.Option)} },
	"little patience": func() []grpcretry.Option {
		return []grpcretry.Option{grpcretry.WithPatience(1200 * time.Millisecond), grpcretry.WithMaxAttempts(3),
			grpcretry.WithBudget(grpcretry.Unlimited)}
	},
	"one retry at a time": func() []grpcretry.Option {
		budget, err := grpcretry.NewConcurrencyBudget(1)
		if err != nil {
			panic(err)
		}
		return []grpcretry.Option{grpcretry.WithMaxAttempts(5), grpcretry.WithBudget(budget)}
	},
	"a budget refilled by time": func() []grpcretry.Option {
		return []grpcretry.Option{grpcretry.WithMaxAttempts(5),
			grpcretry.WithRatioBudget(grpcretry.RatioBudget{Ratio: grpcretry.Nothing, Reserve: grpcretry.Nothing, MinPerSecond: 1,
				Window: time.Second})}
	},
	"ratio budget, compared": func() []grpcretry.Option {
		budget, err := grpcretry.NewRatioBudget(grpcretry.RatioBudget{Ratio: 0.5, Reserve: 2, Window: 24 * time.Hour})
		return compared(budget, err, &ratioModel{ratio: 0.5, full: 2, reserve: 2})
	},
	"throttle, compared": func() []grpcretry.Option {
		budget, err := grpcretry.NewThrottle(6, 0.5)
		return compared(budget, err, &throttleModel{full: 6, gain: 0.5, tokens: 6})
	},
	"one attempt": func() []grpcretry.Option { return []grpcretry.Option{grpcretry.Disable()} },
}

var hedged = grpcretry.WithPolicy(grpcretry.Policy{MaxAttempts: 4,
	Hedging: &grpcretry.Hedging{Delay: grpcretry.HedgeAfter(20 * time.Millisecond)}})

var thorough = flag.Bool("thorough", false, "explore thousands of programs, as make random does")

func TestExplore(t *testing.T) {
	programs := 60
	if *thorough {
		programs = 1000
	}
	for name, policy := range policies {
		t.Run(name, func(t *testing.T) {
			Exploration{Service: &echov1.EchoService_ServiceDesc, Policy: policy, Programs: programs}.Run(t)
		})
	}
}
