package judges_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry"
)

// This file holds the model: what gRPC promises about a ClientStream, as judgements on the log
// of a run. The source of each rule is the documentation of grpc.ClientStream and the code of
// grpc-go 1.85, and for what happens between attempts, the design.
//
// The model makes these exceptions, because plain gRPC does the same:
//
//   - A program may wait for ever: both windows are full, or each side waits for the other. Such
//     a wait must be one that gRPC would make on the newest attempt (justify).
//   - After the end of the context, OnFinish may differ from RecvMsg: gRPC's watcher of the
//     context reports CANCELED while RecvMsg still returns the messages that had arrived, and
//     then their status. OnFinish may also run late, or before the last message.
//   - The same holds after a SendMsg that gRPC has refused by itself, such as of a message that
//     is too large: it ends the stream, and messages that had arrived can still be received.
//   - OnFinish may run after RecvMsg has returned the end if another goroutine has found that
//     end, by Header, or because of a deadline; an attempt timeout counts as one.
//   - A client stream that ends well without a response, or with two, fails RecvMsg with
//     INTERNAL. OnFinish was called with nil if Header had found the end before (sawSuccess), and
//     is not called after two; then the next RecvMsg goes on. So does a RecvMsg after one that
//     the codec has failed, or a wrapper below.
//   - gRPC may report a lost connection as a clean io.EOF; the control allows that, and what
//     Header has found before RecvMsg makes a failure of it.
//   - Hedges that are sent at the same instant reach gRPC in any order.
//
//   - SendMsg may return io.EOF while RecvMsg is returning the end on another goroutine: gRPC's stream, too, has ended by
//     then.
//
// A wrapper below that breaks its contract, because it drops call options or hides headers, gets the simplest safe
// behaviour: such a run is judged only for what must never happen (judgeSafety).
//
// And these, because the design says so: an attempt timeout of a client stream runs until its
// status; a method is left to gRPC only once the channel knows its service config; SendMsg may
// accept a message for an attempt that has just died while a replay, or another goroutine that
// finds out, is under way; after an attempt timeout that goroutine may be gRPC's.

// A finding is something that one stream could not have done.
type finding struct {
	kind string // one word or two, the same for all findings of one rule
	text string
	seq  int
}

// slack is more than all naps of the fake in one call: a goroutine may be late by that much.
const slack = 500 * time.Microsecond

// ctxEndAt is when the context of the application ended.
func (r *run) ctxEndAt() time.Duration {
	at := time.Duration(math.MaxInt64)
	if r.deadline > 0 {
		at = r.deadline
	}
	if r.ctxEnd.happened() {
		at = min(at, r.ctxEnd.at)
	}
	if r.cleaned.happened() {
		at = min(at, r.cleaned.at)
	}
	return at
}

// ctxEndedBy reports whether the context of the application may have ended by m.
func (r *run) ctxEndedBy(m mark) bool { return m.at >= r.ctxEndAt() }

// newest is the newest attempt that had started by m.
func (r *run) newest(m mark) *fakeStream {
	var newest *fakeStream
	for _, a := range r.attempts {
		if a.started.seq < m.seq {
			newest = a
		}
	}
	return newest
}

func (r *run) each(o op) func(func(*called) bool) {
	return func(yield func(*called) bool) {
		for _, c := range r.calls {
			if c.op == o && c.end.happened() && !yield(c) {
				return
			}
		}
	}
}

// final is the first call of RecvMsg that returned an error, or with which a client stream was
// complete; nil if there was none.
func (r *run) final() *called {
	for c := range r.each(oRecv) {
		if c.err != nil || !r.kind.server() {
			return c
		}
	}
	return nil
}

// alive reports whether an attempt may still bring something: its stream is there and has not
// ended, or has messages that were not read.
func (a *fakeStream) alive() bool {
	return a.created.happened() && a.createErr == nil && a.ctx.Err() == nil && !a.done.happened()
}

// inspect runs when nothing has happened for long. If plain gRPC would wait as well, the
// program is one that waits for ever, and its context is cancelled.
func (r *run) inspect() {
	r.mu.Lock()
	for _, c := range r.calls {
		if !c.end.happened() {
			r.justify(c)
		}
	}
	r.stalled = true
	r.mu.Unlock()
	r.cancel()
}

// justify finds calls that wait although plain gRPC would not.
func (r *run) justify(c *called) {
	stuck := func(why string) { r.find("stuck "+c.op.String(), "%v waits for ever, although %s", c.op, why) }
	if c.op != oRecv && c.op != oSend && c.op != oHeader {
		stuck("it never waits in gRPC")
		return
	}
	living := 0
	for _, a := range r.attempts {
		if a.ctx.Err() != nil || a.createErr != nil {
			continue // given up
		}
		living++
		switch {
		case !a.created.happened():
			stuck("nothing waits for attempt " + strconv.Itoa(a.number))
		case c.op == oRecv && a.read < len(a.arrived) && (r.kind.server() || a.pushing):
			// A client stream needs the end too, but its server may wait for the client to read.
			stuck(fmt.Sprintf("a message of attempt %d is there", a.number))
		case a.done.happened():
			stuck(fmt.Sprintf("attempt %d has ended", a.number))
		case c.op == oHeader && a.headed.happened() && r.hedge == 0: // a hedged stream's waits for the attempt that wins
			stuck(fmt.Sprintf("the headers of attempt %d are there", a.number))
		case c.op == oSend && len(a.accepted)-a.consumed < a.script.in:
			stuck(fmt.Sprintf("the window of attempt %d is open", a.number))
		default:
			r.forwarded(a)
		}
	}
	if living == 0 {
		stuck("no attempt is in flight")
	}
}

// forwarded finds messages that were accepted from the application and not sent on, while the
// stream waits.
func (r *run) forwarded(a *fakeStream) {
	sent, closed := 0, false
	for c := range r.each(oSend) {
		if c.err == nil {
			sent++
		}
	}
	for range r.each(oClose) {
		closed = true
	}
	if len(a.accepted)-a.consumed >= a.script.in {
		return
	}
	if len(a.accepted) < sent {
		r.find("not forwarded", "attempt %d has %d of %d messages, and waits", a.number, len(a.accepted), sent)
	} else if closed && !a.closed.happened() {
		r.find("not forwarded", "attempt %d does not know of CloseSend, and waits", a.number)
	}
}

