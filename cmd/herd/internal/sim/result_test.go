package sim

import (
	"reflect"
	"testing"
	"time"
)

func TestQuantiles(t *testing.T) {
	var values []int64
	for i := range 1000 {
		values = append(values, int64(1000-i)) // 1 to 1000, backwards
	}
	got := quantiles(values)
	want := Quantiles{N: 1000, Mean: 500, P50: 500, P90: 900, P99: 990, P999: 999, Max: 1000}
	if got != want {
		t.Errorf("quantiles(1…1000) = %+v, want %+v", got, want)
	}
	if got := quantiles([]int64{7}); got.P50 != 7 || got.P999 != 7 || got.Max != 7 {
		t.Errorf("quantiles(7) = %+v, want 7 for all", got)
	}
	if got := quantiles(nil); got != (Quantiles{}) {
		t.Errorf("quantiles() = %+v, want zeros", got)
	}
	if got, want := counts([]int32{4, 1, 2, 1}), (Counts{Mean: 2, P50: 1, P90: 4, P99: 4, Max: 4}); got != want {
		t.Errorf("counts(4, 1, 2, 1) = %+v, want %+v", got, want)
	}
}

// Mean leaves no field out.
func TestMeanIsOfEveryField(t *testing.T) {
	var a, b Summary
	va, vb := reflect.ValueOf(&a).Elem(), reflect.ValueOf(&b).Elem()
	for i := range va.NumField() {
		if va.Field(i).Kind() == reflect.Float64 {
			va.Field(i).SetFloat(float64(10 + i))
			vb.Field(i).SetFloat(float64(30 + i))
		} else {
			va.Field(i).SetInt(int64(10 + i))
			vb.Field(i).SetInt(int64(30 + i))
		}
	}
	got := reflect.ValueOf(Mean([]Summary{a, b}))
	for i := range got.NumField() {
		v := got.Field(i)
		if v.CanFloat() && v.Float() != float64(20+i) || v.CanInt() && v.Int() != int64(20+i) {
			t.Errorf("%s is %v, want %d", got.Type().Field(i).Name, v, 20+i)
		}
	}
	b.Stable = -1
	if got := Mean([]Summary{a, b}).Stable; got != -1 {
		t.Errorf("Stable of one that never was: %v, want -1", got)
	}
}

func TestSeriesCarriesOn(t *testing.T) {
	s := newSeries(10, func(next, last *GroupBucket) { next.Open = last.Open })
	s.at(5).Open = 3
	s.at(35).Calls++
	s.at(12).Calls++ // an earlier one is found again
	s.at(39).Open = 1
	want := []GroupBucket{{Open: 3}, {Open: 3, Calls: 1}, {Open: 3}, {Open: 1, Calls: 1}}
	if !reflect.DeepEqual(s.items, want) {
		t.Errorf("items %+v, want %+v", s.items, want)
	}
}

// Time until stable, as the definition has it.
func TestStable(t *testing.T) {
	strategy := steady
	for _, tt := range []struct {
		name   string
		change func(*Scenario)
		want   time.Duration
	}{
		{"no outage, nothing fails", func(*Scenario) {}, 0},
		{"well at once", func(s *Scenario) { s.Servers[0].Outages = []Outage{{For: 2500 * ms}} }, 0},
		{"three seconds of rejections", func(s *Scenario) {
			s.Servers[0].Outages = []Outage{{For: 2 * sec}}
			s.Servers[0].Capacity, s.Servers[0].Window = 1, sec
			s.Groups[0].Clients = 4
		}, 3 * sec},
		{"nobody is left to see it", func(s *Scenario) {
			s.Groups[0].Deadline = 3 * sec
			s.Servers[0].Outages = []Outage{{For: 10 * sec}}
		}, -1},
		{"never", func(s *Scenario) {
			s.Servers[0].Capacity, s.Servers[0].Window = 1, sec
			s.Groups[0] = Group{Rate: 5, Even: true}
			s.Duration = 10 * sec
		}, -1},
	} {
		s := small()
		tt.change(&s)
		if got := mustRun(t, s, strategy).Summary.Stable; got != tt.want {
			t.Errorf("%s: stable after %v, want %v", tt.name, got, tt.want)
		}
	}
}

// The figures of a result that the tests of the studies do not look at.
func TestSeriesOfAResult(t *testing.T) {
	s := small()
	s.Bucket = 500 * ms
	s.Network = Distribution{Mean: 100 * ms}
	s.Groups[0] = Group{Clients: 4}
	s.Servers[0].Capacity, s.Servers[0].Queue = 2, -1 // half a second each, one worker
	r := mustRun(t, s, noRetries)
	// They arrive at 0.1 s and are served at 0.6, 1.1, 1.6 and 2.1 s; answers take 0.1 s.
	wantOpen := []int{4, 3, 2, 1, 0}
	wantInside := []float64{4 * 0.8, 4*0.2 + 3*0.8, 3*0.2 + 2*0.8, 2*0.2 + 0.8, 0.2}
	series := r.Servers[0].Series
	if len(series) != 5 {
		t.Fatalf("%d buckets, want 5", len(series))
	}
	for i, b := range series {
		if b.Open != wantOpen[i] || !near(b.InFlight, wantInside[i], 1e-6) || b.Capacity != 1 {
			t.Errorf("bucket %d: open %d, in flight %v, capacity %v; want %d, %v, 1", i, b.Open, b.InFlight, b.Capacity, wantOpen[i], wantInside[i])
		}
	}
	if r.End != 2200*ms || r.Summary.Longest != 2200*ms || r.Summary.Done != 2200*ms {
		t.Errorf("end %v, longest %v, done %v; want 2.2s", r.End, r.Summary.Longest, r.Summary.Done)
	}
}

// Calls that failed are slower than all others.
func TestTail(t *testing.T) {
	var values []int64
	for i := range 900 {
		values = append(values, int64(i+1))
	}
	got := tail(values, 100)
	at := map[int]time.Duration{0: 1, 10: 684, 20: 900}
	for k, want := range at {
		if got[k].Latency != want {
			t.Errorf("a share of %.4f takes longer than %d, want %d", got[k].Share, got[k].Latency, want)
		}
	}
	if last := got[len(got)-1]; len(got) != 21 || last.Share != 0.1 {
		t.Errorf("%d points, the last at %v; want 21, down to the share that failed", len(got), last.Share)
	}
	if got := tail(values, 0); len(got) != 20*2+20 && got[len(got)-1].Share < 1.0/900 {
		t.Errorf("%d points, the last %+v", len(got), got[len(got)-1])
	}
	if got := tail(nil, 3); len(got) != 0 {
		t.Errorf("of no success: %v, want nothing", got)
	}
}
