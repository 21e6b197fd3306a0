package debug

import (
	"fmt"
	"slices"
	"strings"
	"time"
)

// A callView is one call of the list.
type callView struct {
	Retrier              int // 0 where there is but one
	Target               string
	Service, Name        string
	Outcome, Words, Tone string
	Made, Elapsed        string
	Ago, Ended           string
	Timeline             timeline
	Attempts             []attemptView
	LeftOut              string // before the second of Attempts; empty if all are there
	Code                 string
}

// An attemptView is one line of its table.
type attemptView struct {
	Number      int
	Hedge       bool
	Start, Took string
	Code, Tone  string
	Message     string
	Ours        bool // which is no quotation then
	Peer        string
	Then        string
}

// A timeline draws attempts and waits to scale: lengths are shares of the whole width, which stands for the
// same time in all calls of the list.
type timeline struct {
	Title  string
	Height int
	Waits  []stroke
	Tries  []stroke
}

// A stroke goes from From to To, in percent, at the height Y.
type stroke struct {
	From, To string
	Y        int
	Class    string
	Title    string
}

const laneHeight = 14

func newCallView(c *Call, now time.Time, retriers bool, scale float64) callView {
	v := callView{
		Target:  c.Target,
		Made:    plural(int64(c.Made), "attempt", "attempts"),
		Elapsed: lengthMs(c.ElapsedMs),
		Ago:     ago(now.Sub(c.Ended)),
		Ended:   stamp(c.Ended),
		Code:    c.Code,
	}
	if retriers {
		v.Retrier = c.Retrier
	}
	v.Service, v.Name = splitMethod(c.Method)
	v.Outcome, v.Words, v.Tone = outcomeWords(c.Outcome)
	for i := range c.Attempts {
		v.Attempts = append(v.Attempts, newAttemptView(c, i))
	}
	if n := c.Made - len(c.Attempts); n > 0 {
		v.LeftOut = plural(int64(n), "attempt", "attempts") + " left out"
	}
	v.Timeline = newTimeline(c, scale)
	return v
}

func outcomeWords(outcome string) (short, long, tone string) {
	switch outcome {
	case firstTry:
		return "first won", "the first attempt was quicker than its hedges", "good"
	case rescued:
		return "rescued", "a retry succeeded", "good"
	case hedgeWon:
		return "hedge won", "a hedge was quicker than the attempts before it", "good"
	default:
		return outcome, stopWords[outcome].long, "bad"
	}
}

func newAttemptView(c *Call, i int) attemptView {
	a := &c.Attempts[i]
	v := attemptView{
		Number:  a.Number,
		Hedge:   a.Hedge,
		Start:   lengthMs(a.StartMs),
		Took:    lengthMs(a.DurationMs),
		Code:    a.Code,
		Tone:    "bad",
		Message: a.Message, Ours: a.Ours,
		Peer: a.Peer,
	}
	if c.Function && a.Peer == "" {
		v.Peer = "–"
	}
	switch {
	case a.Decision == success:
		v.Tone, v.Then = "good", "success"
	case a.Decision == beaten:
		v.Tone, v.Then = "quiet", "cancelled, another attempt was decisive"
	case a.Decision == stop && a.Reason == targetDown && c.ElapsedMs > a.end():
		v.Then = "stop: the target was still down after " + lengthMs(c.ElapsedMs-a.end())
	case a.Decision == stop && a.Reason == "":
		v.Then = "stop, while others were under way"
	case a.Decision == stop:
		v.Then = "stop: " + stopWords[a.Reason].long
		if c.RefusedWaitSource != "" {
			v.Then += fmt.Sprintf("; not begun: a wait of %s (%s)", lengthMs(c.RefusedWaitMs), waitWords(c.RefusedWaitSource))
		}
	default:
		v.Then = "retry"
		if next := c.follower(i); next != nil {
			v.Then = fmt.Sprintf("retry after %s (%s)", lengthMs(next.WaitMs), waitWords(next.WaitSource))
			if next.WaitMs == 0 {
				v.Then = "retry at once"
			}
		}
	}
	return v
}