// hung finds what did not return after the context had ended. It needs mu.
func (r *run) hung() {
	for _, c := range r.calls {
		if !c.end.happened() {
			r.find("hang in "+c.op.String(), "%v did not return, long after the context had ended", c.op)
		}
	}
	if !r.opened.happened() {
		r.find("hang in NewStream", "the interceptor did not return, long after the context had ended")
	}
	if len(r.findings) == 0 {
		r.find("hang", "the application did not end")
	}
}

// lingered looks at a stream that its application has left alone for a while.
func (r *run) lingered() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.hedge > 0 || r.ctxEndedBy(r.tick()) {
		return
	}
	if a := r.newest(r.tick()); a != nil && a.alive() && r.final() == nil && !r.refusedSend() {
		r.forwarded(a)
	}
}

// refusedSend reports whether a SendMsg failed.
func (r *run) refusedSend() bool {
	for c := range r.each(oSend) {
		if c.err != nil {
			return true
		}
	}
	return false
}

// wrapperBreaks reports whether a wrapper below breaks its contract.
func (r *run) wrapperBreaks() bool { return r.dropsOptions || r.nilHeader }

// judgeSafety: whatever a wrapper does, nothing is sent twice that must not be, no wrong data is returned as right, and
// no slot of other calls is lost. It needs mu.
func (r *run) judgeSafety() {
	if n := len(r.finishes); n > 1 {
		r.find("OnFinish", "OnFinish ran %d times", n)
	}
	r.judgeBudget()
	r.judgeRequests()
	r.judgeMessages()
	r.judgeEnd()
	if limit := max(r.program.attempts, r.hedge); !r.plain && len(r.attempts) > limit {
		r.find("too many attempts", "%d attempts were made, %d are allowed", len(r.attempts), limit)
	}
}

// judge finds what is wrong with a run that is over. It needs mu.
func (r *run) judge() {
	if r.wrapperBreaks() {
		r.judgeSafety()
		return
	}
	r.judgeFinish()
	r.judgeBudget()
	r.judgeRequests()
	r.judgeEvents()
	r.judgeMessages()
	r.judgeEnd()
	r.judgeSends()
	r.judgeHeaders()
	r.judgeContexts()
	r.judgeTrailers()
	r.judgeTargets()
	if !r.plain && r.hedge == 0 {
		for i := range r.attempts[1:] {
			r.judgeRetry(r.attempts[i], r.attempts[i+1])
		}
	}
	if r.plain {
		return
	}
	r.judgeRetried()
	r.judgeHedged()
	if limit := max(r.program.attempts, r.hedge); len(r.attempts) > limit {
		r.find("too many attempts", "%d attempts were made, %d are allowed", len(r.attempts), limit)
	}
	for _, a := range r.attempts {
		if a.started.at > r.ctxEndAt() {
			r.find("late attempt", "attempt %d started at %v, the context ended at %v", a.number, a.started.at, r.ctxEndAt())
		}
		// Hedges that are sent at the same time reach gRPC in any order.
		want := strconv.Itoa(a.number - 1)
		alike := slices.ContainsFunc(r.attempts, func(other *fakeStream) bool {
			return r.hedge > 0 && other != a && other.started.at == a.started.at
		})
		if a.number > 1 && a.previous != want && !alike {
			r.find("request header", "attempt %d has grpc-previous-rpc-attempts %q, want %s", a.number, a.previous, want)
		}
	}
}

// judgeFinish: OnFinish runs once for each call, when it ends, and with its error.
func (r *run) judgeFinish() {
	n := len(r.finishes)
	if n > 1 {
		r.find("OnFinish", "OnFinish ran %d times", n)
		return
	}
	if n == 0 {
		r.find("OnFinish", "OnFinish did not run")
		return
	}
	f, c := r.finishes[0], r.final()
	if c == nil || r.wrapperFails() || r.refusedLarge() {
		return
	}
	if r.timeout > 0 && hasMessage(c.err, cardinality) {
		return // the look for headers, at the timeout, may have seen gRPC's success
	}
	if !r.ctxEndedBy(c.end) && !r.ctxEndedBy(f.mark) && !r.sawSuccess(c) && codeOf(f.err) != codeOf(c.err) {
		r.find("OnFinish differs", "OnFinish was called with %v, RecvMsg returned %v", f.err, c.err)
	}
	if len(r.threads) == 1 && !r.ctxEndedBy(c.end) && f.seq > c.end.seq && !errors.Is(c.err, errWrapper) &&
		!errors.Is(c.err, grpcretry.ErrAttemptTimeout) { // a deadline is reported on another goroutine by gRPC, too
		// If the end is being reported already, RecvMsg does not wait for it: OnFinish may have called.
		ending := r.timeout > 0 && c.end.at-c.start.at < slack && f.at-c.start.at < slack
		if !(r.plain && hasMessage(c.err, cardinality)) && !ending {
			r.find("OnFinish late", "OnFinish ran after RecvMsg had returned the end")
		}
	}
	if r.sawSuccess(c) {
		return
	}
	for c := range r.each(oRecv) {
		if c.err == nil && c.start.seq > f.seq && !r.ctxEndedBy(c.end) {
			r.find("OnFinish early", "OnFinish ran before the last message was received")
		}
	}
}

// sawSuccess reports whether a stream that ended well without a response, or with two, may have
// been seen to end well before or after RecvMsg made of it the failure that c returned.
func (r *run) sawSuccess(c *called) bool {
	if !hasMessage(c.err, cardinality) {
		return false
	}
	if slices.ContainsFunc(r.attempts, func(a *fakeStream) bool { return len(a.arrived) > 1 }) {
		return true // after two responses, the stream of gRPC goes on
	}
	return slices.ContainsFunc(r.calls, func(other *called) bool {
		return (other.op == oHeader || other.op == oSend && other.err == io.EOF) && other.start.seq < c.end.seq
	})
}

// wrapperFails reports whether a wrapper below, or the codec, may have returned an error of its
// own: then there may be more to receive.
func (r *run) wrapperFails() bool {
	for _, a := range r.attempts {
		if a.script.ownSend > 0 || a.script.ownRecv > 0 || a.script.ownCreate || a.script.garbled > 0 {
			return true
		}
	}
	return false
}

