//go:build e2e

package main

import (
	"math"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"
)

// TestLayers measures what make layers prints, and compares it with a simulation.
func TestLayers(t *testing.T) {
	rows, err := measured.run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%s\n\n%s\n%s", measured.describe(), tableText(rows), restText(rows))
	simulated := simulate(t)
	for _, r := range rows {
		t.Run(r.setup, func(t *testing.T) {
			checkAttempts(t, r.setup, &r.down)
			checkLost(t, &r)
			// A machine that starts calls too late also sees the end of the outage too late.
			if limit := time.Second + r.late; r.recovery >= limit {
				t.Errorf("the last failure came %v after the outage, want less than %v", r.recovery, limit)
			}
			t.Logf("%.2f attempts at D for each call during the outage, simulated %.2f",
				r.down.amplification, simulated[r.setup])
			if want := simulated[r.setup]; math.Abs(r.down.amplification/want-1) > 0.1 {
				t.Errorf("%.2f attempts at D for each call during the outage, want %.2f as simulated, within 10%%",
					r.down.amplification, want)
			}
		})
	}
}

// checkAttempts compares the attempts of calls during the outage with what each setup promises.
func checkAttempts(t *testing.T, setup string, o *outage) {
	t.Helper()
	if o.calls == 0 && setup != everything { // there, calls wait
		t.Fatal("no call started and ended during the outage")
	}
	exactly := map[string]int{noLibrary: 27, stop: 3, oneAttempt: 7}
	atMost := map[string]int{budgets: 27, everything: 3}
	if want, ok := exactly[setup]; ok && (o.attempts != want*o.calls || o.most != want) {
		t.Errorf("%d attempts for %d calls, at most %d for one, want %d for each", o.attempts, o.calls, o.most, want)
	}
	if want, ok := atMost[setup]; ok && o.most > want {
		t.Errorf("%d attempts for one call, want at most %d", o.most, want)
	}
}

// checkLost requires that no call is lost with the library's defaults. Without patience, calls do not
// wait for a connection.
func checkLost(t *testing.T, r *row) {
	t.Helper()
	if r.lostFlaky > 0 {
		t.Errorf("%d calls lost while D was flaky, want none", r.lostFlaky)
	}
	if r.setup == everything && r.lostRestart > 0 {
		t.Errorf("%d calls lost when D was killed and started again, want none", r.lostRestart)
	}
}

// simulate returns the attempts at D for each call during the outage, by setup, according to the
// simulator's study of layers.
func simulate(t *testing.T) map[string]float64 {
	t.Helper()
	herd := exec.CommandContext(t.Context(), "go", "run", ".", "-study", "layers", "-part", "layers-proof", "-v")
	herd.Dir = filepath.Join("..", "..", "cmd", "herd")
	text, err := herd.Output()
	if err != nil {
		t.Fatalf("%v: %v", herd, err)
	}
	attempts := map[string]float64{}
	for line := range strings.Lines(string(text)) {
		cells := regexp.MustCompile(`  +`).Split(strings.TrimSpace(line), -1)
		if len(cells) <= 4 {
			continue
		}
		// The first table has a strategy, ..., and its attempts per call in outages; a second one is about groups.
		if _, known := attempts[cells[0]]; !known {
			attempts[cells[0]], _ = strconv.ParseFloat(cells[4], 64)
		}
	}
	for _, s := range setups {
		if attempts[s.name] == 0 {
			t.Fatalf("the simulator has no figure for %q in\n%s", s.name, text)
		}
	}
	return attempts
}
