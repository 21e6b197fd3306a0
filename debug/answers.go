package debug

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/grpcretry/grpcretry/internal/reasons"
)

// This file answers the four questions at the top of the page.

// An answer is the answer to one of the questions.
type answer struct {
	Question string
	Short    string // in one or two words
	Tone     string // good, warn, bad or quiet
	Line     string
	Items    []item
	Bars     *bars
	More     []string
	Said     *said
	Other    string // the Line of the other window
}

// An item is a part of a whole.
type item struct {
	Name, Words, Count string
	Bar                string // its width
	Quiet              bool   // retries have nothing to do with it
}

// said is a status message that a peer sent.
type said struct{ Words, Peer, Ago string }

func answers(s *Snapshot, all bool) []answer {
	c, other := chosen(&s.Recent, &s.Total, all), chosen(&s.Recent, &s.Total, !all)
	return []answer{
		isRetrying(c, other, s.Steps),
		why(c, other, lastSaid(s, all)),
		isHelping(c, other, s.Steps),
		whatStopped(c, other),
	}
}

func isRetrying(c, other *Counts, steps []Step) answer {
	line := func(c *Counts) string {
		switch {
		case c.Attempts == 0:
			return "no calls"
		case c.Retries == 0:
			return plural(c.Calls, "call", "calls") + ", no retries"
		default:
			return fmt.Sprintf("%s in %s, %s", plural(c.Retries, "retry", "retries"),
				plural(c.Attempts, "attempt", "attempts"), percent(c.RetryShare))
		}
	}
	a := answer{Question: "Is it retrying?", Short: "No", Tone: "good", Line: line(c), Other: line(other)}
	switch {
	case c.Attempts == 0:
		a.Short, a.Tone = "No calls", "quiet"
	case c.Retries > 0:
		a.Short, a.Tone = "Yes", "warn"
	}
	if c.Attempts > 0 {
		a.More = append(a.More, fmt.Sprintf("%s, %s on the first attempt",
			plural(c.Calls, "call", "calls"), plural(c.FirstTry, "success", "successes")))
	}
	if c.Hedges > 0 {
		a.More = append(a.More, fmt.Sprintf("%s, of which %s won", plural(c.Hedges, "hedge", "hedges"), count(c.HedgeWon)))
	}
	a.Bars = newBars(steps, bar{"retries", "warn"}, bar{"other attempts", "quiet"}, func(s *Step) (int64, int64) {
		return s.Retries, s.Attempts - s.Retries
	})
	return a
}

func why(c, other *Counts, last *said) answer {
	line := func(c *Counts) string {
		if failed := sum(c.Failed); failed > 0 {
			return plural(failed, "failed attempt", "failed attempts")
		}
		return "no failed attempts"
	}
	a := answer{Question: "Why?", Short: "No failures", Tone: "good", Line: line(c), Other: line(other)}
	if c.Attempts == 0 {
		a.Short, a.Tone = "–", "quiet"
	}
	if len(c.Failed) == 0 {
		return a
	}
	a.Items = items(c.Failed, nil)
	a.Short, a.Tone = a.Items[0].Name, "warn"
	if len(c.Waits) > 0 {
		var waits []string
		for _, w := range items(c.Waits, nil) {
			waits = append(waits, w.Count+" "+waitCause(w.Name))
		}
		a.More = append(a.More, "waits chosen: "+strings.Join(waits, ", "))
	}
	a.Said = last
	return a
}

// isHelping divides as docs/observing.md and docs/alerts.yml do: retries that succeeded by all
// that reached a server. A retry is what the backend pays for; calls that were rescued by the
// third retry would hide two that it could have been spared.
func isHelping(c, other *Counts, steps []Step) answer {
	line := func(c *Counts) string {
		if c.Rescued+c.Wasted == 0 {
			return "no retry has ended"
		}
		return fmt.Sprintf("%s of %s succeeded", count(c.Rescued), plural(c.Rescued+c.Wasted, "retry", "retries"))
	}
	a := answer{Question: "Is it helping?", Short: "–", Tone: "quiet", Line: line(c), Other: line(other)}
	if c.Attempts > 0 && len(c.Failed) == 0 {
		a.Short, a.Tone = "Not needed", "good"
	}
	if ended := c.Rescued + c.Wasted; ended > 0 {
		share := float64(c.Rescued) / float64(ended)
		a.Short, a.Tone = percent(share), "good"
		switch {
		case share < 0.5: // the alert's threshold
			a.Tone = "bad"
		case share < 0.9:
			a.Tone = "warn"
		}
	}
	if retried := c.Rescued + c.FailedRetried; retried > 0 {
		a.More = append(a.More, fmt.Sprintf("%s of %s rescued", count(c.Rescued), plural(retried, "retried call", "retried calls")))
	}
	a.Bars = newBars(steps, bar{"rescued", "good"}, bar{"wasted", "bad"}, func(s *Step) (int64, int64) {
		return s.Rescued, s.Wasted
	})
	return a
}

