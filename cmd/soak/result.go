package main

import (
	"fmt"
	"maps"
	"runtime"
	"slices"
	"strings"
	"time"
)

// A result is what a run has counted.
type result struct {
	counts    Counts
	facts     epochFacts
	faults    map[string]int64
	processes uint64
	took      time.Duration
	options   options
	race      bool
}

func (r *run) result(took time.Duration) *result {
	counts := r.total()
	r.mu.Lock()
	defer r.mu.Unlock()
	r.faults.mu.Lock()
	defer r.faults.mu.Unlock()
	return &result{counts, r.facts, maps.Clone(r.faults.counts), r.processes.Load(), took, r.options, raceDetector}
}

// markdown returns the tables of a page.
func (r *result) markdown() string {
	var b strings.Builder
	c := &r.counts
	detector := ""
	if r.race {
		detector = ", with the race detector"
	}
	fmt.Fprintf(&b, "%s calls in %v (%s a second) by %d client processes to %d servers, on %d cores with %s%s, seed %d.\n\n",
		number(c.Calls), r.took.Round(time.Second), number(int64(float64(c.Calls)/r.took.Seconds())), r.options.clients, r.options.servers,
		runtime.NumCPU(), runtime.Version(), detector, r.options.seed)
	b.WriteString("| calls | made | succeeded | failed |\n|---|---:|---:|---:|\n")
	for _, kind := range kindNames {
		outcomes := c.Kinds[kind]
		if len(outcomes) == 0 {
			continue
		}
		all := int64(0)
		for _, n := range outcomes {
			all += n
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s |\n", kind, number(all), number(outcomes["ok"]), number(all-outcomes["ok"]))
	}
	b.WriteString("\n| what happened | |\n|---|---:|\n")
	for _, row := range []struct {
		name  string
		count int64
	}{
		{"attempts of calls that may be retried", c.Attempts},
		{"retries", c.Retries},
		{"hedges", c.Hedges},
		{"attempts that reached no server", c.Unsent},
		{"calls that passed straight through", c.Passed},
		{"messages received in streams", c.Messages},
		{"calls acknowledged, and found in the servers' ledger", int64(r.facts.acknowledged)},
		{"attempts that ran, by the servers' ledger", int64(r.facts.runs)},
		{"attempts that servers refused", int64(r.facts.refused)},
		{"policy updates", c.Updates},
		{"ClientConns replaced", c.Conns},
		{"server processes", int64(r.processes)},
		{"calls that returned more than 100 ms after their deadline", c.Late},
		{"records that came too late to be checked", int64(r.facts.late)},
		{"most goroutines of a client", int64(c.Goroutines)},
		{"largest heap of a client, in MiB", int64(c.Heap >> 20)},
	} {
		fmt.Fprintf(&b, "| %s | %s |\n", row.name, number(row.count))
	}
	return b.String()
}

// details returns the tables of faults, and of how failed calls ended, which are too long for a page.
func (r *result) details() string {
	var b strings.Builder
	b.WriteString("\n| faults | |\n|---|---:|\n")
	for _, kind := range slices.Sorted(maps.Keys(r.faults)) {
		fmt.Fprintf(&b, "| %s | %s |\n", kind, number(r.faults[kind]))
	}
	b.WriteString("\n| failed calls ended with | |\n|---|---:|\n")
	ends := map[string]int64{}
	for _, outcomes := range r.counts.Kinds {
		for how, n := range outcomes {
			if how != "ok" {
				ends[how] += n
			}
		}
	}
	for _, how := range slices.SortedFunc(maps.Keys(ends), func(a, b string) int { return int(ends[b] - ends[a]) }) {
		fmt.Fprintf(&b, "| `%s` | %s |\n", how, number(ends[how]))
	}
	return b.String()
}

// number writes a number with commas.
func number(n int64) string {
	s := fmt.Sprint(n)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}
