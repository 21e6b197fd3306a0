package main

import (
	"context"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/cmd/herd/internal/sim"
)

// This file searches the library's backoffs for those that come closest to the physical limit of a
// scenario.

// searchSeeds is the number of runs of each candidate.
const searchSeeds = 4

// candidates are exponential backoffs with every kind of jitter, and decorrelated ones, on a grid
// from 50 ms to 10 s.
func candidates() (all []sim.Strategy) {
	bases := []time.Duration{50, 100, 200, 300, 500, 1000, 1500, 2000, 3000, 4000, 5000, 6000, 8000, 10000}
	longest := []time.Duration{1000, 2000, 2500, 3000, 3500, 4000, 5000, 6000, 7000, 8000, 10000}
	for _, base := range bases {
		for _, most := range longest {
			base, most := base*time.Millisecond, most*time.Millisecond
			if most < base {
				continue
			}
			all = append(all, untilSuccess(fmt.Sprintf("decorrelated %v..%v", base, most), grpcretry.Decorrelated{Base: base, Max: most}))
			for _, multiplier := range []float64{1.5, 2, 3, 4, 10} {
				if most == base && multiplier != 2 {
					continue // it never grows
				}
				for _, jitter := range []grpcretry.Jitter{grpcretry.FullJitter, grpcretry.EqualJitter, grpcretry.ProportionalJitter} {
					all = append(all, untilSuccess(fmt.Sprintf("%v %v..%v ×%v", jitter, base, most, multiplier),
						grpcretry.Exponential{Base: base, Max: most, Multiplier: multiplier, Jitter: jitter}))
				}
			}
		}
	}
	return all
}

func untilSuccess(name string, b grpcretry.Backoff) sim.Strategy {
	return sim.Strategy{
		Name:   name,
		Policy: grpcretry.Policy{MaxAttempts: 1_000_000_000, Backoff: b},
		Budget: sim.Budget{Kind: sim.UnlimitedBudget},
	}
}

// search prints the candidates that no other one beats in both p99 and waste, and their results in
// outages of other lengths.
func (o *options) search(ctx context.Context, study sim.Study, stdout, stderr io.Writer) error {
	s := study.Scenarios[0]
	limit, ok := sim.LimitOf(s)
	if !ok {
		return fmt.Errorf("-search: scenario %s has no known limit: want one server with a capacity, and clients that all call once at the start", s.Name)
	}
	bar := newProgressBar(stderr)
	defer bar.clear()
	found, err := compareAll(ctx, s, candidates(), bar)
	if err != nil {
		return err
	}
	front := paretoFront(found)
	bar.clear()
	out := &report{w: stdout}
	out.printf("%s: %s\nOf %d backoffs, the ones that no other beats in both p99 and waste; averages over %d seeds.\n",
		s.Name, s.Title, len(found), searchSeeds)
	out.table(frontTable(front, limit))
	out.printf("\nThe same in outages of other lengths: p99 as a multiple of the limit, and attempts wasted for each client.\n")
	table, err := lengthTable(ctx, s, front, bar)
	if err != nil {
		return err
	}
	out.table(table)
	return out.err
}

// compareAll compares more strategies than a scenario may have.
func compareAll(ctx context.Context, s sim.Scenario, all []sim.Strategy, bar *progressBar) (found []found, err error) {
	const together = 200
	for i := 0; i < len(all); i += together {
		s.Strategies = all[i:min(i+together, len(all))]
		bar.begin("search", i/together, (len(all)+together-1)/together)
		some, err := sim.Compare(ctx, s, searchSeeds, bar.show)
		if err != nil {
			return nil, err
		}
		for k, c := range some {
			found = append(found, foundOf(s.Strategies[k], c))
		}
	}
	return found, nil
}

// A found candidate has its result.
type found struct {
	strategy sim.Strategy
	mean     sim.Summary
}

func foundOf(s sim.Strategy, c sim.Comparison) found { return found{s, c.Mean} }

// paretoFront returns candidates sorted by p99, each of which wastes less than all before it.
func paretoFront(all []found) (front []found) {
	slices.SortStableFunc(all, func(a, b found) int {
		if a.mean.P99 != b.mean.P99 {
			return int(a.mean.P99 - b.mean.P99)
		}
		return int(a.mean.Wasted - b.mean.Wasted)
	})
	for _, one := range all {
		if len(front) == 0 || one.mean.Wasted < front[len(front)-1].mean.Wasted {
			front = append(front, one)
		}
	}
	return front
}

func frontTable(front []found, limit sim.Limit) [][]string {
	table := [][]string{{"backoff", "p99", "of the limit", "wasted", "of the limit", "over capacity"}}
	for _, one := range front {
		m := one.mean
		table = append(table, []string{one.strategy.Name, shortTime(m.P99), fmt.Sprintf("%.3f", m.P99.Seconds()/limit.P99.Seconds()),
			grouped(m.Wasted), fmt.Sprintf("%.2f", m.Wasted/float64(limit.Wasted)), grouped(m.Over) + "/s"})
	}
	return append(table, []string{"physical limit", shortTime(limit.P99), "1", grouped(float64(limit.Wasted)), "1", "0/s"})
}

// lengthTable runs the candidates of the front, and the library's default, with outages of other
// lengths.
func lengthTable(ctx context.Context, s sim.Scenario, front []found, bar *progressBar) ([][]string, error) {
	strategies := []sim.Strategy{
		untilSuccess("default: full 100ms..5s ×2", grpcretry.Exponential{}),
		untilSuccess("full 100ms..5s ×3", grpcretry.Exponential{Multiplier: 3}),
		untilSuccess("full 100ms..5s ×4", grpcretry.Exponential{Multiplier: 4}),
		untilSuccess("decorrelated 1s..7s", grpcretry.Decorrelated{Base: time.Second, Max: 7 * time.Second}),
	}
	for _, one := range front {
		if !slices.ContainsFunc(strategies, func(s sim.Strategy) bool { return s.Name == one.strategy.Name }) {
			strategies = append(strategies, one.strategy)
		}
	}
	table := [][]string{{"backoff"}}
	for _, one := range strategies {
		table = append(table, []string{one.Name})
	}
	for _, length := range []time.Duration{300 * time.Millisecond, time.Second, 3 * time.Second, 10 * time.Second, 30 * time.Second, time.Minute} {
		s.Servers = slices.Clone(s.Servers)
		s.Servers[0].Outages = []sim.Outage{{For: length}}
		limit, _ := sim.LimitOf(s)
		table[0] = append(table[0], shortTime(length))
		found, err := compareAll(ctx, s, strategies, bar)
		if err != nil {
			return nil, err
		}
		for i, one := range found {
			table[i+1] = append(table[i+1], fmt.Sprintf("%.2f, %.1f", one.mean.P99.Seconds()/limit.P99.Seconds(), one.mean.Wasted/one.mean.Calls))
		}
	}
	return table, nil
}