func whatStopped(c, other *Counts) answer {
	line := func(c *Counts) string {
		if failed := sum(c.Stopped); failed > 0 {
			return fmt.Sprintf("%s of %s failed", count(failed), plural(c.Calls, "call", "calls"))
		}
		return "no call failed"
	}
	a := answer{Question: "What stopped it?", Short: "Nothing", Tone: "good", Line: line(c), Other: line(other)}
	if c.Attempts == 0 {
		a.Short, a.Tone = "–", "quiet"
	}
	if a.Items = stops(c); len(a.Items) > 0 {
		a.Short, a.Tone = stopWords[a.Items[0].Name].short, "bad"
		a.More = append(a.More, a.Items[0].Name+": "+a.Items[0].Words)
		if a.Items[0].Quiet {
			a.Tone = "quiet"
		}
	}
	return a
}

// stops returns the reasons why calls failed, those that concern retries first.
func stops(c *Counts) []item {
	all := items(c.Stopped, func(name string) bool { return stopWords[name].quiet })
	for i := range all {
		all[i].Words = stopWords[all[i].Name].long
	}
	return all
}

// items returns counts by name: the largest first, quiet ones last.
func items(counts map[string]int64, quiet func(name string) bool) []item {
	names := slices.SortedFunc(maps.Keys(counts), func(a, b string) int {
		if quiet != nil && quiet(a) != quiet(b) {
			return compareLast(quiet(a), quiet(b))
		}
		return cmp.Or(cmp.Compare(counts[b], counts[a]), cmp.Compare(a, b))
	})
	largest := int64(1)
	for _, n := range counts {
		largest = max(largest, n)
	}
	all := make([]item, len(names))
	for i, name := range names {
		all[i] = item{
			Name: name, Count: count(counts[name]), Bar: width(float64(counts[name]) / float64(largest)),
			Quiet: quiet != nil && quiet(name),
		}
	}
	return all
}

func sum(counts map[string]int64) (n int64) {
	for _, one := range counts {
		n += one
	}
	return n
}

// lastSaid returns the newest status message in the window that a server or gRPC has sent, nil
// if there is none.
func lastSaid(s *Snapshot, all bool) *said {
	for i := range s.Calls {
		c := &s.Calls[i]
		if !all && s.Now.Sub(c.Ended) > Recent {
			return nil
		}
		for j := len(c.Attempts) - 1; j >= 0; j-- {
			if a := &c.Attempts[j]; a.Message != "" && !a.Ours {
				return &said{a.Message, a.Peer, ago(s.Now.Sub(c.Ended))}
			}
		}
	}
	return nil
}

// stopWords are the words for each reason of package grpcretry.
var stopWords = func() map[string]stopWord {
	words := map[string]stopWord{}
	for _, r := range reasons.All() {
		words[r.Word] = stopWord{short(r.Word), r.Text, r.Quiet}
	}
	return words
}()

// A stopWord describes a reason. A quiet reason ends calls that no policy would have retried.
type stopWord struct {
	short, long string
	quiet       bool
}

// short returns "Target down" for target_down.
func short(word string) string {
	return strings.ToUpper(word[:1]) + strings.ReplaceAll(word[1:], "_", " ")
}

// waitCause returns the words after a count of waits.
func waitCause(source string) string {
	if source == connect {
		return "for a connection"
	}
	return "by " + waitWords(source)
}

const (
	connect    = "connect"     // the wait source
	targetDown = "target_down" // the reason
	mayHaveRun = "may_have_run"
)

func waitWords(source string) string {
	switch source {
	case "retry_info":
		return "RetryInfo"
	case connect:
		return "connection and backoff"
	default:
		return source
	}
}
