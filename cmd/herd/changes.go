package main

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/grpcretry/grpcretry/cmd/herd/internal/sim"
)

// This file applies the flags of the command line to a study.

// A change is a flag that sets something in a scenario.
type change struct {
	name, value string
	do          func(s *sim.Scenario, value string) error
}

// String is the flag as it was given.
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
	for _, c := range o.changes {
		before := contents(s.Strategies)
		s.Strategies = slices.Clone(s.Strategies) // scenarios may share them
		if err := c.do(s, c.value); err != nil {
			return fmt.Errorf("-%s %s: %w", c.name, c.value, err)
		}
		for i, after := range contents(s.Strategies) {
			switch {
			case i >= len(before): // -also
				changed = append(changed, nil)
			case after != before[i]:
				changed[i] = append(changed[i], c)
			}
		}
	}
	if o.only != "" {
		if err := keepOnly(s, &changed, strings.Split(o.only, ",")); err != nil {
			return err
		}
	}
	if err := s.Check(); err != nil {
		return err
	}
	mergeStrategies(s, changed)
	return nil
}

// contents are strategies as text, without their names.
func contents(strategies []sim.Strategy) (all []string) {
	for i, one := range strategies {
		one.Name = ""
		text, err := json.Marshal(sim.Scenario{Strategies: []sim.Strategy{one}})
		if err != nil { // it cannot be written, or Check rejects it: it is like no other
			text = fmt.Append(nil, i, err)
		}
		all = append(all, string(text))
	}
	return all
}

// mergeStrategies makes one strategy of those that flags have made equal.
func mergeStrategies(s *sim.Scenario, changed [][]change) {
	var merged []sim.Strategy
	all := contents(s.Strategies)
	for i, one := range s.Strategies {
		var equal []int
		for k := range all {
			if all[k] == all[i] {
				equal = append(equal, k)
			}
		}
		byFlags := slices.ContainsFunc(equal, func(k int) bool { return changed[k] != nil })
		if byFlags && i > equal[0] {
			continue
		}
		if byFlags && len(equal) > 1 {
			one.Name = mergedName(s.Strategies, changed, equal)
			if slices.ContainsFunc(merged, func(other sim.Strategy) bool { return other.Name == one.Name }) {
				one.Name = s.Strategies[i].Name + " " + one.Name
			}
		}
		merged = append(merged, one)
	}
	s.Strategies = merged
}

// mergedName is the name of a strategy that flags have not changed. If they have changed all, no
// name says any more what is special about a strategy, and the flags are the name.
func mergedName(strategies []sim.Strategy, changed [][]change, equal []int) string {
	var most []change
	for _, k := range equal {
		if changed[k] == nil {
			return strategies[k].Name
		}
		if len(changed[k]) > len(most) {
			most = changed[k]
		}
	}
	return written(most)
}

// keepOnly keeps the strategies whose names contain one of the words.
func keepOnly(s *sim.Scenario, changed *[][]change, words []string) error {
	var kept []sim.Strategy
	var keptChanges [][]change
	var known []string
	for i, one := range s.Strategies {
		known = append(known, fmt.Sprintf("%q", one.Name))
		if slices.ContainsFunc(words, func(word string) bool {
			return strings.Contains(strings.ToLower(one.Name), strings.ToLower(strings.TrimSpace(word)))
		}) {
			kept, keptChanges = append(kept, one), append(keptChanges, (*changed)[i])
		}
	}
	if len(kept) == 0 {
		return fmt.Errorf("-strategy %s: scenario %s has no such strategy, only %s", strings.Join(words, ","), s.Name, strings.Join(known, ", "))
	}
	s.Strategies, *changed = kept, keptChanges
	return nil
}

// keepPart keeps the scenarios of these names. What varies between them is no longer a sweep.
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

func noSweep(study *sim.Study) { study.Vary, study.Values, study.Draw = "", nil, "" }

// withoutRepetitions makes a study of a sweep whose values no longer matter, because a flag sets
// what varied: it has one scenario of each row.
func withoutRepetitions(study sim.Study) sim.Study {
	if study.Vary == "" {
		return study
	}
	var kept []sim.Scenario
	var seen []string
	for row := range slices.Chunk(study.Scenarios, len(study.Values)) {
		for i, s := range row {
			text := scenarioContent(s)
			if slices.Contains(seen, text) {
				continue
			}
			seen = append(seen, text)
			s.Name = strings.TrimSuffix(s.Name, fmt.Sprintf("-%.0f", study.Values[i]))
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

// scenarioContent is a scenario as text, without what names and explains it.
func scenarioContent(s sim.Scenario) string {
	s.Name, s.Title, s.See = "", "", ""
	text, err := json.Marshal(s)
	if err != nil { // it cannot be written: it is like no other
		return fmt.Sprintf("%p", &s)
	}
	return string(text)
}

// retitle adds the flags to the titles, and says of the explanations that they are without them.
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
