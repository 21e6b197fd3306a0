package main

import (
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/perf/benchfmt"
	"golang.org/x/perf/benchmath"
)

// measurements are what the benchmarks of one or more runs found.
type measurements struct {
	machine map[string]string // the lines "key: value" before the first benchmark
	loads   []float64         // of the machine, when each run began
	runs    int

	samples map[sampleKey]*sample
	order   []sampleKey // as they were read first
}

// A sampleKey says what was measured: of a benchmark, in which case, in which unit.
type sampleKey struct {
	benchmark string // UnaryInterceptor
	key       string // info=plain/cores=one/client=bare
	unit      string // sec/op, B/op, allocs/op, attempts/call
}

// A sample has one value for each run in which the benchmark was measured.
type sample struct{ byRun map[int]float64 }

func readFiles(names []string) (*measurements, error) {
	if len(names) == 0 {
		return nil, errors.New("name a file with the output of the benchmarks")
	}
	m := &measurements{machine: map[string]string{}, samples: map[sampleKey]*sample{}}
	for _, name := range names {
		f, err := os.Open(name)
		if err != nil {
			return nil, err
		}
		err = m.read(f, name)
		f.Close()
		if err != nil {
			return nil, err
		}
	}
	if len(m.samples) == 0 {
		return nil, fmt.Errorf("no benchmark in %s", strings.Join(names, ", "))
	}
	return m, nil
}

// read adds what is in r. A line "run: 3" begins the third run, else all is of one.
func (m *measurements) read(r io.Reader, name string) error {
	run := ""
	reader := benchfmt.NewReader(r, name)
	for reader.Scan() {
		switch record := reader.Result().(type) {
		case *benchfmt.SyntaxError:
			return record
		case *benchfmt.Result:
			if now := record.GetConfig("run"); now != run || m.runs == 0 {
				run = now
				m.beginRun(record)
			}
			m.add(record)
		}
	}
	return reader.Err()
}

func (m *measurements) beginRun(r *benchfmt.Result) {
	m.runs++
	for _, c := range r.Config {
		if c.File {
			m.machine[c.Key] = string(c.Value)
		}
	}
	if load, err := strconv.ParseFloat(r.GetConfig("load"), 64); err == nil {
		m.loads = append(m.loads, load)
	}
}

func (m *measurements) add(r *benchfmt.Result) {
	base, parts := r.Name.Parts()
	var key []string
	for _, part := range parts {
		if part[0] == '/' { // else the number of processors
			key = append(key, string(part[1:]))
		}
	}
	for _, v := range r.Values {
		k := sampleKey{string(base), strings.Join(key, "/"), v.Unit}
		s := m.samples[k]
		if s == nil {
			s = &sample{byRun: map[int]float64{}}
			m.samples[k] = s
			m.order = append(m.order, k)
		}
		s.byRun[m.runs] = v.Value
	}
}

// find is nil for what was not measured.
func (m *measurements) find(benchmark, key, unit string) *sample {
	return m.samples[sampleKey{benchmark, key, unit}]
}

// values of a key, such as client, of a benchmark, in the order in which they were read.
func (m *measurements) values(benchmark, key string) []string {
	var found []string
	for _, k := range m.order {
		if k.benchmark != benchmark {
			continue
		}
		if v := valueOf(k.key, key); v != "" && !slices.Contains(found, v) {
			found = append(found, v)
		}
	}
	return found
}

// valueOf finds the value of name in a key such as info=plain/client=bare.
func valueOf(key, name string) string {
	for part := range strings.SplitSeq(key, "/") {
		if k, v, ok := strings.Cut(part, "="); ok && k == name {
			return v
		}
	}
	return ""
}

func (s *sample) values() []float64 { return slices.Collect(maps.Values(s.byRun)) }

// summary has the median and its 95% confidence interval, which is infinite if there are too few runs.
func (s *sample) summary() benchmath.Summary {
	return benchmath.AssumeNothing.Summary(benchmath.NewSample(s.values(), &benchmath.DefaultThresholds), 0.95)
}

func (s *sample) center() float64 { return s.summary().Center }

// interval formats the confidence interval, in brackets; "" if there are too few runs.
func (s *sample) interval(show func(float64) string) string {
	found := s.summary()
	if math.IsInf(found.Lo, 0) || math.IsInf(found.Hi, 0) {
		return ""
	}
	return fmt.Sprintf(" (%s to %s)", show(found.Lo), show(found.Hi))
}

// paired applies a function to both samples within each run: what slows a run down slows down both.
func (s *sample) paired(other *sample, f func(v, o float64) float64) *sample {
	found := &sample{byRun: map[int]float64{}}
	for run, v := range s.byRun {
		if o, both := other.byRun[run]; both {
			found.byRun[run] = f(v, o)
		}
	}
	return found
}

func (s *sample) over(other *sample) float64 {
	return s.paired(other, func(v, o float64) float64 { return v / o }).center()
}

func (s *sample) minus(other *sample) *sample {
	return s.paired(other, func(v, o float64) float64 { return v - o })
}

// has says whether anything of a benchmark was measured.
func (m *measurements) has(benchmark string) bool {
	return slices.ContainsFunc(m.order, func(k sampleKey) bool { return k.benchmark == benchmark })
}
