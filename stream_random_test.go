package grpcretry

import (
	"context"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

var (
	randomSequences = flag.Int("streams.sequences", 200, "how many sequences TestStreamsAtRandom draws")
	randomSeed      = flag.Uint64("streams.seed", 0, "the first seed of TestStreamsAtRandom, 0 for one drawn from the clock")
)

// TestStreamsAtRandom draws what a server does in each attempt (receive, send, headers,
// waits, failures, pushback) and what an application does (send, receive, headers, waits,
// cancel), on one or two goroutines, and checks that
//
//   - each attempt saw the messages that were sent, from the first on and in order, and
//     the one that answered saw all of them;
//   - the application saw the messages of one attempt, none twice and none missing;
//   - there were no more attempts than allowed;
//   - OnFinish ran once and CallEnd came once, each attempt that began ended once and the
//     budget heard of it, and each failure had one Decision.
//
// That nothing is left behind, and nothing hangs, the bubble sees to. Goroutines still run
// in any order, so a seed gives the same sequence but not always the same outcome.
func TestStreamsAtRandom(t *testing.T) {
	seed := *randomSeed
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	t.Logf("seeds %d to %d", seed, seed+uint64(*randomSequences)-1)
	const perBubble = 50
	for done := 0; done < *randomSequences && !t.Failed(); done += perBubble {
		bubble(t, func(t *testing.T) {
			r := &randomStreams{attempts: map[string][]*randomAttempt{}}
			server := serveStreams(t, func(_ int, stream grpc.ServerStream) error { return r.serve(stream) })
			cc := server.conn(t, DialOptions(WithObserver(r.observe))...)
			for i := range min(perBubble, *randomSequences-done) {
				seed := seed + uint64(done+i)
				if trouble := r.run(t, cc, seed); trouble != "" {
					t.Fatalf("seed %d: %s\n-streams.seed=%d -streams.sequences=1 draws it again", seed, trouble, seed)
				}
			}
		})
	}
}

// randomStreams is the server of all sequences of a bubble.
type randomStreams struct {
	mu       sync.Mutex
	attempts map[string][]*randomAttempt // by seed, in order

	// Of the sequence under way: events by kind, and decisions that were due.
	events  map[EventKind]int
	failed  int
	retried int
}

func (r *randomStreams) observe(_ context.Context, e Event) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.events == nil {
		r.events = map[EventKind]int{}
	}
	r.events[e.Kind]++
	if e.Kind == AttemptEnd && e.Attempt.Err != nil {
		r.failed++
	}
	if e.Kind == Decision && e.Reason == nil {
		r.retried++
	}
}

// account says what is wrong with the events and with what the budget heard.
func (r *randomStreams) account(budget *aBudget) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	budget.mu.Lock()
	defer budget.mu.Unlock()
	events, failed, retried := r.events, r.failed, r.retried
	r.events, r.failed, r.retried = nil, 0, 0
	switch {
	case events[CallEnd] != 1 || events[AttemptStart] != events[AttemptEnd] || events[Decision] != failed:
		return fmt.Sprintf("events by kind are %v, with %d failures", events, failed)
	case len(budget.heard) != events[AttemptEnd]:
		return fmt.Sprintf("the budget heard of %d attempts, there were %d", len(budget.heard), events[AttemptEnd])
	// an overdue attempt may end by itself after all
	case len(budget.asked) < retried || len(budget.asked) != events[AttemptStart]-1+budget.refunded:
		return fmt.Sprintf("the budget gave %d retries and got %d back for %d decisions and %d attempts",
			len(budget.asked), budget.refunded, retried, events[AttemptStart])
	}
	return ""
}

// A randomAttempt is what the server did and saw in one attempt.
type randomAttempt struct {
	mu       sync.Mutex
	received []string
	all      bool // up to and including the end
	sent     int
	answered bool // with OK
}

