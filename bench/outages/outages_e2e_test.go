//go:build e2e

package main

import (
	"testing"
	"time"
)

// lostAtMost is how many calls an outage may cost. What is not in it costs none.
var lostAtMost = map[string]int{
	"fails for 2 s": rate * 2 * 2 / 100, // 2% of the calls that start meanwhile
}

// TestOutages is what the tables promise of ours, hedged or not.
func TestOutages(t *testing.T) {
	rows, err := run(t.Context(), outages, []client{plain, ours, oursHedged})
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range rows {
		t.Run(r.name, func(t *testing.T) {
			without := r.results[0]
			for i, client := range []client{ours, oursHedged} {
				if with := r.results[i+1]; r.times > 0 {
					checkSaved(t, client.name, &r, without, with)
				} else {
					checkDead(t, client.name, &r, without, with)
				}
			}
		})
	}
	if err := tooBusy(rows); err != nil && t.Failed() {
		t.Log(err)
	}
}

func checkSaved(t *testing.T, client string, r *row, without, with *result) {
	t.Helper()
	t.Logf("%s: %d of %d calls lost, %d by plain gRPC; %d saved at %s",
		client, with.lost(), len(with.calls), without.lost(), len(with.rescued()), with.price())
	if without.lost() == 0 {
		t.Errorf("plain gRPC lost no call: there was no outage")
	}
	if got, most := with.lost(), lostAtMost[r.name]; got > most {
		t.Errorf("%s: %d calls lost, want at most %d", client, got, most)
	}
}

// checkDead is about calls after the default patience of 10 s.
func checkDead(t *testing.T, client string, r *row, without, with *result) {
	t.Helper()
	t.Logf("%s: calls take %v in second 1, %v in second 5, %v in second 12; %d wait at most",
		client, quantile(with.inSecond(1), 0.5), quantile(with.inSecond(5), 0.5), quantile(with.inSecond(12), 0.5), with.waiting())
	const tolerated = 50 * time.Millisecond
	if got, plain := quantile(with.inSecond(12), 0.5), quantile(without.inSecond(12), 0.5); got > plain+tolerated {
		t.Errorf("%s: a call takes %v in second 12, and %v with plain gRPC", client, got, plain)
	}
	if got, most := with.waiting(), 11*r.rate; got > most { // one second more than the patience, for a slow machine
		t.Errorf("%s: %d calls wait, want at most %d", client, got, most)
	}
}
