package main

import (
	"strings"
	"testing"
	"time"
)

// The figures are for whoever runs the command: here only that it works, on any machine.
func TestRun(t *testing.T) {
	var out strings.Builder
	s := setting{calls: 200, workers: 8, replicas: 3, usual: time.Millisecond, slow: 20 * time.Millisecond, oneIn: 50}
	if err := run(t.Context(), s, &out); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"without hedging", "hedge after 2ms", "hedge at the 0.96-quantile", "p99.9",
		"without hedging, round_robin", "hedge after 2ms, round_robin", "hedge after 2ms, grpcretry_round_robin"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("run printed\n%s\nwithout %q", out.String(), want)
		}
	}
}

func TestBadFlags(t *testing.T) {
	good := setting{calls: 1, workers: 1, replicas: 1, usual: 1, slow: 1, oneIn: 1}
	if err := good.check(); err != nil {
		t.Errorf("check = %v of a good setting", err)
	}
	for want, change := range map[string]func(*setting){
		"-calls is 0, want at least 1":                                      func(s *setting) { s.calls = 0 },
		"-workers is -1, want at least 1":                                   func(s *setting) { s.workers = -1 },
		"-replicas is 0, want at least 1":                                   func(s *setting) { s.replicas = 0 },
		"-one-in is 0, want at least 1":                                     func(s *setting) { s.oneIn = 0 },
		"-usual 1s and -slow 1ns, want 0 or more, and the slow not quicker": func(s *setting) { s.usual = time.Second },
	} {
		bad := good
		change(&bad)
		if err := bad.check(); err == nil || err.Error() != want {
			t.Errorf("check = %v, want %s", err, want)
		}
	}
}
