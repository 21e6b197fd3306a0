package grpcretry

import (
	"context"
	"encoding/json"
	"flag"
	"math"
	"os"
	"slices"
	"testing"
	"time"
)

// almostOne is the largest u that a source of [0, 1) returns.
const almostOne = 1 - 0x1p-53

// A backoffFunc is a Backoff that users might write.
type backoffFunc func(retry int, prev time.Duration, u float64) time.Duration

func (f backoffFunc) Delay(retry int, prev time.Duration, u float64) time.Duration {
	return f(retry, prev, u)
}

func TestBackoffFormulas(t *testing.T) {
	ms := func(n float64) time.Duration { return time.Duration(n * float64(time.Millisecond)) }
	of := func(j Jitter) Backoff {
		return Exponential{Base: 100 * time.Millisecond, Max: 5 * time.Second, Multiplier: 2, Jitter: j}
	}
	decorrelated := Decorrelated{Base: ms(100), Max: ms(5000)}
	for _, tt := range []struct {
		name    string
		backoff Backoff
		retry   int
		prev    time.Duration
		u       float64
		want    time.Duration
	}{
		{"full, lowest: 0·d", of(FullJitter), 1, 0, 0, 0},
		{"full, first retry: 0.5·100", of(FullJitter), 1, 0, 0.5, ms(50)},
		{"full, third retry: 0.75·400", of(FullJitter), 3, 0, 0.75, ms(300)},
		{"full, at the cap: 0.25·5000", of(FullJitter), 7, 0, 0.25, ms(1250)},
		{"full, just below the cap: 0.5·3200", of(FullJitter), 6, 0, 0.5, ms(1600)},
		{"full ignores prev", of(FullJitter), 1, time.Hour, 0.5, ms(50)},

		{"equal, lowest: d/2", of(EqualJitter), 1, 0, 0, ms(50)},
		{"equal: 200/2 + 0.5·200/2", of(EqualJitter), 2, 0, 0.5, ms(150)},
		{"equal, at the cap: 2500 + 0.25·2500", of(EqualJitter), 50, 0, 0.25, ms(3125)},

		{"proportional, lowest: 0.8·100", of(ProportionalJitter), 1, 0, 0, ms(80)},
		{"proportional, middle: d", of(ProportionalJitter), 1, 0, 0.5, ms(100)},
		{"proportional: 200·(0.8 + 0.4·0.75)", of(ProportionalJitter), 2, 0, 0.75, ms(220)},
		{"proportional, over the cap: 5000·(0.8 + 0.4·0.75)", of(ProportionalJitter), 9, 0, 0.75, ms(5500)},

		{"none, first", of(NoJitter), 1, 0, 0.9, ms(100)},
		{"none, second", of(NoJitter), 2, 0, 0, ms(200)},
		{"none, sixth", of(NoJitter), 6, 0, 0.3, ms(3200)},
		{"none, the cap", of(NoJitter), 7, 0, 0.3, ms(5000)},
		{"none, multiplier 1 stays", Exponential{Base: ms(70), Max: ms(90), Multiplier: 1, Jitter: NoJitter}, 1e6, 0, 0, ms(70)},
		{"none, multiplier 1.5", Exponential{Base: ms(100), Max: ms(900), Multiplier: 1.5, Jitter: NoJitter}, 4, 0, 0, ms(337.5)},
		{"none, multiplier 0.5 shrinks: 100·0.25", Exponential{ms(100), ms(900), 0.5, NoJitter}, 3, 0, 0, ms(25)},
		{"none, multiplier 0.5, in the end 0", Exponential{ms(100), ms(900), 0.5, NoJitter}, 1e6, 0, 0, 0},
		{"full, multiplier 0.5: 0.5·50", Exponential{ms(100), ms(900), 0.5, FullJitter}, 2, 0, 0.5, ms(25)},
		// New rejects a Base above Max, and a multiplier below 1, but a service config may have both.
		{"none, base above the cap", Exponential{ms(500), ms(100), 2, NoJitter}, 1, 0, 0, ms(100)},
		{"none, base above the cap, multiplier 0.5: 500·0.25 is still above", Exponential{ms(500), ms(100), 0.5, NoJitter}, 3, 0, 0, ms(100)},
		{"none, base above the cap, multiplier 0.5: 500·0.125", Exponential{ms(500), ms(100), 0.5, NoJitter}, 4, 0, 0, ms(62.5)},
		{"proportional, base above the cap, multiplier 0.5: 62.5·(0.8 + 0.4·0.75)", Exponential{ms(500), ms(100), 0.5, ProportionalJitter},
			4, 0, 0.75, ms(68.75)},
		{"a retry number below 1 counts as 1", of(NoJitter), 0, 0, 0, ms(100)},

		// Base + u·(3·max(prev, Base) − Base)
		{"decorrelated, first, lowest: 100", decorrelated, 1, 0, 0, ms(100)},
		{"decorrelated, first: 100 + 0.5·(300 − 100)", decorrelated, 1, 0, 0.5, ms(200)},
		{"decorrelated, a prev below Base counts as Base", decorrelated, 2, ms(7), 0.5, ms(200)},
		{"decorrelated: 100 + 0.5·(1200 − 100)", decorrelated, 2, ms(400), 0.5, ms(650)},
		{"decorrelated, lowest is Base, not prev", decorrelated, 2, ms(400), 0, ms(100)},
		{"decorrelated, 100 + 0.75·(6900 − 100) is over the cap", decorrelated, 2, ms(2300), 0.75, ms(5000)},
		{"decorrelated ignores retry", decorrelated, 1e6, ms(400), 0.5, ms(650)},
		{"decorrelated, by default", Decorrelated{}, 2, ms(400), 0.5, ms(650)},
		{"decorrelated, by default at the cap", Decorrelated{}, 2, ms(2300), 0.75, ms(5000)},

		{"constant", Constant(ms(250)), 3, ms(7), 0.7, ms(250)},
		{"constant zero", Constant(0), 1, 0, 0.7, 0},
		{"constant below zero", Constant(-1), 1, 0, 0.7, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := tt.backoff.Delay(tt.retry, tt.prev, tt.u)
			if diff := got - tt.want; diff < -1 || diff > 1 { // a nanosecond for the rounding of float64
				t.Errorf("%+v.Delay(%d, %v, %v) = %v, want %v", tt.backoff, tt.retry, tt.prev, tt.u, got, tt.want)
			}
		})
	}
}

