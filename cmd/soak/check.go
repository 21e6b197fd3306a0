package main

import (
	"fmt"
	"strings"
)

// A checker compares the two ledgers of an epoch.
type checker struct {
	violation func(id callID, what string, server []serverRecord)
}

// epochFacts is what the ledgers of an epoch amount to.
type epochFacts struct {
	calls        int
	acknowledged int
	runs         int // attempts that reached a server and ran
	refused      int // attempts that reached a server, which asked for another one
	late         int // records that came after the check
}

// check compares an epoch's records, each sorted by call. The client has started calls calls.
func (c *checker) check(name epochName, calls uint64, client []clientRecord, server []serverRecord) (facts epochFacts) {
	for i := range client {
		r := &client[i]
		if i > 0 && client[i-1].call == r.call {
			c.violation(r.call, "the call ended twice", nil)
			continue
		}
		facts.calls++
		var of []serverRecord
		of, server = c.recordsOf(r.call, server)
		c.checkCall(r, of, &facts)
	}
	c.strangers(server)
	if uint64(facts.calls) != calls {
		c.violation(newCallID(name.client, name.epoch, firstMissing(client)),
			fmt.Sprintf("the client started %d calls in this epoch, and %d ended; this is the first that did not", calls, facts.calls), nil)
	}
	return facts
}

// firstMissing returns the first place that no record has.
func firstMissing(client []clientRecord) uint64 {
	next := uint64(0)
	for _, r := range client {
		if r.call.place() > next {
			break
		}
		next = r.call.place() + 1
	}
	return next
}

// recordsOf returns a call's records, and those of the calls after it.
func (c *checker) recordsOf(id callID, server []serverRecord) (of, rest []serverRecord) {
	begin := 0
	for begin < len(server) && server[begin].call < id {
		begin++
	}
	c.strangers(server[:begin])
	end := begin
	for end < len(server) && server[end].call == id {
		end++
	}
	return server[begin:end], server[end:]
}

// strangers reports the first of some records of calls that no client has reported.
func (c *checker) strangers(server []serverRecord) {
	if len(server) > 0 {
		c.violation(server[0].call, "a server ran the call, but the client did not report its end", server[:1])
	}
}

// checkCall compares what the client says about a call with what the servers say.
func (c *checker) checkCall(r *clientRecord, server []serverRecord, facts *epochFacts) {
	var runs, arrived, stored, below, again int
	var highest uint16
	found := false
	for i, s := range server {
		switch {
		case s.below:
			if s.arrives() {
				below++
			}
		case s.note == noteStored:
			if s.token == r.token {
				stored = max(stored, int(s.count))
			}
		case s.note == noteNotGivenUp:
			again += int(s.count) - 1
		default:
			arrived++
			highest = max(highest, s.previous)
			for _, before := range server[:i] {
				if before.arrives() && !before.below && before.previous == s.previous {
					c.violation(r.call, fmt.Sprintf("attempt %d reached a server twice", s.previous+1), server)
				}
			}
			if s.note == noteRun {
				runs++
				found = found || s.token == r.token
			}
		}
	}
	facts.runs += runs
	facts.refused += arrived - runs
	if r.flags&flagOnce != 0 && runs > 1 {
		c.violation(r.call, fmt.Sprintf("a method under WithUnsentOnly ran %d times", runs), server)
	}
	if arrived > int(r.limit) {
		c.violation(r.call, fmt.Sprintf("%d attempts reached servers, and the policy allows %d", arrived, r.limit), server)
	}
	// One attempt at the first service may make all of its own. After one without a response, each makes one; before
	// that, those follow one another that failed without having given up.
	if allowed := min(layerAttempts+arrived-1+again, layerAttempts*arrived); below > allowed {
		c.violation(r.call, fmt.Sprintf("%d attempts reached the second service, and with %d at the first at most %d are allowed", below, arrived,
			allowed), server)
	}
	if sent := max(int(r.attempts), 1); arrived > sent {
		c.violation(r.call, fmt.Sprintf("%d attempts reached servers, and the client reports %d", arrived, sent), server)
	}
	if int(highest) >= max(int(r.attempts), 1) {
		c.violation(r.call, fmt.Sprintf("an attempt said that %d had preceded it, and the client reports %d in all", highest, r.attempts), server)
	}
	if r.flags&flagAcknowledged == 0 {
		return
	}
	facts.acknowledged++
	if !found {
		c.violation(r.call, fmt.Sprintf("attempt %v was acknowledged, and no server has stored it", r.token), server)
	}
	if int(r.count) > stored {
		c.violation(r.call, fmt.Sprintf("%d messages were acknowledged, and attempt %v has stored %d", r.count, r.token, stored), server)
	}
}

// describe lists a call's records.
func describe(server []serverRecord) string {
	var lines []string
	for _, s := range server {
		layer := ""
		if s.below {
			layer = "below, "
		}
		switch s.note {
		case noteRun:
			lines = append(lines, fmt.Sprintf("%sattempt %d ran as %v on server process %d", layer, s.previous+1, s.token, s.token>>40))
		case noteRefused:
			lines = append(lines, fmt.Sprintf("%sattempt %d was refused as %v by server process %d", layer, s.previous+1, s.token, s.token>>40))
		case noteStored:
			lines = append(lines, fmt.Sprintf("%v stored %d messages", s.token, s.count))
		case noteNotGivenUp:
			lines = append(lines, fmt.Sprintf("%v has not given up after %d attempts below", s.token, s.count))
		}
	}
	return strings.Join(lines, "\n")
}
