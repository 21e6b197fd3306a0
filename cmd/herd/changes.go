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

// wants reports whether a strategy's name contains one of the words of -strategy.
func (o *options) wants(s sim.Strategy) bool {
	return slices.ContainsFunc(strings.Split(o.only, ","), func(word string) bool {
		return strings.Contains(strings.ToLower(s.Name), strings.ToLower(strings.TrimSpace(word)))
	})
}

// change applies the flags to a scenario, and checks it.
func (o *options) change(s *sim.Scenario, added []sim.Strategy) error {
	s.Strategies = append(slices.Clip(s.Strategies), added...)
	var wrong error // since the flag that culprit is
	var culprit change
	for _, c := range o.changes {
		s.Strategies = slices.Clone(s.Strategies) // scenarios may share them
		if err := c.do(s, c.value); err != nil {
			return fmt.Errorf("%v: %w", c, err)
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
	return o.keepOnly(s)
}

// keepOnly keeps the strategies that -strategy wants.
func (o *options) keepOnly(s *sim.Scenario) error {
	var kept []sim.Strategy
	var known []string
	for _, one := range s.Strategies {
		known = append(known, strconv.Quote(one.Name))
		if o.wants(one) {
			kept = append(kept, one)
		}
	}
	if len(kept) == 0 && o.only != "" {
		return fmt.Errorf("-strategy %s: scenario %s has no such strategy, only %s", o.only, s.Name, strings.Join(known, ", "))
	}
	s.Strategies = kept
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
