package main

import (
	"bytes"
	"context"
	"flag"
	"image/png"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/cmd/herd/internal/sim"
)

var thorough = flag.Bool(
	"thorough",
	false,
	"run all simulations in short mode and under the race detector, too, as make simulations-race does",
)

// looksAtFigures skips a test of the figures of many simulations in short mode and under the race
// detector. The detector makes simulations ten times as slow, and has nothing to find in them:
// each runs on one goroutine. Tests of simulations in parallel, and of real calls, do not skip.
func looksAtFigures(t testing.TB) {
	t.Helper()
	if (raceDetector || testing.Short()) && !*thorough {
		t.Skip("many calls are simulated: not in short mode, nor with the race detector, but with -thorough")
	}
}

func contains(s, part string) bool { return strings.Contains(s, part) }

// herd runs the program with arguments, and gives what it printed.
func herd(t *testing.T, args ...string) (stdout, stderr string, status int) {
	t.Helper()
	var out, errs bytes.Buffer
	status = run(t.Context(), args, &out, &errs)
	return out.String(), errs.String(), status
}

func TestClassicIsPrinted(t *testing.T) {
	out, _, status := herd(t, "-strategy", "exponential,full", "-v")
	for _, want := range []string{
		"classic: All clients call at the same time, and the server is down for 10 s.",
		"exponential      1,000   9,000          10.00",
	} {
		if !contains(out, want) {
			t.Errorf("herd -v: printed nothing like %q in\n%s", want, out)
		}
	}
	if status != 0 || contains(out, "decorrelated,") {
		t.Errorf("herd -strategy exponential,full -v: status %d, printed\n%s", status, out)
	}
}

// Without -v there is a table, and what it means.
func TestSummaryIsPrinted(t *testing.T) {
	out, _, _ := herd(t, "-strategy", "exponential,full")
	for _, want := range []string{
		"strategy     calls that succeed  attempts per call  in outages      p50      p99  recovered after",
		"exponential      1,000 of 1,000                 10          10   32.7 s   52.7 s             33 s",
		`It means: "full jitter" serves callers best. 1,000 of 1,000 calls succeed, 99% of these within`,
		"With -v herd prints",
	} {
		if !contains(out, want) {
			t.Errorf("herd: printed nothing like %q in\n%s", want, out)
		}
	}
	if lines := strings.Count(out, "\n"); lines > 20 {
		t.Errorf("herd: printed %d lines, want at most 20:\n%s", lines, out)
	}
	out, _, _ = herd(t, "-policy", "testdata/explain/throttled.json", "-strategy", "full,policy")
	if contains(out, "does not recover") {
		t.Errorf("herd: blames strategies that retry nothing in\n%s", out)
	}
	out, _, _ = herd(t, "-study", "budget", "-part", "budget-10", "-strategy", "no")
	if want := `The server does not recover with "no budget".`; !contains(out, want) {
		t.Errorf("herd: printed nothing like %q in\n%s", want, out)
	}
}

// studyWith is the study that a command line selects, with its flags applied.
func studyWith(t *testing.T, args string) sim.Study {
	t.Helper()
	o, err := parse(strings.Fields(args), io.Discard)
	if err != nil {
		t.Fatalf("herd %s: %v", args, err)
	}
	study, err := o.study()
	if err != nil {
		t.Fatalf("herd %s: %v", args, err)
	}
	return study
}