// judgeBudget: each attempt after the first is paid for once, and each attempt is reported once to each
// budget, with its number to the one that paid.
func (r *run) judgeBudget() {
	if r.plain {
		return
	}
	if r.unobservable() {
		return
	}
	// A token comes back if the context ends between the payment and the sending.
	mayReturn := r.timeout > 0 || len(r.finishes) > 0 && r.ctxEndedBy(r.finishes[0].mark)
	if made := len(r.attempts) - 1; r.withdrawn-r.returned != made || r.returned > 0 && !mayReturn {
		r.find("budget", "%d withdrawn, %d returned, for %d attempts after the first", r.withdrawn, r.returned, made)
	}
	if r.hedge > 0 && !r.hedges.agrees(r.deposits) {
		r.find("hedges", "the budget of hedges heard %v", r.hedges.deposits)
	}
	if len(r.deposits) != len(r.attempts) {
		r.find("deposits", "%d deposits for %d attempts: %v", len(r.deposits), len(r.attempts), r.deposits)
		return
	}
	succeeded := 0
	for _, d := range r.deposits {
		if d.Result == grpcretry.Succeeded {
			succeeded++
		}
	}
	c := r.final()
	if c == nil || r.ctxEndedBy(c.end) || r.refusedLarge() || r.wrapperFails() {
		return
	}
	if r.sawSuccess(c) || r.timeout > 0 && hasMessage(c.err, cardinality) {
		return
	}
	if won := codeOf(c.err) == codes.OK; won != (succeeded == 1) {
		r.find("deposits", "%d attempts were reported as succeeded, RecvMsg ended with %v", succeeded, c.err)
	}
}

// unobservable reports whether nobody could tell that the stream has ended: the application has
// abandoned it, and a wrapper below has dropped the OnFinish of the attempt.
func (r *run) unobservable() bool {
	return r.dropsOptions && len(r.finishes) == 0 && r.final() == nil && r.openErr == nil
}

// judgeRequests: each attempt gets the messages in order from the first on, and the half-close
// after all of them.
func (r *run) judgeRequests() {
	var texts []string
	closing := !r.kind.client()
	for _, c := range r.calls {
		if c.op == oSend && !c.tooLarge {
			texts = append(texts, strconv.Itoa(c.n))
		}
		closing = closing || c.op == oClose
	}
	for _, a := range r.attempts {
		if len(a.accepted) > len(texts) || !slices.Equal(a.accepted, texts[:len(a.accepted)]) {
			r.find("requests", "attempt %d was sent %q of %q", a.number, a.accepted, texts)
		}
		if a.closed.happened() && !closing {
			r.find("requests", "attempt %d was closed by nobody", a.number)
		}
		if a.closed.happened() && !r.refusedSend() && len(a.accepted) < len(texts) {
			r.find("requests", "attempt %d was closed after %d of %d messages", a.number, len(a.accepted), len(texts))
		}
	}
}

// judgeEvents: events come once, in order, and say what happened.
func (r *run) judgeEvents() {
	if r.plain || !r.observed {
		return
	}
	n := map[grpcretry.EventKind]int{}
	failed := 0
	for i, e := range r.events {
		n[e.Kind]++
		switch e.Kind {
		case grpcretry.AttemptEnd:
			if e.Attempt.Err != nil && !errors.Is(e.Attempt.Err, grpcretry.ErrHedgeLost) {
				failed++
			}
			r.judgeAttemptEnd(e)
		case grpcretry.CallEnd:
			if i != len(r.events)-1 {
				r.find("events", "CallEnd is not the last event")
			}
			if len(r.finishes) == 1 && codeOf(e.Err) != codeOf(r.finishes[0].err) {
				r.find("events", "CallEnd has %v, OnFinish was called with %v", e.Err, r.finishes[0].err)
			}
		}
	}
	if n[grpcretry.CallEnd] != 1 || n[grpcretry.AttemptStart] != len(r.attempts) || n[grpcretry.AttemptEnd] != len(r.attempts) ||
		n[grpcretry.Decision] != failed {
		r.find("events", "start, end, decision, call end came %v times for %d attempts of which %d failed", n, len(r.attempts), failed)
	}
}

// judgeAttemptEnd: an attempt that ended with the server's status has its trailer and peer.
func (r *run) judgeAttemptEnd(e event) {
	if e.Attempt.Number < 1 || e.Attempt.Number > len(r.attempts) {
		return
	}
	a := r.attempts[e.Attempt.Number-1]
	if !a.done.happened() || !a.byServer || !hasMessage(e.Attempt.Err, a.status.Message()) || e.Attempt.Err == nil {
		return
	}
	if !sameMD(e.Attempt.Trailer, a.trailer) {
		r.find("trailer of attempt", "AttemptEnd of attempt %d has trailer %v, want %v", a.number, shown(e.Attempt.Trailer),
			shown(a.trailer))
	}
	if e.Attempt.Peer == nil || e.Attempt.Peer.String() != a.addr() {
		r.find("peer of attempt", "AttemptEnd of attempt %d has peer %v, want %v", a.number, e.Attempt.Peer, a.addr())
	}
}

// judgeMessages: all messages are from one attempt, each is received once and in order, and
// nothing of another attempt is mixed in.
func (r *run) judgeMessages() {
	var from *fakeStream
	i := 0
	for c := range r.each(oRecv) {
		if hasMessage(c.err, cardinality) || c.err != nil && sameStatus(c.err, errGarbled) {
			return // gRPC returns what else has arrived
		}
		if c.err != nil {
			continue
		}
		if !r.kind.server() && i > 0 {
			r.find("messages", "RecvMsg of a client stream returned a second message, %q", c.text)
			continue
		}
		text := c.text
		if r.merges && r.prefilled {
			var ok bool
			// The first message of a retry is received into an empty reply.
			if text, ok = strings.CutPrefix(text, prefix); !ok && (i > 0 || strings.HasPrefix(text, "1.")) {
				r.find("merged", "a message that held %q before RecvMsg is %q after it", prefix, c.text)
				continue
			}
		}
		number, place, ok := parseResponse(text)
		switch {
		case !ok:
			r.find("merged", "RecvMsg returned %q, which no server has sent", c.text)
			return
		case number > len(r.attempts):
			r.find("messages", "RecvMsg returned %q of no attempt", c.text)
			return
		case from != nil && from.number != number:
			r.find("messages", "RecvMsg returned %q after messages of attempt %d", c.text, from.number)
			return
		case place != i:
			r.find("messages", "RecvMsg returned %q as message number %d", c.text, i)
			return
		}
		from = r.attempts[number-1]
		if i++; r.kind.server() && place < len(from.arrived) {
			r.judgePrompt(c, from.arrived[place])
		} else if !r.kind.server() {
			r.judgePrompt(c, from.done)
		}
		if !r.kind.server() {
			if !from.done.happened() || !from.byServer || from.status.Code() != codes.OK {
				r.find("messages", "RecvMsg of a client stream returned the response of attempt %d, which did not succeed", number)
			}
		}
		if r.hedge == 0 && r.newest(c.end) != from {
			r.find("messages", "RecvMsg returned %q after attempt %d had started", c.text, r.newest(c.end).number)
		}
	}
}

