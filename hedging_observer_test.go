package grpcretry

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
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
			line += fmt.Sprintf(" retry=%v", e.Reason == nil)
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
		server.client(t, WithObserver(events.observe), hedged(Hedging{MaxAttempts: 3, Delay: HedgeAfter(second)})).
			Echo(t.Context(), request())
		want := []string{
			"attempt_start #1 hedge=false after 0s of none",
			"attempt_start #2 hedge=true after 1s of hedge_delay",
			"attempt_end #2 UNAVAILABLE lost=false",
			"decision #2 retry=true",
			"attempt_start #3 hedge=true after 0s of non_fatal",
			"attempt_end #1 CANCELLED lost=true",
			"attempt_end #3 OK lost=false",
			"call_end #3 hedge_won",
		}
		if got := events.lines(); !slices.Equal(got, want) {
			t.Errorf("events are\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
	})
}

// While an observer takes its time, others wait in the order in which they came.
func TestASlowObserverHoldsUpButReordersNothing(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(says("a").after(22*second/10), fail(codes.NotFound, "x").after(14*second/10), hang()))
		events := &hedgeEvents{}
		slow := WithObserver(func(_ context.Context, e Event) {
			if e.Kind == AttemptStart && e.Attempt.Number == 3 {
				time.Sleep(second)
			}
		})
		client := server.client(t, WithObserver(events.observe), slow, hedged(Hedging{MaxAttempts: 3, Delay: HedgeAfter(second)}))
		reply, err := client.Echo(t.Context(), request())
		if reply.GetMessage() != "a" || err != nil {
			t.Errorf("Echo = %v, %v, want a, which came before the failure", reply, err)
		}
		if got := time.Since(server.start); got != 3*second {
			t.Errorf("Echo took %v, want 3s", got)
		}
		events.check(t, err)
	})
}

// While an observer takes its time, the delay of the next attempt may pass: what is decided
// then counts, and from then on.
func TestASlowObserverMovesTheDelay(t *testing.T) {
	slow := WithObserver(func(_ context.Context, e Event) {
		if e.Kind == Decision {
			time.Sleep(second)
		}
	})
	for _, tt := range []struct {
		name   string
		script []answer
		want   []time.Duration
	}{
		{"a failure sends the next now", []answer{unavailable().after(second / 2), hang(), ok()},
			[]time.Duration{0, 3 * second / 2, 5 * second / 2}},
		{"a failure asks for a wait", []answer{unavailable().after(second / 2).pushback("2000"), ok()}, []time.Duration{0, 5 * second / 2}},
		{"a failure forbids more", []answer{ok().after(9 * second), unavailable().after(second / 2).pushback("-1")},
			[]time.Duration{0, second}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, script(tt.script...))
				events := &hedgeEvents{}
				client := server.client(t, WithObserver(events.observe), slow, hedged(Hedging{MaxAttempts: 3, Delay: HedgeAfter(second)}))
				_, err := client.Echo(t.Context(), request())
				events.check(t, err)
				wantTimes(t, server, tt.want...)
				for _, e := range events.events {
					if got := e.Attempt.Start.Sub(server.start); got != tt.want[e.Attempt.Number-1] {
						t.Errorf("%v of attempt %d says that it was sent after %v, want %v", e.Kind, e.Attempt.Number, got,
							tt.want[e.Attempt.Number-1])
					}
				}
			})
		})
	}
}
