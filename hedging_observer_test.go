package grpcretry

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"
)

// hedgeEvents checks that the events of one call are as documented.
type hedgeEvents struct {
	events []Event // no lock: observers are called one at a time, which -race proves
}

func (h *hedgeEvents) observe(_ context.Context, e Event) { h.events = append(h.events, e) }

func (h *hedgeEvents) check(t *testing.T, err error) {
	t.Helper()
	state := map[int]EventKind{}
	ended := 0
	for i, e := range h.events {
		last, seen := state[e.Attempt.Number]
		good := false
		switch e.Kind {
		case AttemptStart:
			good = !seen
		case AttemptEnd:
			good = seen && last == AttemptStart
			ended++
		case Decision:
			good = seen && last == AttemptEnd && !errors.Is(e.Attempt.Err, ErrHedgeLost)
		case CallEnd:
			good = i == len(h.events)-1 && ended == len(state) && e.Err == err
			if len(state) > 1 && len(e.Attempts) != len(state) {
				t.Errorf("%d attempts at the end of the call, want %d", len(e.Attempts), len(state))
			}
			for i, a := range e.Attempts {
				if a.Number != i+1 {
					t.Errorf("attempts at the end are %v, want them in order", e.Attempts)
				}
			}
		}
		if !good {
			t.Errorf("event %d of %d is %v of attempt %d, which was at %v", i+1, len(h.events), e.Kind, e.Attempt.Number, last)
		}
		state[e.Attempt.Number] = e.Kind
	}
	if len(h.events) == 0 || h.events[len(h.events)-1].Kind != CallEnd {
		t.Error("the last event is not the end of the call")
	}
}

// lines is one line for each event.
func (h *hedgeEvents) lines() []string {
	var lines []string
	for _, e := range h.events {
		line := fmt.Sprintf("%s #%d", e.Kind, e.Attempt.Number)
		switch e.Kind {
		case AttemptStart:
			line += fmt.Sprintf(" hedge=%v after %v of %s", e.Attempt.Hedge, e.Attempt.Wait, e.Attempt.WaitSource)
		case AttemptEnd:
			line += fmt.Sprintf(" %s lost=%v", codeName(e.Attempt.Code()), errors.Is(e.Attempt.Err, ErrHedgeLost))
		case Decision:
			line += " retry"
			if e.Reason != nil {
				line = strings.TrimSuffix(line, "retry") + ReasonName(e.Reason)
			}
		case CallEnd:
			line += " " + e.Outcome()
		}
		lines = append(lines, line)
	}
	return lines
}

func TestEventsOfAHedgedCall(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(says("a").after(time.Hour), unavailable().after(second/10), says("c").after(second/10)))
		events := &hedgeEvents{}
		server.client(t, WithObserver(events.observe), hedged(3, Hedging{Delay: HedgeAfter(second)})).
			Echo(t.Context(), request())
		want := []string{
			"attempt_start #1 hedge=false after 0s of none",
			"attempt_start #2 hedge=true after 1s of hedge_delay",
			"attempt_end #2 UNAVAILABLE lost=false",
			"decision #2 in_flight",
			"attempt_start #3 hedge=true after 1s of hedge_delay",
			"attempt_end #1 CANCELLED lost=true",
			"attempt_end #3 OK lost=false",
			"call_end #3 hedge_won",
		}
		if got := events.lines(); !slices.Equal(got, want) {
			t.Errorf("events are\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
	})
}