func parseResponse(text string) (attempt, place int, ok bool) {
	text, ok = strings.CutSuffix(text, ";")
	if !ok {
		return 0, 0, false
	}
	first, second, ok := strings.Cut(text, ".")
	attempt, err := strconv.Atoi(first)
	place, err2 := strconv.Atoi(second)
	return attempt, place, ok && err == nil && err2 == nil && attempt > 0
}

// source is the attempt that the application has seen messages of by m, nil for none.
func (r *run) source(m mark) *fakeStream {
	for c := range r.each(oRecv) {
		if c.err == nil && c.end.seq < m.seq {
			text := strings.TrimPrefix(c.text, prefix)
			if number, _, ok := parseResponse(text); ok && number <= len(r.attempts) {
				return r.attempts[number-1]
			}
		}
	}
	return nil
}

// seenBy reports whether the application had seen a message or headers before m.
func (r *run) seenBy(m mark) bool {
	for _, c := range r.calls {
		if c.thread == callbackThread || len(r.finishes) > 0 && c.end.seq > r.finishes[0].seq {
			continue // the outcome was known before
		}
		if c.end.happened() && c.end.seq < m.seq && (c.op == oRecv && c.err == nil || c.op == oHeader && c.md != nil) {
			return true
		}
	}
	return false
}

// outcome is the end of the call as the application has learnt it, from RecvMsg or OnFinish; nil if it has not.
func (r *run) outcome() *called {
	f := r.final()
	if len(r.finishes) == 0 || f != nil && f.end.seq < r.finishes[0].seq {
		return f
	}
	end := &called{op: oRecv, end: r.finishes[0].mark, err: r.finishes[0].err}
	if f != nil {
		end.err = f.err
	} else if end.err == nil {
		end.err = io.EOF
	}
	return end
}

var errVanished = status.Error(codes.Unavailable, "grpcretry: the connection was lost, and gRPC reported an end without a failure")

// result is the attempt whose result the application has got with the end f of the call: the one that it has seen messages
// of, else the one whose status the error is; nil if that is no attempt's.
func (r *run) result(f *called) *fakeStream {
	if a := r.source(mark{seq: math.MaxInt}); a != nil {
		return a
	}
	err := f.err
	var wrapped *grpcretry.Error
	if errors.As(err, &wrapped) && codeOf(err) == codeOf(wrapped.Last) { // otherwise that of the context
		err = wrapped.Last
	}
	for _, a := range slices.Backward(r.attempts) {
		own := a.createErr
		switch ended := a.done.happened() && a.byServer; {
		case ended && a.script.vanishes && a.status.Code() == codes.OK:
			own = errVanished
		case ended:
			own = a.status.Err()
		}
		if own != nil && err != io.EOF && !isContextCode(codeOf(own)) && sameStatus(err, own) {
			return a
		}
	}
	if r.hedge > 0 {
		return nil
	}
	return r.newest(f.end)
}

func codeOf(err error) codes.Code {
	if err == io.EOF {
		return codes.OK
	}
	return status.Code(err)
}

func hasMessage(err error, message string) bool {
	return err != nil && status.Convert(err).Message() == message
}

func isContextCode(c codes.Code) bool { return c == codes.Canceled || c == codes.DeadlineExceeded }

// judgeEnd: RecvMsg returns io.EOF after all messages of an attempt that succeeded, else the
// status of one that did not; once it has returned an error it returns that again.
func (r *run) judgeEnd() {
	var first *called
	received := 0
	for c := range r.each(oRecv) {
		switch {
		case c.err == nil && first != nil && (r.wrapperFails() || hasMessage(first.err, cardinality)): // the stream of gRPC goes on
		case c.err == nil && first != nil:
			r.find("after the end", "RecvMsg returned a message after %v", first.err)
		case c.err == nil:
			received++
		case first == nil:
			first = c
			r.judgeError(c, received)
		case codeOf(c.err) != codeOf(first.err) || (c.err == io.EOF) != (first.err == io.EOF) || c.err.Error() != first.err.Error():
			if !r.wrapperFails() && !hasMessage(first.err, cardinality) {
				r.find("after the end", "RecvMsg returned %v after it had returned %v", c.err, first.err)
			}
		}
	}
	if r.openErr != nil {
		r.judgeError(&called{op: oRecv, start: mark{1, 0}, end: r.opened, err: r.openErr}, 0)
	}
}

// judgeError judges the first error of RecvMsg.
func (r *run) judgeError(c *called, received int) {
	last := r.newest(c.end)
	if c.err == io.EOF {
		r.judgeEOF(c, last, received)
		return
	}
	var wrapped *grpcretry.Error
	isOurs := errors.As(c.err, &wrapped)
	// Headers that Header returns after the end change nothing.
	if isOurs && r.seenBy(r.reported(c.start)) {
		r.find("error is wrapped", "RecvMsg of a stream that the application has seen something of returned %v", c.err)
	}
	if isOurs && r.ctxEndedBy(c.end) && isContextCode(codeOf(c.err)) || r.ctxEndedBy(c.end) && isContextCode(codeOf(c.err)) {
		return
	}
	if isOurs && errors.Is(c.err, context.Canceled) || isOurs && errors.Is(c.err, context.DeadlineExceeded) {
		r.find("error", "RecvMsg reports the end of the context, which has not ended: %v", c.err)
		return
	}
	if !r.explains(c, last) {
		r.find("error", "RecvMsg returned %v, which attempt %d did not end with", c.err, last.number)
	}
}

// reported is when the end of the call was decided or reported, at the latest at m. Without an observer the end
// of the newest attempt has to do: another goroutine may have read it.
func (r *run) reported(m mark) mark {
	if last := r.newest(m); last != nil && last.done.happened() && last.done.seq < m.seq {
		m = last.done
	}
	if len(r.finishes) > 0 && r.finishes[0].seq < m.seq {
		m = r.finishes[0].mark
	}
	for _, e := range r.events {
		if e.Kind == grpcretry.CallEnd && e.seq < m.seq {
			m = e.mark
		}
	}
	return m
}