func TestFlagsChangeTheScenario(t *testing.T) {
	const ms = time.Millisecond
	s := studyWith(t, "-seed 7 -duration 30s -bucket 100ms -network 10ms±2ms "+
		"-clients 50 -spread 1s -start 2s -deadline 20s -processes 4 "+
		"-capacity 30 -queue 9 -latency lognormal:20ms±30ms -reject-cost 0.25 -reject-code aborted -ignore-cancel "+
		"-outage 0s+5s,10s+2s:0.5 -slow-start 1s -silent -pushback fixed:3s "+
		"-attempts 6 -base 20ms -max 3s -multiplier 3 -attempt-timeout 1s -max-elapsed 9s "+
		"-budget ratio:0.1,2,5s -ignore-pushback -strategy full").Scenarios[0]
	if s.Seed != 7 || s.Duration != 30*time.Second || s.Bucket != 100*ms ||
		s.Network != (sim.Distribution{Shape: sim.NormalShape, Mean: 10 * ms, Spread: 2 * ms}) {
		t.Errorf("scenario %+v", s)
	}
	if g := s.Groups[0]; g.Clients != 50 || g.Spread != time.Second || g.Start != 2*time.Second || g.Deadline != 20*time.Second ||
		g.Processes != 4 {
		t.Errorf("group %+v", g)
	}
	server := s.Servers[0]
	if server.Capacity != 30 || server.Window != 0 || server.Queue != 9 || server.Latency.Spread != 30*ms || server.RejectCost != 0.25 ||
		server.RejectCode.String() != "Aborted" || !server.IgnoresCancel || server.Pushback != (sim.Pushback{Kind: sim.FixedPushback,
		Delay: 3 * time.Second}) {
		t.Errorf("server %+v", server)
	}
	if o := server.Outages; len(o) != 2 || o[0].For != 5*time.Second || !o[0].Silent || o[1].Left != 0.5 || o[1].Silent ||
		o[1].SlowStart != time.Second {
		t.Errorf("outages %+v", o)
	}
	p := s.Strategies[0]
	if p.Policy.Backoff != (grpcretry.Exponential{Base: 20 * ms, Max: 3 * time.Second, Multiplier: 3}) || p.Policy.MaxAttempts != 6 ||
		p.Policy.AttemptTimeout != time.Second || p.Policy.MaxElapsed != 9*time.Second || !p.IgnorePushback ||
		p.Budget.Kind != sim.RatioBudget || p.Budget.MinPerSecond != 2 || p.Budget.Window != 5*time.Second {
		t.Errorf("strategy %+v", p)
	}
	s = studyWith(t, "-rate 5 -even -stop 9s -outage-code internal -codes internal,ABORTED -jitter equal -max-server-delay 3s "+
		"-also equal:1s..4sx3 -also decorrelated:1s..7s -also constant:2s -strategy full,equal:,decorrelated:,constant:").Scenarios[0]
	if g := s.Groups[0]; g.Rate != 5 || !g.Even || g.Clients != 0 || s.Servers[0].Outages[0].Code.String() != "Internal" ||
		len(s.Strategies) != 4 {
		t.Errorf("scenario %+v", s)
	}
	for i, want := range []grpcretry.Backoff{
		grpcretry.Exponential{Base: 100 * ms, Max: 10 * time.Second, Jitter: grpcretry.EqualJitter},
		grpcretry.Exponential{Base: time.Second, Max: 4 * time.Second, Multiplier: 3, Jitter: grpcretry.EqualJitter},
		grpcretry.Decorrelated{Base: time.Second, Max: 7 * time.Second},
		grpcretry.Constant(2 * time.Second),
	} {
		if p := s.Strategies[i].Policy; p.Backoff != want || len(p.Codes) != 2 || p.MaxServerDelay != 3*time.Second ||
			p.MaxAttempts != 1_000_000_000 {
			t.Errorf("strategy %d: %+v, want %+v", i, p, want)
		}
	}
	s = studyWith(t, "-replicas 3 -hedge quantile:0.9,5ms..2s -attempts 3 -hedge after:20ms -strategy full").Scenarios[0]
	if one := s.Strategies[0]; s.Servers[0].Replicas != 3 || one.Hedging.Kind != sim.HedgeAfter || one.Hedging.Delay != 20*ms ||
		one.Policy.MaxAttempts != 3 {
		t.Errorf("replicas and hedging: %+v", s)
	}
	s = studyWith(t, "-study tail -hedge quantile:0.9,5ms..2s -strategy without").Scenarios[0]
	if h := s.Strategies[0].Hedging; h == nil || h.Quantile != 0.9 || h.AtLeast != 5*ms || h.AtMost != 2*time.Second {
		t.Errorf("hedging: %+v", h)
	}
	for _, one := range studyWith(t, "-study tail -hedge none").Scenarios[0].Strategies {
		if one.Hedging != nil {
			t.Errorf("-hedge none leaves %+v", one)
		}
	}
	for flag, want := range map[string]sim.Budget{
		"ratio:0.2,0,10s,reserve=4": {Kind: sim.RatioBudget, Ratio: 0.2, Reserve: 4, Window: 10 * time.Second},
		"ratio:0.2,1,reserve=4":     {Kind: sim.RatioBudget, Ratio: 0.2, Reserve: 4, MinPerSecond: 1},
		"finagle:0.2,10,5s":         {Kind: sim.FinagleBudget, Ratio: 0.2, MinPerSecond: 10, Window: 5 * time.Second},
	} {
		if got := studyWith(t, "-strategy full -budget "+flag).Scenarios[0].Strategies[0].Budget; !reflect.DeepEqual(got, want) {
			t.Errorf("-budget %s: %+v, want %+v", flag, got, want)
		}
	}
	s = studyWith(t, "-rate 20 -stop 3s -window 1s -pushback spread:9 -outage none -strategy full").Scenarios[0]
	if s.Servers[0].Window != time.Second || s.Servers[0].Pushback.Rate != 9 || len(s.Servers[0].Outages) > 0 {
		t.Errorf("-outage none: %+v", s)
	}
}

