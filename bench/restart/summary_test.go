package main

import (
	"slices"
	"testing"
	"time"
)

// at is a time that many milliseconds after some start.
func at(milliseconds ...float64) []time.Time {
	var times []time.Time
	for _, ms := range milliseconds {
		times = append(times, time.Unix(1000, 0).Add(time.Duration(ms*float64(time.Millisecond))))
	}
	return times
}

func TestComeback(t *testing.T) {
	for _, tt := range []struct {
		name string
		at   []time.Time
		want comeback
	}{
		{"nobody waited", nil, comeback{}},
		{"one call", at(7), comeback{attempts: 1, over: 0, peak: 1}},
		{"all in one instant", at(7, 7, 7), comeback{attempts: 3, over: 0, peak: 3}},
		{"a window holds what is less than 10 ms apart", at(0, 9.9), comeback{attempts: 2, over: 9900 * time.Microsecond, peak: 2}},
		{"and not what is 10 ms apart", at(0, 10), comeback{attempts: 2, over: 10 * time.Millisecond, peak: 1}},
		{"the window slides", at(0, 8, 12, 16, 40), comeback{attempts: 5, over: 40 * time.Millisecond, peak: 3}},
		{"the peak may come last", at(0, 20, 40, 41, 42), comeback{attempts: 5, over: 42 * time.Millisecond, peak: 3}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := comebackOf(tt.at); got != tt.want {
				t.Errorf("comebackOf = %+v, want %+v", got, tt.want)
			}
		})
	}
}

func TestWaiting(t *testing.T) {
	times := at(0, 5, 10, 15, 20, 25)
	made := []*call{{start: times[0]}, {start: times[1]}, {start: times[3]}} // calls 1, 2 and 3
	arrivals := []arrival{{times[5], 1}, {times[4], 3}, {times[3], 2}}
	for _, tt := range []struct {
		name        string
		reconnected time.Time
		want        []time.Time
	}{
		{"calls that started before the connection, in order of arrival", times[2], []time.Time{times[3], times[5]}},
		{"a call that started with the connection did not wait", times[1], []time.Time{times[5]}},
		{"without a connection nobody returns", time.Time{}, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := waiting(arrivals, made, tt.reconnected); !slices.Equal(got, tt.want) {
				t.Errorf("waiting = %v, want %v", got, tt.want)
			}
		})
	}
}

func TestMedian(t *testing.T) {
	for _, tt := range []struct {
		name   string
		sorted []time.Duration
		want   time.Duration
	}{
		{"of one", []time.Duration{3}, 3},
		{"of an odd number", []time.Duration{1, 2, 9}, 2},
		{"of an even number", []time.Duration{1, 2, 4, 9}, 3},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := median(tt.sorted); got != tt.want {
				t.Errorf("median(%v) = %v, want %v", tt.sorted, got, tt.want)
			}
		})
	}
}

func TestMeasuredLeavesOutTheConnecting(t *testing.T) {
	times := at(0, 1, 2)
	got := measured([]arrival{{times[0], 0}, {times[1], 1}, {times[2], 0}})
	if want := []arrival{{times[1], 1}}; !slices.Equal(got, want) {
		t.Errorf("measured = %v, want %v", got, want)
	}
}

func TestSummarize(t *testing.T) {
	times := at(0, 1, 100, 101, 110)
	tr := &trial{
		servers:     []*process{{arrivals: []arrival{{times[0], 0}, {times[0], 1}}}},
		replacement: &process{arrivals: []arrival{{times[3], 2}, {times[4], 3}}},
		connections: &connections{again: times[2]},
	}
	tr.calls.made = []*call{
		{start: times[0], took: time.Millisecond, err: errNotListening},
		{start: times[1], took: 120 * time.Millisecond},
		{start: times[3], took: 20 * time.Millisecond},
	}
	want := summary{calls: 3, succeeded: 2, median: 70 * time.Millisecond, longest: 120 * time.Millisecond, attempts: 3,
		back: comeback{attempts: 1, over: 0, peak: 1}}
	if got := tr.summarize(); *got != want {
		t.Errorf("summarize = %+v, want %+v", *got, want)
	}
}