// explains reports whether the error that c returned is how the last attempt ended, or for one
// that its timeout cut, an earlier one.
func (r *run) explains(c *called, last *fakeStream) bool {
	if errors.Is(c.err, grpcretry.ErrAttemptTimeout) {
		var wrapped *grpcretry.Error
		if !errors.As(c.err, &wrapped) || errors.Is(wrapped.Last, grpcretry.ErrAttemptTimeout) {
			return r.hedge > 0 || !r.plain && r.mayTimeOut(last, c.end)
		}
	}
	for other := range r.each(oSend) {
		if errors.Is(other.err, errWrapper) && other.start.seq < c.end.seq {
			return true // SendMsg has aborted the stream
		}
	}
	for i := len(r.attempts) - 1; i >= 0; i-- {
		a := r.attempts[i]
		if a.started.seq > c.end.seq {
			continue
		}
		switch {
		case a.createErr != nil && (errors.Is(c.err, a.createErr) || sameStatus(c.err, a.createErr)):
			return true
		case (a.script.ownRecv > 0 || a.script.ownSend > 0) && errors.Is(c.err, errWrapper):
			return true
		case a.script.garbled > 0 && sameStatus(c.err, errGarbled):
			return true
		case r.refusedLarge() && sameStatus(c.err, errTooLarge):
			return true
		case a.script.vanishes && a.done.happened() && a.done.seq < c.end.seq && codeOf(c.err) != codes.OK:
			return true // there is no status to compare with
		case hasMessage(c.err, cardinality) && !r.kind.server() && a.done.happened() && a.byServer && a.status.Code() == codes.OK &&
			len(a.arrived) != 1:
			return true
		case hasMessage(c.err, cardinality) && !r.kind.server() && len(a.arrived) > 1:
			return true
		case a.done.happened() && a.done.seq < c.end.seq && a.byServer && a.status.Code() != codes.OK && sameStatus(c.err, a.status.Err()):
			return true
		}
		if r.hedge == 0 && !r.mayTimeOut(a, c.end) {
			return false
		}
	}
	return false
}

// refusedLarge reports whether the application has sent a message that is too large.
func (r *run) refusedLarge() bool {
	return slices.ContainsFunc(r.calls, func(c *called) bool { return c.tooLarge })
}

func sameStatus(got, want error) bool {
	return status.Code(got) == status.Code(want) && status.Convert(got).Message() == status.Convert(want).Message()
}

// mayTimeOut reports whether the attempt timeout may have ended a by m: neither a message nor
// the end had arrived before it.
func (r *run) mayTimeOut(a *fakeStream, m mark) bool {
	if r.timeout == 0 || r.knowsPolicy(r.timeout) || m.at < a.started.at+r.timeout {
		return false
	}
	limit := a.started.at + r.timeout - slack
	// The response of a client stream is not complete without its status.
	if r.kind.server() && len(a.arrived) > 0 && a.arrived[0].at < limit {
		return false
	}
	return !(a.done.happened() && a.byServer && a.done.at < limit)
}

// knowsPolicy reports whether the channel had left the method to gRPC before d; an attempt timeout
// may come before that.
func (r *run) knowsPolicy(d time.Duration) bool {
	return r.left && r.resolved.happened() && (d == 0 || r.resolved.at+slack < d)
}

// judgeEOF: the stream ended well, and nothing is lost.
func (r *run) judgeEOF(c *called, last *fakeStream, received int) {
	if !r.kind.server() {
		if received == 0 && !(r.plain && last.script.vanishes) {
			r.find("clean EOF", "RecvMsg of a client stream returned io.EOF without a response")
		}
		return
	}
	from := r.source(c.end)
	if from == nil && r.hedge == 0 {
		from = last
	}
	for _, a := range r.attempts {
		if (from == nil || from == a) && a.done.happened() && a.done.seq < c.end.seq && a.byServer && a.status.Code() == codes.OK &&
			len(a.arrived) == received {
			r.judgeComplete(a)
			return
		}
	}
	r.find("lost", "RecvMsg returned io.EOF after %d messages, which no attempt has ended with", received)
}

// judgeComplete: an attempt that succeeded and saw the half-close has seen every message.
func (r *run) judgeComplete(a *fakeStream) {
	for c := range r.each(oSend) {
		if a.closed.happened() && c.err == nil && c.n >= len(a.accepted) {
			r.find("requests", "attempt %d succeeded without message %d", a.number, c.n)
		}
	}
}

// judgeSends: what SendMsg and CloseSend return.
func (r *run) judgeSends() {
	var refused *called
	for c := range r.each(oSend) {
		switch {
		case c.err == io.EOF && !r.kind.client():
			r.find("SendMsg EOF", "SendMsg of a server stream returned io.EOF")
		case c.err == io.EOF:
			r.judgeRefusal(c)
			refused = c
		case c.err != nil && r.refusedLarge() && sameStatus(c.err, errTooLarge):
		case c.err != nil:
			if !errors.Is(c.err, errWrapper) && !r.ctxEndedBy(c.end) {
				r.find("SendMsg error", "SendMsg returned %v", c.err)
			}
		case refused != nil && r.kind.client():
			r.find("SendMsg after EOF", "SendMsg of message %d returned nil after it had returned io.EOF", c.n)
		default:
			r.judgeVoid(c)
		}
	}
	for c := range r.each(oClose) {
		if c.err != nil {
			r.find("CloseSend error", "CloseSend returned %v", c.err)
		}
		r.judgeSwift(c)
	}
}

// judgeSwift: what never waits does not wait.
func (r *run) judgeSwift(c *called) {
	if took := c.end.at - c.start.at; took > slack && !r.plain && c.thread != callbackThread {
		r.find("slow "+c.op.String(), "%v took %v", c.op, took)
	}
}

// judgePrompt: a call that waits for something returns when it is there.
func (r *run) judgePrompt(c *called, there mark) {
	if c.op == oHeader && r.hedge > 0 || r.wrapperBreaks() {
		return // it waits for the attempt that wins, or for what gRPC will never report
	}
	if late := c.end.at - max(c.start.at, there.at); there.happened() && late > slack && c.thread != callbackThread {
		r.find("late "+c.op.String(), "%v returned %v after what it waits for was there", c.op, late)
	}
}

// judgeRefusal: io.EOF says that the stream has ended; then no attempt may follow.
func (r *run) judgeRefusal(c *called) {
	last := r.newest(c.end)
	if !(last.done.happened() && last.done.seq < c.end.seq) && last.createErr == nil && !r.ctxEndedBy(c.end) {
		// A wrapper's failure in a replay ends a committed call before gRPC knows about it.
		gaveUp := last.number > 1 && last.script.ownSend > 0 && last.sends >= last.script.ownSend
		if !r.ended(c.end) && !r.ending(c.end) && !gaveUp {
			r.find("SendMsg EOF", "SendMsg returned io.EOF, but attempt %d has not ended", last.number)
		}
	}
	for _, a := range r.attempts {
		if a.started.seq > c.end.seq && r.hedge == 0 {
			r.find("retry after EOF", "attempt %d started after SendMsg had returned io.EOF", a.number)
		}
	}
}

