package sim

import (
	"context"
	"errors"
	"strings"
	"testing"
)

func TestCompareRunsEveryStrategyAndSeed(t *testing.T) {
	s := classic().Scenarios[0]
	s.Strategies = s.Strategies[1:4]
	s.Seed = 5
	last := Progress{}
	got, err := Compare(t.Context(), s, 3, func(p Progress) { last = p })
	if err != nil || len(got) != 3 {
		t.Fatalf("Compare = %d comparisons, %v; want 3", len(got), err)
	}
	for i, c := range got {
		var runs []Summary
		for seed := range uint64(3) {
			one := s
			one.Seed += seed
			runs = append(runs, mustRun(t, one, s.Strategies[i]).Summary)
		}
		if c.Strategy != s.Strategies[i].Name || c.Runs != 3 || c.Mean != Mean(runs) || c.Result.Summary != runs[0] {
			t.Errorf("%s: %d runs, mean %+v; want that of %s", c.Strategy, c.Runs, c.Mean, s.Strategies[i].Name)
		}
	}
	if last.Share < 0.999 || last.Events == 0 {
		t.Errorf("progress at last %+v, want all", last)
	}
}

func TestCompareWithoutStrategies(t *testing.T) {
	s := small()
	s.Groups[0].Strategy = &steady
	got, err := Compare(t.Context(), s, 0, nil)
	if err != nil || len(got) != 1 || got[0].Mean.Succeeded != 3 {
		t.Errorf("Compare = %+v, %v; want one run", got, err)
	}
}

func TestCompareSaysWhatIsWrong(t *testing.T) {
	s := small()
	s.Groups = nil
	if got, err := Compare(t.Context(), s, 1, nil); err == nil || got != nil || !strings.Contains(err.Error(), "groups is 0") {
		t.Errorf("Compare = %v, %v; want an error that names groups", got, err)
	}
}

func TestCompareStopsWithWhatThereIs(t *testing.T) {
	s := classic().Scenarios[0]
	ctx, cancel := context.WithCancel(t.Context())
	got, err := Compare(ctx, s, 1, func(p Progress) {
		if p.Events > 1_000_000 {
			cancel()
		}
	})
	if !errors.Is(err, context.Canceled) {
		t.Fatalf("Compare: %v, want context.Canceled", err)
	}
	if len(got) == 0 || got[0].Strategy != "constant 1ms" || got[0].Result.Complete || got[0].Runs != 0 || got[0].Mean.Attempts < 100_000 {
		t.Errorf("Compare = %+v, want what there was of the first", got)
	}
}
