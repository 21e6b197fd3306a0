package main

import (
	"io"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry"
)

var errGone = status.Error(codes.Unavailable, "gone")

// soundMoments are the events of a call that succeeded after a pushback of 5 ms.
func soundMoments() []moment {
	const ms = time.Millisecond
	return []moment{
		{kind: grpcretry.AttemptStart, number: 1},
		{kind: grpcretry.AttemptEnd, number: 1, at: ms, ended: ms, err: errGone, code: codes.Unavailable, asked: []string{"5"}},
		{kind: grpcretry.Decision, number: 1, at: ms, ended: ms, wait: 5 * ms, source: grpcretry.WaitPushback},
		{kind: grpcretry.AttemptStart, number: 2, at: 6 * ms},
		{kind: grpcretry.AttemptEnd, number: 2, at: 7 * ms, ended: 7 * ms},
		{kind: grpcretry.CallEnd, number: 2, at: 7 * ms},
	}
}

func TestPlantedViolationsInEvents(t *testing.T) {
	for _, tt := range []struct {
		name  string
		plant func(m []moment) []moment
		want  string
	}{
		{"nothing", func(m []moment) []moment { return m }, ""},
		{"no event, as in a call that passed through", func([]moment) []moment { return nil }, ""},
		{"an early attempt", func(m []moment) []moment {
			m[3].at = 2 * time.Millisecond
			return m
		}, "a wait of 5ms was decided on (pushback), and attempt 2 starts after 1ms"},
		{"another wait", func(m []moment) []moment {
			m[2].wait = 4 * time.Millisecond
			return m
		}, "the server asked for a wait of 5ms, and the call waits 4ms"},
		{"a stop that was not obeyed", func(m []moment) []moment { m[1].asked = []string{"-1"}; return m }, "the server forbade another attempt"},
		{"leading zeros", func(m []moment) []moment { m[1].asked = []string{"005"}; return m }, "the server forbade another attempt"},
		{"a wait beyond its limit", func(m []moment) []moment {
			m[1].asked, m[2].source, m[2].wait, m[3].at = nil, grpcretry.WaitBackoff, time.Second, time.Minute
			return m
		}, "the wait is 1s, and its limit is 20ms"},
		{"a code that is not retried", func(m []moment) []moment {
			m[1].code = codes.NotFound
			return m
		}, "NotFound is not among the codes that are retried"},
		{"too many attempts", func(m []moment) []moment {
			return append(append(m[:3:3], moment{kind: grpcretry.AttemptStart, number: 2, at: time.Second},
				moment{kind: grpcretry.AttemptEnd, number: 2},
				moment{kind: grpcretry.AttemptStart, number: 3, at: time.Second}, moment{kind: grpcretry.AttemptEnd, number: 3}), m[5])
		}, "3 attempts were sent, and the policy allows 2"},
		{"an attempt without an end", func(m []moment) []moment {
			return append(m[:4:4], m[5])
		}, "2 attempts started, and not all of them ended before the call"},
		{"two ends of the call", func(m []moment) []moment { return append(m, m[5]) }, "the event call_end follows the end of the call"},
		{"no end of the call", func(m []moment) []moment { return m[:5] }, "the last event is not the end of the call"},
		{"two decisions", func(m []moment) []moment {
			return append(append(m[:3:3], m[2]), m[3:]...)
		}, "attempt 1 is decided on before its end, or twice"},
		{"another result", func(m []moment) []moment {
			m[5].err = errGone
			return m
		}, "the event of the call's end says rpc error: code = Unavailable desc = gone, and the call returned OK"},
		{"a wait beyond the deadline", func(m []moment) []moment {
			m[1].asked, m[2].wait, m[3].at = []string{"60000"}, time.Minute, 2*time.Minute
			return m
		}, "a wait of 1m0s starts 999ms before the deadline"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var line timeline
			line.moments = tt.plant(soundMoments())
			in := bounds{attempts: 2, codes: []codes.Code{codes.Unavailable}, wait: 20 * time.Millisecond, deadline: time.Second}
			got := line.check(nil, &in)
			if !strings.Contains(got, tt.want) || tt.want == "" && got != "" {
				t.Errorf("check = %q, want %q", got, tt.want)
			}
		})
	}
}

func TestLateEvents(t *testing.T) {
	var line timeline
	line.begin(time.Now())
	line.finish(io.EOF)
	line.close()
	line.add(&grpcretry.Event{Kind: grpcretry.AttemptStart})
	line.finish(nil)
	if want := "attempt_start after the call had ended; OnFinish after the call had ended; "; line.late != want || line.finished != 2 {
		t.Errorf("late = %q and %d, want %q and 2", line.late, line.finished, want)
	}
}