// ended reports whether the call had ended by m.
func (r *run) ended(m mark) bool {
	if len(r.finishes) > 0 && r.finishes[0].seq < m.seq {
		return true
	}
	for c := range r.each(oRecv) {
		if c.end.seq < m.seq && c.err != nil {
			return true
		}
	}
	for c := range r.each(oSend) {
		if c.end.seq <= m.seq && c.err != nil && c.err != io.EOF {
			return true
		}
	}
	return false
}

// ending reports whether RecvMsg was returning the end at m, on another goroutine.
func (r *run) ending(m mark) bool {
	for c := range r.each(oRecv) {
		if c.err != nil && c.start.seq < m.seq && c.end.at <= m.at+slack {
			return true
		}
	}
	return false
}

// judgeVoid: SendMsg does not accept messages for a stream that is dead and that nobody
// replaces.
func (r *run) judgeVoid(c *called) {
	a := r.newest(c.start)
	if !r.kind.client() || r.hedge > 0 || a == nil || !a.done.happened() || a.done.seq > c.start.seq || r.newest(c.end) != a {
		return
	}
	if a.number > 1 && c.start.at <= a.done.at+slack {
		return // the interceptor may still be replaying
	}
	if r.ctxEndedBy(c.end) && !(len(r.finishes) > 0 && r.finishes[0].seq < c.start.seq) {
		return // another goroutine is about to report that the caller has gone
	}
	if r.cut(a) || r.timeout > 0 && isContextCode(codeOf(a.finishErr)) {
		return // gRPC's goroutine, which reports that, may be replacing the attempt
	}
	if r.timeout > 0 && r.newest(mark{seq: math.MaxInt}) != a {
		return // the timer's goroutine may be replacing it, and the message is kept for that
	}
	for _, other := range r.calls {
		during := other.start.seq < c.end.seq && (!other.end.happened() || other.end.seq > c.start.seq)
		if other != c && during && other.op != oTrailer && other.op != oContext {
			return // another goroutine may find out, and replace the attempt
		}
	}
	again := slices.ContainsFunc(r.calls, func(other *called) bool {
		return other.op == oSend && other.start.seq > a.done.seq && other.start.seq < c.start.seq
	})
	if a.number > 1 && (!again || c.start.at-a.done.at < slack) {
		return // the message waits behind those that are being sent again
	}
	r.find("void", "SendMsg of message %d returned nil, although attempt %d had ended and nothing follows", c.n, a.number)
}

// judgeHeaders: Header returns the headers that have arrived; nil says that there are none, and
// that the stream has ended.
func (r *run) judgeHeaders() {
	for c := range r.each(oHeader) {
		if c.err != nil {
			r.find("Header error", "Header returned %v", c.err)
			continue
		}
		from := r.source(mark{seq: math.MaxInt})
		if c.md != nil {
			number, _ := strconv.Atoi(strings.Join(c.md["from"], ","))
			if number < 1 || number > len(r.attempts) || !r.attempts[number-1].headed.happened() {
				r.find("Header", "Header returned %v, which no server has sent", shown(c.md))
				continue
			}
			a := r.attempts[number-1]
			if !(a.done.happened() && a.done.seq < c.end.seq) { // else another attempt's are waited for
				r.judgePrompt(c, a.headed)
			}
			if from != nil && from != a {
				r.find("Header", "Header returned those of attempt %d, the messages are of attempt %d", number, from.number)
			}
			if f := r.outcome(); f != nil && from == nil {
				if result := r.result(f); result != nil && result != a {
					r.find("Header", "Header returned those of attempt %d, the result is that of attempt %d", number, result.number)
				}
			} else if newest := r.newest(mark{seq: math.MaxInt}); r.hedge == 0 && newest != a {
				r.find("Header", "Header returned those of attempt %d, attempt %d followed", number, newest.number)
			}
			continue
		}
		last := r.newest(c.end)
		over := false
		if f := r.outcome(); f != nil && (c.thread == callbackThread || f.end.seq < c.end.seq) {
			last, over = r.result(f), true
		}
		switch {
		case r.hedge > 0 && from == nil && (!over || last == nil): // any of the attempts may have been decisive
		case from != nil && from.headed.seq < c.start.seq:
			r.find("Header nil", "Header returned nil, but those of attempt %d had arrived", from.number)
		case from != nil && !r.ctxEndedBy(c.end):
			r.find("Header nil", "Header returned nil, but messages followed")
		case r.hedge > 0 && !over:
		case last.headed.happened() && last.headed.seq < c.start.seq && !r.cut(last) && last.createErr == nil:
			r.find("Header nil", "Header returned nil, but those of attempt %d had arrived", last.number)
		case !r.ctxEndedBy(c.end) && last.createErr == nil && !(last.done.happened() && last.done.seq < c.end.seq) && !r.ended(c.end):
			r.find("Header nil", "Header returned nil, but attempt %d has not ended", last.number)
		case !over && !r.ctxEndedBy(c.end) && r.newest(mark{seq: math.MaxInt}) != last:
			r.find("Header nil", "Header returned nil, but attempt %d followed", last.number+1)
		}
	}
}

// cut reports whether the attempt timeout may have ended a.
func (r *run) cut(a *fakeStream) bool {
	return r.timeout > 0 && a.done.happened() && !a.byServer && a.done.at >= a.started.at+r.timeout
}

// judgeContexts: Context returns the stream's, without a wait.
func (r *run) judgeContexts() {
	for c := range r.each(oContext) {
		if c.ctx == nil || c.ctx.Value(runKey{}) != r {
			r.find("Context", "Context returned %v, which is not derived from the caller's", c.ctx)
		}
		r.judgeSwift(c)
		r.judgeBound(c)
	}
}

// judgeBound: a call of Context or Trailer commits the stream.
func (r *run) judgeBound(c *called) {
	if r.hedge > 0 || c.thread == callbackThread {
		return
	}
	before := r.newest(c.start)
	ended := before.done.happened() && (before.done.seq < c.end.seq || !before.byServer && before.done.at <= c.end.at+slack)
	given := before.finished.happened() && before.finished.at <= c.end.at+slack && isContextCode(status.Code(before.finishErr))
	if ended || given || before.createErr != nil {
		return // it may be during a recovery, or at the instant of the attempt timeout
	}
	for _, a := range r.attempts {
		if a.started.seq > c.end.seq && a.started.at-r.backoff <= c.end.at+slack {
			return // it was decided on at the same instant
		}
		if a.started.seq > c.end.seq {
			r.find("retry after commit", "attempt %d started although %v had committed the stream to attempt %d", a.number, c.op,
				before.number)
			return
		}
	}
}