// Flags choose scenarios and strategies. If they set what a sweep varies, one scenario of each row is left.
func TestFlagsChooseWhatIsCompared(t *testing.T) {
	for _, tt := range []struct{ args, scenarios, strategies string }{
		{"-study budget -processes 50 -attempts 3", "budget, budget-queue",
			"no retries, no budget, default, Finagle 20% + 10/s, 10% + 0.1/s, A6 throttle"},
		{"-study budget -part budget-10 -strategy budget,throttle", "budget-10", "no budget, A6 throttle"},
		{"-study drain -processes 9 -strategy ratio", "drain-20%, drain-10%, drain-5%", "ratio 0.1, ratio 0.05"},
		{"-study layers -processes 50 -strategy default", "layers-10, layers-100, layers-1000, layers-10000, " +
			"layers-measures-10, layers-measures-100, layers-measures-1000, layers-measures-10000", "default"}, // there, it varies in the servers
		{"-also constant:1ms", "classic", "constant 1ms, exponential, full jitter, equal jitter, decorrelated, constant:1ms"},
	} {
		study := studyWith(t, tt.args)
		var scenarios, strategies []string
		for _, s := range study.Scenarios {
			scenarios = append(scenarios, s.Name)
			if changed := contains(tt.args, "-processes") || contains(tt.args, "-also"); contains(s.Title, ", but with -") != changed {
				t.Errorf("herd %s: the title %q does not name the flags", tt.args, s.Title)
			}
		}
		for _, one := range study.Scenarios[0].Strategies {
			strategies = append(strategies, one.Name)
		}
		if a, b := strings.Join(scenarios, ", "), strings.Join(strategies, ", "); a != tt.scenarios || b != tt.strategies {
			t.Errorf("herd %s: scenarios %s with strategies %s; want %s with %s", tt.args, a, b, tt.scenarios, tt.strategies)
		}
	}
}

// What flags change is said in the title, and that the explanation is of the study without them.
func TestTitlesNameTheFlags(t *testing.T) {
	for _, study := range []string{"classic", "layers", "tail"} {
		out, errs, status := herd(t, "-study", study, "-clients", "20", "-stop", "0s", "-duration", "300ms", "-v")
		if status != 0 || !contains(strings.Join(strings.Fields(out), " "), "-clients 20") || !contains(out, "Without these flags: ") {
			t.Errorf("-study %s: status %d, %s\n%s", study, status, errs, out)
		}
	}
}

