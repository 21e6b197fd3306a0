package main

import (
	"bytes"
	"os"
	"strings"
	"testing"
	"time"
)

func TestMain(m *testing.M) {
	runChild() // the processes that TestShortRun starts are this program
	os.Exit(m.Run())
}

// TestShortRun makes calls under faults for a moment.
func TestShortRun(t *testing.T) {
	if testing.Short() {
		t.Skip("it starts processes")
	}
	var out bytes.Buffer
	o := options{duration: 2500 * time.Millisecond, calls: 1e6, seed: 1, servers: 2, clients: 2, epoch: 500 * time.Millisecond,
		grace: 2 * time.Second, dir: t.TempDir()}
	r, err := soak(t.Context(), o, &out)
	if err != nil {
		t.Fatalf("soak: %v\n%s", err, out.String())
	}
	if r.counts.Calls < 100 || r.facts.calls != int(r.counts.Calls) || r.facts.acknowledged == 0 {
		t.Errorf("%d calls were counted, %d checked, and %d acknowledged", r.counts.Calls, r.facts.calls, r.facts.acknowledged)
	}
	if entries, err := os.ReadDir(o.dir); err != nil || len(entries) > 0 {
		t.Errorf("the ledgers are left: %v, %v", entries, err)
	}
	if text := r.markdown(); !strings.Contains(text, "| unary |") {
		t.Errorf("the tables lack a row:\n%s", text)
	}
}

func TestArguments(t *testing.T) {
	for _, tt := range []struct{ args, want string }{
		{"-duration 0s", "-duration is 0s"},
		{"-duration 25h", "-duration is 25h0m0s"},
		{"-calls 0", "-calls is 0"},
		{"-servers 1", "-servers is 1"},
		{"-clients 17", "-clients is 17"},
		{"now", `unexpected argument "now"`},
	} {
		var out bytes.Buffer
		if err := command(t.Context(), strings.Fields(tt.args), &out); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("soak %s: %v, want %q", tt.args, err, tt.want)
		}
	}
}

func TestViolationReadsWell(t *testing.T) {
	dir := t.TempDir()
	v := violation{Who: "client 1", Call: "1-2-3", Kind: "unary", What: "it ran twice", Timeline: "0s attempt 1 starts", Seed: 7}
	v.report(dir)
	reader := violationReader{dir: dir}
	found, err := reader.next()
	if err != nil || len(found) != 1 {
		t.Fatalf("next = %v, %v, want one violation", found, err)
	}
	want := "VIOLATION, found by client 1, seed 7, call 1-2-3 (unary):\n  it ran twice\n  timeline:\n    0s attempt 1 starts\n"
	if got := found[0].String(); got != want {
		t.Errorf("String = %q, want %q", got, want)
	}
	if found, err := reader.next(); err != nil || len(found) > 0 {
		t.Errorf("the second next = %v, %v, want none", found, err)
	}
}