func TestEveryWaitSourceHasAText(t *testing.T) {
	for source, want := range map[WaitSource]string{
		-1: "WaitSource(-1)", 0: "none", WaitBackoff: "backoff", WaitPushback: "pushback", WaitRetryInfo: "retry_info",
		waitHedgeDelay: "hedge_delay", waitConnect: "connect", waitConnect + 1: "WaitSource(6)",
	} {
		if got := source.String(); got != want {
			t.Errorf("source %d is %q, want %q", int(source), got, want)
		}
	}
}

// A float64 has 53 bits.
func TestALongBaseIsNotRounded(t *testing.T) {
	const base time.Duration = 1<<53 + 1
	if got := (Decorrelated{Base: base, Max: 1 << 62}).Delay(1, 0, 0); got != base {
		t.Errorf("Delay = %d, want %d", got, base)
	}
}

func TestProportionalJitterKeepsTheBoundsOfA6(t *testing.T) {
	for _, c := range readJSON[struct {
		Name   string
		Policy struct {
			InitialBackoff, MaxBackoff string
			BackoffMultiplier          float64
		}
		Bounds []struct {
			N     int
			Lower time.Duration `json:"lower_ns"`
			Upper time.Duration `json:"upper_ns"`
		}
	}](t, "testdata/a6/backoff.json") {
		t.Run(c.Name, func(t *testing.T) {
			b := Exponential{
				Base:       parseDuration(t, c.Policy.InitialBackoff),
				Max:        parseDuration(t, c.Policy.MaxBackoff),
				Multiplier: c.Policy.BackoffMultiplier,
				Jitter:     ProportionalJitter,
			}
			if len(c.Bounds) == 0 {
				t.Fatal("no bounds")
			}
			for _, want := range c.Bounds {
				for _, u := range []float64{0, 0.1, 0.5, 0.9, almostOne} {
					if got := b.Delay(want.N, 0, u); got < want.Lower-1 || got > want.Upper {
						t.Errorf("Delay(%d, 0, %v) = %v, want %v … %v", want.N, u, got, want.Lower, want.Upper)
					}
				}
				// The bounds are reached, so the jitter is not less than A6's.
				low, high := b.Delay(want.N, 0, 0), b.Delay(want.N, 0, almostOne)
				if low > want.Lower+1 || high < want.Upper-2 {
					t.Errorf("n = %d: waits span %v … %v, want %v … %v", want.N, low, high, want.Lower, want.Upper)
				}
			}
		})
	}
}

// readJSON reads a file of cases; it fails the test if there is none.
func readJSON[T any](t *testing.T, name string) []T {
	t.Helper()
	data, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	var cases []T
	if err := json.Unmarshal(data, &cases); err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	if len(cases) == 0 {
		t.Fatalf("%s has no cases", name)
	}
	return cases
}

// upperBound is the most that a backoff with that cap and jitter may wait, with some
// nanoseconds for the rounding of float64.
func upperBound(limit time.Duration, j Jitter) time.Duration {
	if j != ProportionalJitter {
		return limit
	}
	fifth := limit/5 + limit>>50 + 1
	if limit > math.MaxInt64-fifth {
		return math.MaxInt64
	}
	return limit + fifth
}