// Errors about the command line or a file name the mistake.
func TestMistakesAreNamed(t *testing.T) {
	folder := t.TempDir()
	bad := filepath.Join(folder, "bad.json")
	if err := os.WriteFile(bad, []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		args   string
		status int
		want   string
	}{
		{"-nonsense", 2, "-nonsense"},
		{"extra", 2, `unexpected argument "extra"`},
		{"-runs 0", 2, "-runs 0: want at least 1"},
		{"-clients many", 2, `invalid value "many" for flag -clients`},
		{"-network 10", 2, `invalid value "10" for flag -network`},
		{"-network pareto:10ms^x", 2, `"x" is not a number`},
		{"-outage 10s", 2, `"10s" is not an outage`},
		{"-outage 1s+1s:half", 2, `"half" is not a share`},
		{"-pushback later", 2, "want none, fixed:5s"},
		{"-budget plenty", 2, "want default, unlimited"},
		{"-budget ratio:1", 2, "ratio has 1 numbers, want 2"},
		{"-budget ratio:1,x", 2, `"x" is not a number`},
		{"-budget ratio:1,2,reserve=x", 2, `"x" is not a number`},
		{"-budget finagle:0.2", 2, "finagle has 1 numbers, want 2"},
		{"-budget throttle:10,0.1,reserve=2", 2, `"reserve=2" is not a number`},
		{"-budget ratio:0.1,0,reserve=-2", 1, "RatioBudget.Reserve is -2, want a finite number of at least 0"},
		{"-study budget -part nothing", 1, "-part nothing: there is no such scenario, want some of budget-10, budget-100"},
		{"-hedge soon", 2, "want after:50ms"},
		{"-hedge after:x", 2, `invalid value "after:x" for flag -hedge`},
		{"-hedge quantile:x", 2, `"x" is not a number`},
		{"-hedge quantile:0.9,5ms", 2, `"5ms" are not bounds`},
		{"-hedge quantile:0.9,5..1s", 2, "missing unit"},
		{"-hedge quantile:1.5", 1, "strategies[0].hedging.quantile is 1.5, want between 0 and 1"},
		{"-reject-code busy", 2, "-reject-code"},
		{"-codes busy", 2, "-codes"},
		{"-jitter some", 2, "want full, equal, proportional or none"},
		{"-also linear:1s", 2, "want full:100ms..5s×2"},
		{"-also decorrelated:1s..2sx2", 2, "want full:100ms..5s×2"},
		{"-also full:1s..2sxmuch", 2, `"much" is not a number`},
		{"-also full:9s..2s", 1, "Exponential.Max is 2s, below Base 9s"},
		{"-study none", 1, `-study "none": there is no such study, want one of classic, brownouts, budget,`},
		{"-strategy magic", 1, `-strategy magic: scenario classic has no such strategy, only "constant 1ms"`},
		{"-clients -5", 1, "-clients -5: sim: groups[0].clients is -5, want 0 to"},
		{"-capacity 30 -window 9ms -capacity 0 -seed 3", 1, "-capacity 0: sim: servers[0].window is 9ms"},
		{"-network square:10ms", 1, `network.shape is "square"`},
		{"-base 20s -strategy full", 1, "Exponential.Max is 10s, below Base 20s"},
		{"-policy " + bad + ".missing", 1, "no such file"},
		{"-policy " + bad, 1, "there is no retryPolicy"},
		{"-strategy full -png " + folder + "/no/such/folder.png", 1, "-png: open "},
	} {
		_, errs, status := herd(t, strings.Fields(tt.args)...)
		if status != tt.status || !contains(errs, tt.want) {
			t.Errorf("herd %s: status %d, %q; want %d and %q", tt.args, status, errs, tt.status, tt.want)
		}
	}
}

func TestHelpAndList(t *testing.T) {
	if _, errs, status := herd(t, "-h"); status != 0 || !contains(errs, "-capacity number") {
		t.Errorf("herd -h: status %d\n%s", status, errs)
	}
	out, _, status := herd(t, "-list")
	for _, s := range sim.Studies() {
		if !contains(out, s.Name+": "+s.Title) {
			t.Errorf("herd -list says nothing of %s", s.Name)
		}
	}
	if status != 0 {
		t.Errorf("herd -list: status %d", status)
	}
}

func TestEveryStudyIsPrinted(t *testing.T) {
	looksAtFigures(t)
	for _, s := range sim.Studies() {
		args := []string{"-study", s.Name}
		switch s.Name {
		case "classic":
			args = append(args, "-strategy", "jitter,decorrelated")
		case "budget", "layers", "tail":
			args = append(args, "-duration", "3s") // the rest is seen in package sim
		}
		out, errs, status := herd(t, args...)
		if status != 0 || !contains(out, s.Scenarios[0].Strategies[len(s.Scenarios[0].Strategies)-1].Name) {
			t.Errorf("herd -study %s: status %d, %s\n%s", s.Name, status, errs, out)
		}
	}
}

