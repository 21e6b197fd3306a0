package grpcretrytest

import (
	"errors"
	"math"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/internal/reasons"
	"github.com/grpcretry/grpcretry/internal/reasons/probe"
)

// A wait that is recorded but has not taken place is noticed if the test leaves the time out.
func TestAnAttemptThatDidNotWait(t *testing.T) {
	start := time.Now()
	unavailable := grpcretry.Attempt{Method: "/s/m", Number: 1, Start: start, Duration: 5 * time.Second,
		Err: status.Error(codes.Unavailable, "")}
	for after, want := range map[time.Duration]string{
		6 * time.Second:     "",
		6*time.Second + 1:   "",
		6*time.Second - 1e6: "! 5.999s attempt 2 OK (before the wait was over)   attempt 2 OK",
		4 * time.Second:     "! 4s attempt 2 OK (before the wait was over)   attempt 2 OK", // the first is still in flight
	} {
		second := grpcretry.Attempt{Method: "/s/m", Number: 2, Start: start.Add(after), Wait: time.Second, WaitSource: grpcretry.WaitBackoff}
		got := timelineOf(&grpcretry.Event{Attempt: second}, start, []grpcretry.Attempt{unavailable, second})
		wanted, err := parse("attempt 1 UNAVAILABLE; wait 1s; attempt 2 OK")
		if err != nil {
			t.Fatal(err)
		}
		if d := diff(got.body(), wanted); !strings.Contains(d, want) || want == "" && d != "" {
			t.Errorf("after %v the difference is\n%s\nwant %q", after, d, want)
		}
	}
}

// The wait before a retry starts at the attempt timeout, and the attempt ends only when gRPC has noticed.
func TestAnAttemptThatHasTimedOut(t *testing.T) {
	start := time.Now()
	late := grpcretry.Attempt{Method: "/s/m", Number: 1, Start: start, Duration: 205 * time.Millisecond,
		Err: errors.Join(grpcretry.ErrAttemptTimeout, status.Error(codes.DeadlineExceeded, ""))}
	second := grpcretry.Attempt{Method: "/s/m", Number: 2, Start: start.Add(210 * time.Millisecond), Wait: 10 * time.Millisecond,
		WaitSource: grpcretry.WaitBackoff}
	got := timelineOf(&grpcretry.Event{Attempt: second}, start, []grpcretry.Attempt{late, second})
	wanted, err := parse("attempt 1 timeout; wait 10ms; attempt 2 OK")
	if err != nil {
		t.Fatal(err)
	}
	if d := diff(got.body(), wanted); d != "" {
		t.Error(d)
	}
}

// A timeline can end for any reason, and the words for codes are gRPC's.
func TestWords(t *testing.T) {
	for _, reason := range []error{grpcretry.ErrPushback, probe.Err} {
		wanted := "0s stop " + reasons.Of(reason).Word
		if _, err := parse("attempt 1 UNAVAILABLE; " + wanted); err != nil {
			t.Errorf("%q: %v", wanted, err)
		}
	}
	for _, c := range []codes.Code{17, math.MaxUint32} { // a server may send what gRPC does not define
		if _, err := parse("attempt 1 " + codeName(c)); err != nil {
			t.Errorf("%v: %v", c, err)
		}
	}
	for _, word := range []string{"17", "CODE(017)", "CODE(5)", "CODE(-1)", "CODE(4294967296)", "CODE(17"} {
		if _, err := parse("attempt 1 " + word); err == nil {
			t.Errorf("%s is taken for a code", word)
		}
	}
	for c := codes.OK; c <= codes.Unauthenticated; c++ {
		var back codes.Code
		if err := back.UnmarshalJSON([]byte(`"` + codeName(c) + `"`)); err != nil || back != c {
			t.Errorf("codeName(%v) = %s, which is %v, %v", c, codeName(c), back, err)
		}
	}
}