// The server's steps are drawn from the seed and the number of the attempt.
func (r *randomStreams) serve(stream grpc.ServerStream) error {
	md, _ := metadata.FromIncomingContext(stream.Context())
	id, kind := first(md.Get("seed")), first(md.Get("kind"))
	a := &randomAttempt{}
	r.mu.Lock()
	r.attempts[id] = append(r.attempts[id], a)
	number := len(r.attempts[id])
	r.mu.Unlock()

	seed, _ := strconv.ParseUint(id, 10, 64)
	draw := rand.New(rand.NewPCG(seed, uint64(number)))
	for range draw.IntN(8) {
		switch draw.IntN(8) {
		case 0, 1, 2:
			if !a.all {
				if err := a.receive(stream); err != nil {
					return err
				}
			}
		case 3:
			if kind != clientStream.StreamName {
				if err := a.send(stream, number); err != nil {
					return err
				}
			}
		case 4:
			stream.SendHeader(metadata.Pairs("k", "v"))
		case 5:
			time.Sleep(time.Duration(draw.IntN(3000)) * time.Millisecond)
		default:
			if draw.IntN(2) == 0 {
				continue
			}
			if draw.IntN(4) == 0 {
				stream.SetTrailer(metadata.Pairs(pushbackKey, strconv.Itoa(draw.IntN(2000)-100)))
			}
			return status.Error([]codes.Code{codes.Unavailable, codes.Unavailable, codes.ResourceExhausted,
				codes.Internal}[draw.IntN(4)], "drawn")
		}
	}
	for !a.all && draw.IntN(10) > 0 { // a server may answer without having read everything
		if err := a.receive(stream); err != nil {
			return err
		}
	}
	more := draw.IntN(4)
	if kind == clientStream.StreamName {
		more = 1
	}
	for range more {
		if err := a.send(stream, number); err != nil {
			return err
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.answered = true
	return nil
}

func (a *randomAttempt) receive(stream grpc.ServerStream) error {
	var m echov1.EchoRequest
	err := stream.RecvMsg(&m)
	a.mu.Lock()
	defer a.mu.Unlock()
	if err == io.EOF {
		a.all = true
		return nil
	}
	if err == nil {
		a.received = append(a.received, m.GetMessage())
	}
	return err
}

func (a *randomAttempt) send(stream grpc.ServerStream, number int) error {
	a.mu.Lock()
	text := fmt.Sprintf("%d/%d", number, a.sent)
	a.sent++
	a.mu.Unlock()
	return stream.SendMsg(&echov1.EchoResponse{Message: text})
}

// run plays the application of one sequence and says what is wrong.
func (r *randomStreams) run(t *testing.T, cc *grpc.ClientConn, seed uint64) string {
	draw := rand.New(rand.NewPCG(seed, 0))
	kind := []*grpc.StreamDesc{serverStream, clientStream, bidiStream, bidiStream}[draw.IntN(4)]
	attempts := 2 + draw.IntN(3)
	opts := []grpc.CallOption{WithMaxAttempts(attempts), WithBufferLimit([]int{120, 300, 1 << 20}[draw.IntN(3)]),
		WithBackoff(Constant(time.Duration(draw.IntN(1000)) * time.Millisecond)), WithCommitOnHeaders(draw.IntN(4) == 0)}
	if draw.IntN(3) == 0 {
		opts = append(opts, WithAttemptTimeout(time.Duration(1+draw.IntN(4000))*time.Millisecond))
	}
	budget := &aBudget{}
	opts = append(opts, WithBudget(budget))
	finished := make(chan error, 10)
	opts = append(opts, grpc.OnFinish(func(err error) { finished <- err }))

	// Without this a sequence that hangs would go on to the end of virtual time.
	defer time.AfterFunc(time.Hour, func() { panic(fmt.Sprintf("seed %d hangs", seed)) }).Stop()

	id := strconv.FormatUint(seed, 10)
	// An application may wait for headers while the server waits for its messages.
	ctx, cancel := context.WithTimeout(metadata.AppendToOutgoingContext(t.Context(), "seed", id, "kind", kind.StreamName), 5*time.Minute)
	defer cancel()
	stream, err := cc.NewStream(ctx, kind, "/random/"+kind.StreamName, opts...)
	if err != nil {
		return "NewStream: " + err.Error()
	}
	if draw.IntN(5) == 0 {
		defer time.AfterFunc(time.Duration(1+draw.IntN(5000))*time.Millisecond, cancel).Stop()
	}

	app := &randomApplication{stream: stream, kind: kind}
	sends, receives := rand.New(rand.NewPCG(seed, 1<<32)), rand.New(rand.NewPCG(seed, 2<<32))
	var group sync.WaitGroup
	if kind == bidiStream && draw.IntN(3) > 0 {
		group.Go(func() { app.send(sends) })
		app.receive(receives)
	} else {
		app.send(sends)
		app.receive(receives)
	}
	group.Wait()
	cancel()
	time.Sleep(time.Minute) // the server's attempts end

	if got := len(finished); got != 1 {
		return fmt.Sprintf("OnFinish ran %d times", got)
	}
	if trouble := r.account(budget); trouble != "" {
		return trouble
	}
	return r.check(id, app, attempts)
}

// A randomApplication is one application and what it saw.
type randomApplication struct {
	stream   grpc.ClientStream
	kind     *grpc.StreamDesc
	sent     []string
	refused  bool // SendMsg returned an error, so the last message may be missing
	received []string
	err      error // the last of RecvMsg
}

func (app *randomApplication) send(draw *rand.Rand) {
	n := draw.IntN(6)
	if !app.kind.ClientStreams {
		n = 1
	}
	for i := range n {
		if draw.IntN(4) == 0 {
			time.Sleep(time.Duration(draw.IntN(2000)) * time.Millisecond)
		}
		m := &echov1.EchoRequest{Message: strconv.Itoa(i) + strings.Repeat("x", draw.IntN(25))}
		app.sent = append(app.sent, m.GetMessage())
		if err := app.stream.SendMsg(m); err != nil {
			app.refused = true
			break
		}
		if draw.IntN(12) == 0 {
			app.stream.Header()
		}
	}
	app.stream.CloseSend()
}

func (app *randomApplication) receive(draw *rand.Rand) {
	switch draw.IntN(12) {
	case 0:
		app.stream.Header()
	case 1:
		app.stream.Context()
	case 2:
		app.stream.Trailer()
	}
	for app.err == nil {
		if draw.IntN(4) == 0 {
			time.Sleep(time.Duration(draw.IntN(2000)) * time.Millisecond)
		}
		var m echov1.EchoResponse
		if app.err = app.stream.RecvMsg(&m); app.err == nil {
			app.received = append(app.received, m.GetMessage())
			if !app.kind.ServerStreams {
				app.err = io.EOF
			}
		}
	}
}

func (r *randomStreams) check(id string, app *randomApplication, allowed int) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	attempts := r.attempts[id]
	delete(r.attempts, id)
	if len(attempts) > allowed {
		return fmt.Sprintf("%d attempts, %d were allowed", len(attempts), allowed)
	}
	for i, a := range attempts {
		a.mu.Lock()
		defer a.mu.Unlock()
		if len(a.received) > len(app.sent) || !slices.Equal(a.received, app.sent[:len(a.received)]) {
			return fmt.Sprintf("attempt %d saw %q of %q", i+1, a.received, app.sent)
		}
	}
	if app.err != io.EOF && len(app.received) == 0 {
		return ""
	}
	number := len(attempts) // it was the last that answered
	for i, text := range app.received {
		if want := fmt.Sprintf("%d/%d", number, i); text != want {
			return fmt.Sprintf("the application saw %q, want %s as number %d", app.received, want, i+1)
		}
	}
	if app.err != io.EOF {
		return ""
	}
	switch a := attempts[number-1]; {
	case !a.answered:
		return fmt.Sprintf("attempt %d did not answer, but the application saw the end", number)
	case len(app.received) != a.sent:
		return fmt.Sprintf("the application saw %q, the server sent %d", app.received, a.sent)
	case a.all && !app.refused && len(a.received) != len(app.sent):
		return fmt.Sprintf("the server that answered saw %q to their end, the application sent %q", a.received, app.sent)
	}
	return ""
}