// An interrupted run shows its results so far, and fails.
func TestInterruptedShowsWhatThereIs(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // which is noticed after some thousand events
	var out, errs bytes.Buffer
	status := run(ctx, []string{"-clients", "100000", "-strategy", "constant"}, &out, &errs)
	if status != 1 || !contains(out.String(), "Stopped before the end. The results so far:") ||
		!contains(out.String(), "constant 1ms (stopped)") ||
		!contains(strings.Join(strings.Fields(out.String()), " "), "down for 10 s, but with -clients 100000") {
		t.Errorf("interrupted: status %d, %s\n%s", status, errs.String(), out.String())
	}
}

func TestFilesAreWritten(t *testing.T) {
	folder := t.TempDir()
	at := func(name string) string { return filepath.Join(folder, name) }
	args := []string{"-strategy", "full,exponential", "-png", at("p.png")}
	if _, errs, status := herd(t, args...); status != 0 {
		t.Fatalf("herd: status %d, %s", status, errs)
	}
	picture, err := png.Decode(bytes.NewReader(read(t, at("p.png"))))
	if err != nil {
		t.Fatal(err)
	}
	if b := picture.Bounds(); b.Dx() != 1070 && b.Dx() != 1071 || b.Dy() < 400 {
		t.Errorf("picture of %v, want 17 cm at 160 dpi", b)
	}
}

// Several scenarios in a picture, and a picture of almost nothing.
func TestPicturesOfOtherShapes(t *testing.T) {
	looksAtFigures(t)
	file := filepath.Join(t.TempDir(), "p.png")
	for _, args := range []string{
		"-study layers -duration 3s",
		"-study layers -part layers-10,layers-measures-10 -duration 12s",
		"-study tail -duration 3s",
		"-study tail -duration 3s -latency 3s", // no call succeeds
		"-study pushback",
		"-clients 1 -outage none -strategy full",
	} {
		if _, errs, status := herd(t, append(strings.Fields(args), "-png", file)...); status != 0 {
			t.Errorf("herd %s: status %d, %s", args, status, errs)
		}
	}
}

// wantReadable compares the height of a picture with its width.
func wantReadable(t *testing.T, name string, picture []byte) {
	t.Helper()
	got, err := png.DecodeConfig(bytes.NewReader(picture))
	if err != nil {
		t.Errorf("%s: %v", name, err)
	} else if got.Height > 1800 && got.Height > 170*got.Width/100 {
		t.Errorf("%s: a picture of %d × %d pixels", name, got.Width, got.Height)
	}
}

func read(t *testing.T, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestProgressIsShownOfLongRuns(t *testing.T) {
	var out bytes.Buffer
	p := &progress{w: &out, shown: time.Now().Add(time.Hour)}
	p.begin("x", 1, 2)
	p.show(sim.Progress{Share: 0.5, Events: 1000})
	if out.Len() > 0 {
		t.Errorf("a short run shows %q, want nothing", out.String())
	}
	p.shown = time.Now().Add(-time.Minute)
	p.show(sim.Progress{Share: 0.5, Events: 1_234_567})
	if got := out.String(); got != "herd: x: 75%, 1,234,567 events\n" {
		t.Errorf("progress is shown as %q", got)
	}
}

func TestNumbersForPeople(t *testing.T) {
	for v, want := range map[float64]string{0: "0", 2.5: "2.5", 10.4: "10", 999: "999", 1000: "1,000", 1234567: "1,234,567", -4321: "-4,321"} {
		if got := grouped(v); got != want {
			t.Errorf("grouped(%v) = %q, want %q", v, got, want)
		}
	}
	for d, want := range map[time.Duration]string{
		0: "0 s", 15 * time.Microsecond: "15 µs", 300 * time.Millisecond: "300 ms", time.Second: "1 s", 1500 * time.Millisecond: "1.5 s",
		19065 * time.Millisecond: "19.07 s", 49998 * time.Millisecond: "50 s", 101 * time.Second: "101 s",
	} {
		if got := shortTime(d); got != want {
			t.Errorf("shortTime(%v) = %q, want %q", d, got, want)
		}
	}
}
