package quantile

import (
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"testing"
	"time"
)

var noon = time.Date(2026, 11, 23, 12, 0, 0, 0, time.UTC)

const second = time.Second

func quantileOf(q float64, atLeast, atMost time.Duration) *Estimator {
	return New(Settings{Q: q, AtLeast: atLeast, AtMost: atMost})
}

// The estimate is the exact quantile of the measured latencies, or up to 5% more.
func TestQuantileIsCloseToTheExactOne(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for name, draw := range map[string]func() float64{
		"exponential": random.ExpFloat64,
		"log-normal":  func() float64 { return math.Exp(2 * random.NormFloat64()) },
		"uniform":     random.Float64,
		"two humps": func() float64 {
			if random.IntN(10) == 0 {
				return 50 + random.Float64()
			}
			return 1 + random.Float64()
		},
	} {
		for _, q := range []float64{0.5, 0.9, 0.95, 0.99} {
			h := quantileOf(q, 0, 0)
			var all []time.Duration
			now := noon
			for range 5000 {
				took := 10*time.Microsecond + time.Duration(draw()*float64(10*time.Millisecond))
				all = append(all, took)
				h.Answered("/m", took, false, now)
				now = now.Add(10 * time.Millisecond) // 50 s in all
			}
			slices.Sort(all)
			exact := all[int(math.Ceil(q*float64(len(all))))-1]
			got, ok := h.Delay("/m", now)
			if ratio := float64(got) / float64(exact); !ok || ratio < 0.9999 || ratio > 1.0501 {
				t.Errorf("%s: %v-quantile is %v, %v, want %v or up to 5%% more", name, q, got, ok, exact)
			}
		}
	}
}

func TestQuantileNeedsEnoughAnswers(t *testing.T) {
	for _, tt := range []struct {
		q       float64
		answers int
	}{{0.5, 50}, {0.9, 50}, {0.95, 100}, {0.99, 500}, {0.999, 5000}} {
		h := quantileOf(tt.q, 0, 0)
		for range tt.answers - 1 {
			h.Answered("/m", time.Millisecond, false, noon)
		}
		if d, ok := h.Delay("/m", noon); ok {
			t.Errorf("%v-quantile: delay %v after %d answers, want none before %d", tt.q, d, tt.answers-1, tt.answers)
		}
		h.Answered("/m", time.Millisecond, false, noon)
		if _, ok := h.Delay("/m", noon.Add(refresh)); !ok {
			t.Errorf("%v-quantile: no delay after %d answers", tt.q, tt.answers)
		}
		if _, ok := h.Delay("/other", noon); ok {
			t.Errorf("%v-quantile: a delay for a method that was never called", tt.q)
		}
	}
}

// Half of 51 is 26: to hedge no more than half of them, it must not be 25.
func TestQuantileIsNeverLess(t *testing.T) {
	for short, want := range map[int]time.Duration{25: time.Second, 26: time.Millisecond} {
		h := quantileOf(0.5, 0, 0)
		for n := range 51 {
			took := time.Second
			if n < short {
				took = time.Millisecond
			}
			h.Answered("/m", took, false, noon)
		}
		got, ok := h.Delay("/m", noon)
		if ratio := float64(got) / float64(want); !ok || ratio < 0.9999 || ratio > 1.0501 {
			t.Errorf("the median of %d short ones of 51 is %v, %v, want %v or up to 5%% more", short, got, ok, want)
		}
	}
}

// The delay is computed once a second, not for each call.
func TestQuantileIsComputedOnceASecond(t *testing.T) {
	h := quantileOf(0.5, 0, 0)
	answered := func(took time.Duration) {
		for range 100 {
			h.Answered("/m", took, false, noon)
		}
	}
	answered(time.Millisecond)
	before, _ := h.Delay("/m", noon)
	answered(time.Second)
	answered(time.Second)
	if got, ok := h.Delay("/m", noon.Add(refresh-1)); !ok || got != before {
		t.Errorf("before a second has passed the delay is %v, %v, want still %v", got, ok, before)
	}
	if got, ok := h.Delay("/m", noon.Add(refresh)); !ok || got < time.Second {
		t.Errorf("after a second the delay is %v, %v, want that of most answers, a second", got, ok)
	}
}

func TestQuantileForgetsAfterAMinute(t *testing.T) {
	h := quantileOf(0.9, 0, 0)
	now := noon
	fill := func(took time.Duration) {
		for range 1000 {
			h.Answered("/m", took, false, now)
		}
	}
	want := func(want time.Duration) {
		t.Helper()
		got, ok := h.Delay("/m", now)
		if ratio := float64(got) / float64(want); !ok || ratio < 1 || ratio > 1.0501 {
			t.Errorf("after %v the delay is %v, %v, want about %v", now.Sub(noon), got, ok, want)
		}
	}
	fill(time.Second)
	want(time.Second)
	now = now.Add(59 * time.Second)
	fill(time.Millisecond)
	want(time.Second) // half are slow
	now = now.Add(12 * time.Second)
	want(time.Millisecond)
	fill(2 * time.Millisecond) // where the first were
	now = now.Add(refresh)
	want(2 * time.Millisecond)
	now = now.Add(time.Hour)
	if d, ok := h.Delay("/m", now); ok {
		t.Errorf("delay %v of an hour ago", d)
	}
}

