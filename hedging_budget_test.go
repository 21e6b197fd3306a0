package grpcretry

import (
	"context"
	"math/rand/v2"
	"sync"
	"testing"
	"time"
)

// Hedges are not saved up: what calls earn can be spent for a second, and one hedge is kept.
func TestDefaultHedgeBudget(t *testing.T) {
	b := newHedgeBudget()
	at := time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)
	answered := func(calls int, within time.Duration) {
		for range calls {
			b.Deposit(Outcome{Attempt: 1, Result: Succeeded})
		}
		at = at.Add(within)
	}
	for _, tt := range []struct {
		name        string
		calls       int
		within      time.Duration
		least, most float64
	}{
		{"at the start", 0, 0, 0, 0},
		{"nine calls", 9, time.Second, 0.9, 0.9},
		{"ten calls", 1, time.Second, 1, 1},
		{"an hour later", 0, time.Hour, 1, 1},
		{"a thousand calls in half a second", 1000, time.Second / 2, 100, 101},
		{"ten thousand in the next ten", 10_000, 10 * time.Second, 100, 106},
		{"a quiet second later", 0, 1100 * time.Millisecond, 1, 1},
	} {
		answered(tt.calls, tt.within)
		if got := b.Balance(at); got < tt.least-1e-6 || got > tt.most+1e-6 {
			t.Errorf("%s: balance %v, want %v to %v", tt.name, got, tt.least, tt.most)
		}
	}
}

// Latency doubles for everyone. Hedges cannot help then; the budget holds them down until
// the delay has learnt.
func TestHedgesStayUnderTheBudgetWhenAllGetSlow(t *testing.T) {
	bubble(t, func(t *testing.T) {
		random, took := rand.New(rand.NewPCG(1, 1)), 10*time.Millisecond
		var mu sync.Mutex
		attempts := 0
		respond := func(ctx context.Context, _ int) error {
			mu.Lock()
			attempts++
			delay := took + time.Duration(random.ExpFloat64()*float64(took)) // a long tail
			mu.Unlock()
			if !elapsed(delay, ctx.Done()) {
				return ctx.Err()
			}
			return nil
		}
		budget, err := NewRatioBudget(RatioBudget{Ratio: 0.1, Reserve: Nothing, Window: 10 * time.Second})
		if err != nil {
			t.Fatal(err)
		}
		intercept := UnaryClientInterceptor(hedged(2, Hedging{Delay: HedgeAtQuantile(0.95, 0, 0), Budget: budget}))
		run := func(calls int) (hedges int) {
			before := attempts
			for range calls {
				if err := invokeEcho(t.Context(), intercept, respond); err != nil {
					t.Errorf("Echo = %v, want success", err)
				}
				time.Sleep(10 * time.Millisecond)
			}
			return attempts - before - calls
		}
		wantShare := func(when string, hedges, calls int, least, most float64) {
			if share := float64(hedges) / float64(calls); share < least || share > most {
				t.Errorf("%d hedges for %d calls %s, want a share of %v to %v", hedges, calls, when, least, most)
			}
		}
		run(1000)
		wantShare("at the usual pace", run(3000), 3000, 0.02, 0.08)
		mu.Lock()
		took *= 2
		mu.Unlock()
		wantShare("when all get slow", run(1000), 1000, 0.08, 0.13) // the budget's tenth, and what it had saved
		run(2000)
		wantShare("when the delay has adapted", run(3000), 3000, 0.02, 0.08)
	})
}
