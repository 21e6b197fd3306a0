package main

import (
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/grpcretry/grpcretry/cmd/herd/internal/sim"
)

// This file applies the flags of the command line to a study.

// A change is a flag that sets something in a scenario.
type change struct {
	name, value string
	do          func(s *sim.Scenario, value string) error
}

// String returns the flag as it was given.
func (c change) String() string {
	if c.value == "true" {
		return "-" + c.name
	}
	return "-" + c.name + " " + c.value
}

func written(changes []change) string {
	var all []string
	for _, c := range changes {
		all = append(all, c.String())
	}
	return strings.Join(all, " ")
}

// change applies the flags to a scenario, and checks it.
func (o *options) change(s *sim.Scenario, added []sim.Strategy) error {
	s.Strategies = append(slices.Clip(s.Strategies), added...)
	changed := make([][]change, len(s.Strategies))
	var wrong error // since the flag that culprit is
	var culprit change
	for _, c := range o.changes {
		before := s.Strategies
		s.Strategies = slices.Clone(before) // scenarios may share them
		if err := c.do(s, c.value); err != nil {
			return fmt.Errorf("%v: %w", c, err)
		}
		for i, after := range s.Strategies {
			switch {
			case i >= len(before): // -also
				changed = append(changed, nil)
			case !equal(after, before[i]):
				changed[i] = append(changed[i], c)
			}
		}
		kept := *s
		kept.Strategies = slices.DeleteFunc(slices.Clone(s.Strategies), func(one sim.Strategy) bool { return !o.wants(one) })
		if err := kept.Check(); err == nil || wrong == nil {
			wrong, culprit = err, c
		}
	}
	if wrong != nil {
		return fmt.Errorf("%v: %w", culprit, wrong)
	}
	if o.only != "" {
		if err := o.keepOnly(s, &changed); err != nil {
			return err
		}
	}
	mergeStrategies(s, changed)
	return nil
}

// equal reports whether strategies differ in nothing but their names.
func equal(a, b sim.Strategy) bool {
	a.Name, b.Name = "", ""
	return reflect.DeepEqual(a, b)
}

// mergeStrategies merges strategies that the flags made equal.
func mergeStrategies(s *sim.Scenario, changed [][]change) {
	var merged []sim.Strategy
	for i, one := range s.Strategies {
		var same []int
		for k, other := range s.Strategies {
			if k == i || equal(one, other) {
				same = append(same, k)
			}
		}
		byFlags := slices.ContainsFunc(same, func(k int) bool { return changed[k] != nil })
		if byFlags && i > same[0] {
			continue
		}
		if byFlags && len(same) > 1 {
			one.Name = mergedName(s.Strategies, changed, same)
			if slices.ContainsFunc(merged, func(other sim.Strategy) bool { return other.Name == one.Name }) {
				one.Name = s.Strategies[i].Name + " " + one.Name
			}
		}
		merged = append(merged, one)
	}
	s.Strategies = merged
}

// mergedName returns the name of a strategy that the flags did not change. If they changed all of them,
// no name describes a strategy any longer, and the flags become the name.
func mergedName(strategies []sim.Strategy, changed [][]change, same []int) string {
	var most []change
	for _, k := range same {
		if changed[k] == nil {
			return strategies[k].Name
		}
		if len(changed[k]) > len(most) {
			most = changed[k]
		}
	}
	return written(most)
}

// wants reports whether a strategy's name contains one of the words of -strategy.
func (o *options) wants(s sim.Strategy) bool {
	return slices.ContainsFunc(strings.Split(o.only, ","), func(word string) bool {
		return strings.Contains(strings.ToLower(s.Name), strings.ToLower(strings.TrimSpace(word)))
	})
}

// keepOnly keeps the strategies that -strategy wants.
func (o *options) keepOnly(s *sim.Scenario, changed *[][]change) error {
	var kept []sim.Strategy
	var keptChanges [][]change
	var known []string
	for i, one := range s.Strategies {
		known = append(known, strconv.Quote(one.Name))
		if o.wants(one) {
			kept, keptChanges = append(kept, one), append(keptChanges, (*changed)[i])
		}
	}
	if len(kept) == 0 {
		return fmt.Errorf("-strategy %s: scenario %s has no such strategy, only %s", o.only, s.Name, strings.Join(known, ", "))
	}
	s.Strategies, *changed = kept, keptChanges
	return nil
}

// keepPart keeps the scenarios with these names. They no longer form a sweep.
func keepPart(study *sim.Study, names []string) error {
	var kept []sim.Scenario
	var known []string
	for _, s := range slices.Concat(study.Scenarios, study.Further) {
		if slices.Contains(names, s.Name) {
			kept = append(kept, s)
		}
		known = append(known, s.Name)
	}
	if len(kept) == 0 {
		return fmt.Errorf("-part %s: there is no such scenario, want some of %s", strings.Join(names, ","), strings.Join(known, ", "))
	}
	study.Scenarios = kept
	noSweep(study)
	return nil
}

func noSweep(study *sim.Study) { study.Vary, study.Values, study.Labels, study.Draw = "", nil, nil, "" }

// withoutRepetitions makes a study of a sweep whose values no longer matter, because a flag sets
// what varied: it has one scenario of each row.
func withoutRepetitions(study sim.Study) sim.Study {
	if study.Vary == "" {
		return study
	}
	var kept []sim.Scenario
	var seen []sim.Scenario
	points := study.Points()
	for row := range slices.Chunk(study.Scenarios, len(points)) {
		for i, s := range row {
			content := s
			content.Name, content.Title, content.See = "", "", ""
			if slices.ContainsFunc(seen, func(other sim.Scenario) bool { return reflect.DeepEqual(other, content) }) {
				continue
			}
			seen = append(seen, content)
			s.Name = strings.TrimSuffix(s.Name, "-"+points[i])
			kept = append(kept, s)
		}
	}
	if len(kept) == len(study.Scenarios) {
		return study
	}
	study.Scenarios = kept
	noSweep(&study)
	return study
}

// retitle adds the flags to the titles, and notes that the explanations do not take them into account.
func (o *options) retitle(study *sim.Study) {
	if len(o.changes) == 0 {
		return
	}
	but := ", but with " + written(o.changes)
	study.Title += but
	if study.See != "" {
		study.See = "Without these flags: " + study.See
	}
	for i := range study.Scenarios {
		study.Scenarios[i].Title += but
	}
}