func retryNumbers() []int {
	numbers := []int{math.MinInt, -1, 0, 1, 2, 3, 31, 32, 33, 62, 63, 64, 65, 1023, 1024, 1025, 999_999, 1e6, math.MaxInt}
	for n := 1.0; n < 1e6; n *= 1.37 {
		numbers = append(numbers, int(n))
	}
	return numbers
}

var (
	spans = []time.Duration{1, 2, 3, time.Microsecond, time.Millisecond, 100 * time.Millisecond, time.Second, time.Hour,
		1<<53 - 1, 1<<53 + 1, 1 << 62, 1<<62 + 511, math.MaxInt64 - 1, math.MaxInt64}
	factors = []float64{0, 1, 1 + 0x1p-52, 1.1, 1.6, 2, 10, 1e6, 1e300, math.MaxFloat64}
	shrinks = []float64{1 - 0x1p-53, 0.9, 0.5, 1e-6, 1e-300, math.SmallestNonzeroFloat64}
	units   = []float64{0, math.SmallestNonzeroFloat64, 0.5, almostOne,
		1, math.Nextafter(1, 2), 2, 1e300, -1, -0.5, math.Inf(1), math.Inf(-1), math.NaN()} // no source should return the latter
)

var backoffStride = flag.Int("backoff.stride", 41, "TestBackoffStaysWithinItsBounds tries one of so many exponential delays")

func TestBackoffStaysWithinItsBounds(t *testing.T) {
	t.Parallel()
	numbers, n := retryNumbers(), 0
	for _, base := range spans {
		for _, limit := range spans {
			if limit < base {
				continue
			}
			for _, j := range []Jitter{FullJitter, EqualJitter, ProportionalJitter, NoJitter} {
				for _, factor := range slices.Concat(factors, shrinks) {
					b := Exponential{base, limit, factor, j}
					for _, retry := range numbers {
						for _, u := range units {
							if n++; n%*backoffStride != 0 {
								continue
							}
							if d := b.Delay(retry, 0, u); d < 0 || d > upperBound(limit, j) {
								t.Fatalf("%+v.Delay(%d, 0, %v) = %d, want 0 … %d", b, retry, u, d, upperBound(limit, j))
							}
						}
					}
				}
			}
			b := Decorrelated{base, limit}
			for _, prev := range append([]time.Duration{math.MinInt64, -1, 0}, spans...) {
				for _, u := range units {
					if d := b.Delay(1, prev, u); d < 0 || d > limit {
						t.Fatalf("%+v.Delay(1, %d, %v) = %d, want 0 … %d", b, prev, u, d, limit)
					}
				}
			}
		}
	}
}

// A custom Backoff is called with the retry number and its own last wait, 0 at first
// and after a negative one.
func TestCustomBackoffIsToldOfTheCall(t *testing.T) {
	type asked struct {
		retry int
		prev  time.Duration
	}
	bubble(t, func(t *testing.T) {
		var got []asked
		waits := []time.Duration{3 * time.Second, -time.Second, 5 * time.Second}
		b := backoffFunc(func(retry int, prev time.Duration, u float64) time.Duration {
			if !(u >= 0 && u < 1) {
				t.Errorf("Delay was given u = %v, want a number in [0, 1)", u)
			}
			got = append(got, asked{retry, prev})
			return waits[retry-1]
		})
		server := serve(t, script(unavailable(), overloaded(), unavailable(), ok()))
		if _, err := server.client(t, WithBackoff(b)).Echo(t.Context(), request()); err != nil {
			t.Fatalf("Echo: %v", err)
		}
		wantTimes(t, server, 0, 3*time.Second, 3*time.Second, 8*time.Second)
		if want := []asked{{1, 0}, {2, 3 * time.Second}, {3, 0}}; !slices.Equal(got, want) {
			t.Errorf("the backoff was asked with (retry, prev) %v, want %v", got, want)
		}
	})
}

// WithRandom decides every wait. A number that is none in [0, 1) counts as the nearest, whatever the Backoff.
func TestWithRandom(t *testing.T) {
	for _, tt := range []struct{ u, want float64 }{
		{0, 0}, {0.5, 0.5}, {1, almostOne}, {math.Inf(1), almostOne}, {-1, 0}, {math.Inf(-1), 0}, {math.NaN(), 0},
	} {
		var drawn []float64
		backoff := backoffFunc(func(_ int, _ time.Duration, u float64) time.Duration { drawn = append(drawn, u); return 0 })
		r := retrierOf(t, withRandom(func() float64 { return 0.7 }), withRandom(func() float64 { return tt.u }),
			WithBackoff(backoff), WithMaxAttempts(2))
		invokeEcho(t.Context(), r.UnaryClientInterceptor(), func(context.Context, int) error { return errUnavailable })
		if !slices.Equal(drawn, []float64{tt.want}) {
			t.Errorf("with %v, the backoff has received %v, want %v", tt.u, drawn, tt.want)
		}
	}
	if r := retrierOf(t, withRandom(nil)); r.random() == r.random() {
		t.Error("withRandom(nil) draws the same number twice")
	}
}