// A response counts for a whole minute, wherever in a slice of time it arrived.
func TestQuantileRemembersForAMinute(t *testing.T) {
	for at := time.Duration(0); at < sliceLength; at += second / 2 {
		d, start := quantileOf(0.5, 0, 0), time.Unix(0, 0).Add(at)
		for range 50 {
			d.Answered("/s/m", second, false, start)
		}
		if got, ok := d.Delay("/s/m", start.Add(time.Minute)); !ok {
			t.Errorf("a minute after answers at %v the delay is %v, %v, want that they count", at, got, ok)
		}
	}
}

func TestQuantileIsExact(t *testing.T) {
	h := quantileOf(0.5, 0, 0)
	for range 50 {
		h.Answered("/m", time.Millisecond, false, noon)
		h.Answered("/m", time.Second, false, noon)
	}
	if got, ok := h.Delay("/m", noon); !ok || got > 2*time.Millisecond {
		t.Errorf("the median of 50 short and 50 long ones is %v, %v, want a short one", got, ok)
	}
}

func TestQuantileOfWhatIsOutOfRange(t *testing.T) {
	for took, want := range map[time.Duration]time.Duration{0: 10500, time.Hour: bucketLatency(latencyBuckets - 1)} {
		h := quantileOf(0.5, 0, 0)
		for range 100 {
			h.Answered("/m", took, false, noon)
		}
		if got, ok := h.Delay("/m", noon); !ok || got != want {
			t.Errorf("the median of answers in %v is %v, %v, want %v", took, got, ok, want)
		}
	}
	if longest := bucketLatency(latencyBuckets - 1); longest < 100*time.Second {
		t.Errorf("the longest that is told apart is %v, want over 100s", longest)
	}
}

// The wall clock may be set back. Latencies measured at a time that is then in the future count again
// when that time comes, and the delay is not kept until then.
func TestQuantileWhenTheClockIsSetBack(t *testing.T) {
	h := quantileOf(0.5, 0, 0)
	fill := func(took time.Duration, now time.Time) {
		for range 100 {
			h.Answered("/m", took, false, now)
		}
	}
	fill(time.Second, noon)
	h.Delay("/m", noon)
	earlier := noon.Add(-time.Hour)
	if got, ok := h.Delay("/m", earlier); ok {
		t.Errorf("delay %v an hour before anything was measured", got)
	}
	fill(time.Millisecond, earlier)
	if got, ok := h.Delay("/m", earlier.Add(refresh)); !ok || got > 2*time.Millisecond {
		t.Errorf("delay %v, %v, want the 1ms of the new time", got, ok)
	}
}

func TestQuantileBoundsAndLosers(t *testing.T) {
	now := noon
	for _, tt := range []struct {
		name            string
		atLeast, atMost time.Duration
		answers, losers int
		want            time.Duration
	}{
		{"lower bound", 50 * time.Millisecond, 0, 1000, 0, 50 * time.Millisecond},
		{"upper bound", 0, time.Millisecond, 1000, 0, time.Millisecond},
		{"losers are slower than all", 0, 0, 980, 20, 10 * time.Millisecond}, // of 1..10 ms, so the 0.95 of 1000 is 9.7
		{"more losers than the rest", 0, 0, 100, 900, 10 * time.Millisecond},
	} {
		h := quantileOf(0.95, tt.atLeast, tt.atMost)
		for i := range tt.answers {
			h.Answered("/m", time.Duration(i+1)*10*time.Millisecond/time.Duration(tt.answers), false, now)
		}
		for range tt.losers {
			h.Answered("/m", time.Microsecond, true, now)
		}
		got, ok := h.Delay("/m", now)
		if ratio := float64(got) / float64(tt.want); !ok || ratio < 0.92 || ratio > 1.06 {
			t.Errorf("%s: %v, %v, want about %v", tt.name, got, ok, tt.want)
		}
	}
	h := quantileOf(0.95, 0, 0)
	for range 1000 {
		h.Answered("/m", time.Second, true, now)
	}
	if d, ok := h.Delay("/m", now); ok {
		t.Errorf("delay %v although nothing was measured", d)
	}
}

func TestQuantileKnowsABoundedNumberOfMethods(t *testing.T) {
	h := quantileOf(0.5, 0, 0)
	for range 100 { // which is enough for a delay
		for i := range maxMethods + 10 {
			h.Answered(fmt.Sprint(i), time.Millisecond, false, noon)
		}
	}
	if _, ok := h.Delay(fmt.Sprint(maxMethods-1), noon); !ok {
		t.Error("the last method that is known has no delay")
	}
	if got := h.known.Load(); got != maxMethods {
		t.Errorf("%d methods are known, want %d", got, maxMethods)
	}
	if _, ok := h.Delay(fmt.Sprint(maxMethods+9), noon); ok {
		t.Error("a method too many has a delay")
	}
}

// A clock that was never set may show a time before 1970, and then pass that moment.
func TestQuantileBefore1970(t *testing.T) {
	for _, start := range []time.Time{time.Unix(-1000, 0), time.Unix(-25, 0), time.Unix(-1, -1), {}} {
		d := quantileOf(0.9, 0, 0)
		now := start
		for range 50 { // one slice after the other
			d.Answered("/s/m", second, false, now)
			now = now.Add(second)
		}
		if got, ok := d.Delay("/s/m", now); !ok || got < second || got > second*105/100 {
			t.Errorf("from %v: Delay = %v, %v, want a second", start, got, ok)
		}
	}
}