// follower is the attempt that was sent because of the failure of another, nil if it is not
// kept.
func (c *Call) follower(i int) *Attempt {
	for j := i + 1; j < len(c.Attempts) && c.Attempts[j].Number == c.Attempts[j-1].Number+1; j++ {
		if b := &c.Attempts[j]; b.WaitSource != hedgeDelay && b.StartMs >= c.Attempts[i].end()-1e-3 { // rounded
			return b
		}
	}
	return nil
}

const hedgeDelay = "hedge_delay"

// scaleOf returns the length of the longest call, in milliseconds, for which the whole width stands.
func scaleOf(calls []Call) float64 {
	scale := 1e-6 // a call in no time at all is a dot
	for i := range calls {
		scale = max(scale, calls[i].ElapsedMs)
		for j := range calls[i].Attempts {
			scale = max(scale, calls[i].Attempts[j].end())
		}
	}
	return scale
}

// newTimeline puts attempts that overlap, as hedges do, below each other.
func newTimeline(c *Call, scale float64) timeline {
	share := func(ms float64) string { return width(ms / scale) }

	byStart := slices.Clone(c.Attempts)
	slices.SortStableFunc(byStart, func(a, b Attempt) int { return int(max(-1, min(1, a.StartMs*1e6-b.StartMs*1e6))) })
	t := timeline{Title: c.story()}
	var lanes []float64 // until when each is taken
	var free float64    // when the last attempt so far ended
	for i := range byStart {
		a := &byStart[i]
		lane := slices.IndexFunc(lanes, func(end float64) bool { return end <= a.StartMs+1e-3 }) // rounded
		if lane < 0 {
			lane, lanes = len(lanes), append(lanes, 0)
		}
		lanes[lane] = a.end()
		y := laneHeight*lane + laneHeight/2
		if i > 0 && a.StartMs > free {
			t.Waits = append(t.Waits, stroke{share(free), share(a.StartMs), y, a.WaitSource,
				fmt.Sprintf("waited %s (%s)", lengthMs(a.WaitMs), waitWords(a.WaitSource))})
		}
		free = max(free, a.end())
		class := "bad"
		switch a.Decision {
		case success:
			class = "good"
		case beaten:
			class = "beaten"
		}
		t.Tries = append(t.Tries, stroke{share(a.StartMs), share(a.end()), y, class,
			fmt.Sprintf("attempt %d: %s after %s", a.Number, a.Code, lengthMs(a.DurationMs))})
	}
	if c.ElapsedMs > free { // the caller went away in a wait, or the target did not return
		last := stroke{share(free), share(c.ElapsedMs), laneHeight / 2, "none", "the wait that the call ended in"}
		if c.Outcome == targetDown {
			last.Class, last.Title = connect, "waited for the target until the call ended"
		}
		t.Waits = append(t.Waits, last)
	}
	t.Height = laneHeight * max(1, len(lanes))
	return t
}

func (a *Attempt) end() float64 { return a.StartMs + a.DurationMs }

// story describes the call for readers who cannot see the drawing.
func (c *Call) story() string {
	var parts []string
	for i := range c.Attempts {
		a := &c.Attempts[i]
		if a.Hedge {
			parts = append(parts, "hedge after "+lengthMs(a.StartMs))
		} else if i > 0 && a.WaitMs > 0 {
			parts = append(parts, "wait of "+lengthMs(a.WaitMs))
		}
		if a.Decision == beaten {
			parts = append(parts, "cancelled")
			continue
		}
		parts = append(parts, a.Code)
	}
	return fmt.Sprintf("%s in %s: %s", plural(int64(c.Made), "attempt", "attempts"), lengthMs(c.ElapsedMs), strings.Join(parts, ", "))
}

// ago describes how long ago something was.
func ago(d time.Duration) string {
	if d < time.Second {
		return "just now"
	}
	return length(d.Truncate(time.Second)) + " ago"
}
