package sim

import (
	"context"
	"runtime"
	"sync"
)

// A Comparison is the result of a scenario under one strategy.
type Comparison struct {
	Strategy string  // its name
	Result   *Result // with the scenario's own seed; nil if the run did not start
	Mean     Summary // the average of all complete runs, or Result's summary if there is none
	Runs     int     // complete runs
}

// Compare runs a scenario under each of its strategies, with runs seeds each, from the
// scenario's own upwards, as many at a time as there are cores. A scenario without strategies is
// run with the library's default for groups that have no strategy of their own.
//
// watch, unless nil, receives the progress of all runs together, from one goroutine at a time. When
// ctx ends, Compare returns the results so far and the context's error.
func Compare(ctx context.Context, s Scenario, runs int, watch func(Progress)) ([]Comparison, error) {
	strategies := s.Strategies
	if len(strategies) == 0 {
		strategies = []Strategy{{Name: "default"}}
	}
	if err := s.Check(); err != nil {
		return nil, err
	}
	c := &comparison{ctx: ctx, scenario: s, strategies: strategies, runs: max(runs, 1), watch: watch}
	c.results = make([]*Result, len(strategies)*c.runs)
	c.progress = make([]Progress, len(c.results))
	return c.do()
}

type comparison struct {
	ctx        context.Context
	scenario   Scenario
	strategies []Strategy
	runs       int

	mu       sync.Mutex // held to choose the next run, and to report
	next     int        // guarded by mu
	results  []*Result  // one for each run; those of strategy i start at i × runs
	progress []Progress // guarded by mu
	watch    func(Progress)
	err      error // guarded by mu; the first
}

func (c *comparison) do() ([]Comparison, error) {
	var workers sync.WaitGroup
	for range min(runtime.GOMAXPROCS(0), len(c.results)) {
		workers.Go(c.work)
	}
	workers.Wait()
	if c.err != nil && c.ctx.Err() == nil {
		return nil, c.err
	}
	var out []Comparison
	for i := range c.strategies {
		if one := c.compared(i); one.Result != nil {
			out = append(out, one)
		}
	}
	return out, c.err
}

// work does one run after the other, starting with one of every strategy.
func (c *comparison) work() {
	for {
		c.mu.Lock()
		n := c.next
		c.next++
		stop := n >= len(c.results) || c.err != nil
		c.mu.Unlock()
		if stop {
			return
		}
		strategy, seed := n%len(c.strategies), n/len(c.strategies)
		i := strategy*c.runs + seed
		s := c.scenario
		s.Seed += uint64(seed)
		result, err := Run(c.ctx, s, c.strategies[strategy], c.watcher(i))
		c.results[i] = result
		c.mu.Lock()
		if c.err == nil {
			c.err = err
		}
		if err == nil {
			c.report(i, Progress{Now: result.End, Share: 1, Events: result.Events})
		}
		c.mu.Unlock()
	}
}

func (c *comparison) watcher(i int) func(Progress) {
	if c.watch == nil {
		return nil
	}
	return func(p Progress) {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.report(i, p)
	}
}

// report reports progress. The caller holds mu.
func (c *comparison) report(i int, p Progress) {
	if c.watch == nil {
		return
	}
	c.progress[i] = p
	var all Progress
	for _, one := range c.progress {
		all.Now = max(all.Now, one.Now)
		all.Share += one.Share / float64(len(c.progress))
		all.Events += one.Events
	}
	c.watch(all)
}

func (c *comparison) compared(strategy int) Comparison {
	results := c.results[strategy*c.runs : (strategy+1)*c.runs]
	out := Comparison{Strategy: c.strategies[strategy].Name, Result: results[0]}
	var complete []Summary
	for _, r := range results {
		if r != nil && r.Complete {
			complete = append(complete, r.Summary)
		}
	}
	out.Runs = len(complete)
	switch {
	case out.Runs > 0:
		out.Mean = Mean(complete)
	case out.Result != nil:
		out.Mean = out.Result.Summary
	}
	return out
}