// judgeTrailers: Trailer returns that of the attempt whose status RecvMsg has returned.
func (r *run) judgeTrailers() {
	f := r.final()
	for c := range r.each(oTrailer) {
		r.judgeSwift(c)
		if f == nil || c.start.seq < f.end.seq {
			r.judgeBound(c)
			if c.md != nil && !r.isTrailer(c.md, c.end) {
				r.find("Trailer", "Trailer returned %v, which no server has sent", shown(c.md))
			}
			continue
		}
		a := r.result(f)
		if a == nil {
			continue
		}
		if a.done.happened() && a.done.seq > c.start.seq {
			continue // RecvMsg has failed by itself, and gRPC's stream went on
		}
		var want metadata.MD
		if a.done.happened() {
			want = a.trailer
		}
		if !sameMD(c.md, want) && !r.wrapperFails() {
			r.find("Trailer", "Trailer returned %v, want %v of attempt %d", shown(c.md), shown(want), a.number)
		}
	}
}

func (r *run) isTrailer(md metadata.MD, m mark) bool {
	for _, a := range r.attempts {
		if a.done.happened() && a.done.seq < m.seq && sameMD(a.trailer, md) {
			return true
		}
	}
	return false
}

func sameMD(a, b metadata.MD) bool {
	return maps.EqualFunc(a, b, slices.Equal[[]string])
}

// seenHeader is the header of an attempt as the application sees it (gRFC A6
// #exposed-retry-metadata).
func (r *run) seenHeader(a *fakeStream) metadata.MD {
	md := a.header()
	if md == nil || a.number == 1 || a.previous == "" {
		return md
	}
	md = md.Copy()
	md.Set("grpc-previous-rpc-attempts", a.previous)
	return md
}

// shown is metadata in full: as a metadata.MD it would be redacted.
func shown(md metadata.MD) string { return fmt.Sprint(map[string][]string(md)) }

// judgeTargets: grpc.Header, grpc.Trailer and grpc.Peer report the attempt whose result is
// returned.
func (r *run) judgeTargets() {
	f := r.final()
	if !r.targets || f == nil || len(r.finishes) == 0 {
		return
	}
	a := r.result(f)
	if a == nil || !a.created.happened() || a.createErr != nil || r.stalled {
		return
	}
	if errors.Is(f.err, errWrapper) || hasMessage(f.err, cardinality) {
		return
	}
	if r.ctxEndedBy(f.end) && !r.seenBy(f.end) {
		return // the result is no attempt's
	}
	if got := r.peer.Addr; (got == nil || got.String() != a.addr()) && !(got == nil && r.cut(a)) {
		r.find("peer", "grpc.Peer reports %v, want %v", got, a.addr())
	}
	if r.ctxEndedBy(f.end) || r.cut(a) {
		return
	}
	var want metadata.MD
	if a.headed.happened() {
		want = r.seenHeader(a)
	}
	if !sameMD(r.header, want) {
		r.find("target", "grpc.Header reports %v, want %v", shown(r.header), shown(want))
	}
	if !sameMD(r.trailer, a.trailer) {
		r.find("target", "grpc.Trailer reports %v, want %v", shown(r.trailer), shown(a.trailer))
	}
}

var retryable = []codes.Code{codes.Unavailable, codes.ResourceExhausted}

// judgeRetry: the attempt before must have failed, in a way that may be retried, and after the
// wait that its server has asked for.
func (r *run) judgeRetry(before, after *fakeStream) {
	switch {
	case before.createErr != nil:
		if !slices.Contains(retryable, codeOf(before.createErr)) && !r.mayTimeOut(before, after.started) {
			r.find("retry", "attempt %d followed one that failed with %v", after.number, before.createErr)
		}
	case before.done.happened() && before.done.seq < after.started.seq && before.byServer:
		st := before.status
		if before.script.vanishes && st.Code() == codes.OK {
			break
		}
		if !slices.Contains(retryable, st.Code()) && !r.mayTimeOut(before, after.started) {
			r.find("retry", "attempt %d followed one that ended with %v", after.number, st.Code())
		}
		if len(before.script.pushback) > 0 {
			ms, err := strconv.Atoi(before.script.pushback[0])
			if err != nil || ms < 0 || len(before.script.pushback) > 1 {
				r.find("do not retry", "attempt %d followed one whose server said %q", after.number, before.script.pushback)
			} else if after.started.at < before.done.at+time.Duration(ms)*time.Millisecond {
				r.find("pushback", "attempt %d came %v after the end of one whose server said %q", after.number,
					after.started.at-before.done.at, before.script.pushback)
			}
		}
	case !r.mayTimeOut(before, after.started):
		r.find("retry", "attempt %d started, although attempt %d had not failed", after.number, before.number)
	}
	if after.olderOpen > 0 {
		r.find("attempt left open", "attempt %d was open when attempt %d started", after.olderOpen, after.number)
	}
	if r.seenBy(after.started) {
		r.find("retry after commit", "attempt %d started after the application had seen a message or headers", after.number)
	}
}

// judgeRetried: a failure that can be retried is, unless something forbids it; and the reason
// given is true.
func (r *run) judgeRetried() {
	c := r.final()
	if r.openErr != nil {
		c = &called{op: oRecv, start: mark{1, 0}, end: r.opened, err: r.openErr}
	}
	if r.left && !r.knowsPolicy(r.timeout) {
		return
	}
	if r.left {
		var wrapped *grpcretry.Error
		if len(r.attempts) > 1 || c != nil && errors.As(c.err, &wrapped) && !r.ctxEndedBy(c.end) {
			r.find("left to gRPC", "a method that is left to gRPC has %d attempts, and %v", len(r.attempts), r.final())
		}
		return
	}
	if c == nil || c.err == nil || c.err == io.EOF || r.hedge > 0 || r.ctxEndedBy(c.end) {
		return
	}
	last := r.newest(c.end)
	stop := false
	if p := last.script.pushback; len(p) > 0 && last.byServer {
		ms, err := strconv.Atoi(p[0])
		stop = err != nil || ms < 0 || len(p) > 1
	}
	full := len(r.attempts) >= r.program.attempts
	var wrapped *grpcretry.Error
	if errors.As(c.err, &wrapped) {
		if n := len(wrapped.Attempts); n != len(r.attempts) {
			r.find("reason", "the error has %d attempts, %d were made: %v", n, len(r.attempts), c.err)
		}
		ok := true
		switch {
		case errors.Is(wrapped.Reason, grpcretry.ErrAttemptsExhausted):
			ok = full
		case errors.Is(wrapped.Reason, grpcretry.ErrBudgetExhausted):
			ok = r.refused > 0
		case errors.Is(wrapped.Reason, grpcretry.ErrPushback):
			ok = stop
		case errors.Is(wrapped.Reason, grpcretry.ErrDeadline):
			ok = r.deadline > 0
		case errors.Is(wrapped.Reason, grpcretry.ErrNotRetryable):
			ok = !slices.Contains(retryable, codeOf(c.err)) || r.refusedLarge()
		case errors.Is(wrapped.Reason, grpcretry.ErrCommitted), errors.Is(wrapped.Reason, grpcretry.ErrMaxElapsed):
			ok = false
		}
		if !ok {
			r.find("reason", "the reason is not true: %v", c.err)
		}
		return
	}
	if !slices.Contains(retryable, codeOf(c.err)) || r.refusedLarge() || stop || full || r.seenBy(c.end) ||
		r.limit < 1<<20 {
		return
	}
	for _, other := range r.calls {
		if other.start.seq > c.end.seq {
			continue
		}
		if other.op == oContext || other.op == oTrailer || other.op == oHeader && other.md != nil ||
			other.op == oSend && other.err == io.EOF {
			return // it has committed the stream
		}
	}
	r.find("not retried", "RecvMsg returned %v after %d of %d attempts", c.err, len(r.attempts), r.program.attempts)
}

// judgeHedged: a server stream whose method is hedged is, as soon as its request is known; its
// only message half-closes it.
func (r *run) judgeHedged() {
	if r.hedge == 0 || r.left || r.grants >= 0 || len(r.attempts) != 1 || r.limit < 1<<20 || r.deadline > 0 && r.deadline < time.Hour {
		return
	}
	a := r.attempts[0]
	var sent, c *called // the first SendMsg, and the first RecvMsg
	for _, other := range r.calls {
		if other.op == oSend && sent == nil {
			sent = other
		}
		if other.op == oRecv && c == nil {
			c = other
		}
	}
	if c == nil || !c.end.happened() || a.createErr != nil || sent == nil || sent.err != nil ||
		!sent.end.happened() || sent.end.seq > c.start.seq {
		return
	}
	due := c.start.at + r.hedgeDelay + slack
	if r.timeout > 0 && due >= r.timeout { // since the first attempt, which starts at 0
		return // a retry that replaces it is due first, after its backoff
	}
	for _, other := range r.calls {
		if (other.op == oHeader || other.op == oContext || other.op == oTrailer) && other.start.at <= due {
			return // it may have committed the stream
		}
	}
	if c.end.at <= due || r.ctxEndAt() <= due || len(a.arrived) > 0 && a.arrived[0].at <= due || a.done.happened() && a.done.at <= due {
		return
	}
	r.find("not hedged", "RecvMsg waited for %v without a hedge", c.end.at-c.start.at)
}

// timeline is what happened, in order. It needs mu.
func (r *run) timeline() string {
	type line struct {
		mark
		text string
	}
	var lines []line
	add := func(m mark, format string, args ...any) {
		if m.happened() {
			lines = append(lines, line{m, fmt.Sprintf(format, args...)})
		}
	}
	for _, a := range r.attempts {
		n := a.number
		add(a.started, "  attempt %d: starts", n)
		if a.createErr != nil {
			add(a.created, "  attempt %d: the creation fails with %v", n, a.createErr)
		}
		add(a.headed, "  attempt %d: headers arrive", n)
		for i, m := range a.arrived {
			add(m, "  attempt %d: message %d arrives", n, i)
		}
		add(a.closed, "  attempt %d: half-close", n)
		if a.done.happened() {
			add(a.done, "  attempt %d: ends, by server %v, %v %q, trailer %v; it was sent %q, %d messages were read", n,
				a.byServer, a.status.Code(), a.status.Message(), shown(a.trailer), a.accepted, a.read)
		}
		add(a.finished, "  attempt %d: gRPC sets finished, with %v", n, a.finishErr)
	}
	for i, c := range r.calls {
		name := fmt.Sprintf("goroutine %d: %v (call %d)", c.thread, c.op, i)
		if c.thread == callbackThread {
			name = fmt.Sprintf("callback: %v (call %d)", c.op, i)
		}
		if c.op == oSend {
			name += fmt.Sprintf(" message %d", c.n)
		}
		add(c.start, "%s", name)
		result := fmt.Sprint(c.err)
		switch c.op {
		case oRecv:
			result = fmt.Sprintf("%q, %v", c.text, c.err)
		case oHeader, oTrailer:
			result = fmt.Sprintf("%v, %v", shown(c.md), c.err)
		case oContext:
			result = "a context"
		}
		if c.end.seq != c.start.seq+1 {
			result = name + " = " + result
		} else {
			result = "   = " + result
		}
		add(c.end, "%s", result)
	}
	for _, e := range r.events {
		add(e.mark, "    event %v of attempt %d: err %v, retry %v, wait %v, reason %v", e.Kind, e.Attempt.Number,
			errors.Join(e.Attempt.Err, e.Err), e.Reason == nil, e.Wait, e.Reason)
	}
	for _, f := range r.finishes {
		add(f.mark, "    OnFinish(%v)", f.err)
	}
	add(r.opened, "goroutine 0: the stream is open, error %v", r.openErr)
	add(r.ctxEnd, "the context is cancelled")
	add(r.appDone, "the application is done")
	add(r.cleaned, "the context is cancelled by the test")
	for _, f := range r.findings {
		lines = append(lines, line{mark{f.seq, 0}, ""})
	}
	slices.SortStableFunc(lines, func(a, b line) int { return a.seq - b.seq })
	var b strings.Builder
	for _, l := range lines {
		if l.text != "" {
			fmt.Fprintf(&b, "%12v %4d %s\n", l.at, l.seq, l.text)
		}
	}
	fmt.Fprintf(&b, "budget: %d withdrawn, %d refused, %d returned, deposits %v, of hedges %v\n", r.withdrawn, r.refused, r.returned,
		r.deposits, r.hedges.deposits)
	for _, f := range r.findings {
		fmt.Fprintf(&b, "FINDING %s: %s\n", f.kind, f.text)
	}
	return b.String()
}
