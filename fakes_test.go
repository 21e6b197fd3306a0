package grpcretry

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/test/bufconn"

	"github.com/grpcretry/grpcretry/internal/reasons"
	"github.com/grpcretry/grpcretry/internal/words"
)

// The fakes that tests of several subjects share: budgets, contexts, recorders of what the
// library reports, and a link that breaks.

// A tally is a budget that counts.
type tally struct {
	mu sync.Mutex
	counts
}

func (b *tally) Deposit(o Outcome) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case o.Result != Unsent:
		b.told[o.Result]++
		b.highest = max(b.highest, o.Attempt)
	case o.Attempt > 1:
		b.refunded++
	}
}

func (b *tally) Withdraw(time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.withdrawn++
	return true
}

func (b *tally) Balance(time.Time) float64 { return 1 }

type counts struct {
	withdrawn, refunded int
	told                [Ignored + 1]int
	highest             int // number of an attempt
}

// stingy is a budget that refuses every retry.
type stingy struct{ unlimited }

func (stingy) Withdraw(time.Time) bool   { return false }
func (stingy) Balance(time.Time) float64 { return 0 }

// A fickle budget shows a token, and refuses it.
type fickle struct{ stingy }

func (fickle) Balance(time.Time) float64 { return 1 }

// tokens is a budget of a few retries.
type tokens struct {
	aBudget
	left int // guarded by mu
}

func (b *tokens) Withdraw(now time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.asked = append(b.asked, now)
	if b.left == 0 {
		return false
	}
	b.left--
	return true
}

func (b *tokens) Deposit(o Outcome) {
	b.aBudget.Deposit(o)
	if o.Attempt > 1 && o.Result == Unsent {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.left++
	}
}

// A recordedDelay remembers what it was told.
type recordedDelay struct {
	HedgeDelay
	mu   sync.Mutex
	told []string
}

func (d *recordedDelay) Answered(method string, took time.Duration, lost bool, now time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	line := took.String()
	if lost {
		line += " lost"
	}
	d.told = append(d.told, line)
}

// A logRecorder keeps log lines, "LEVEL message key=value …".
type logRecorder struct {
	mu  sync.Mutex
	out []string
}

func (*logRecorder) Enabled(context.Context, slog.Level) bool { return true }
func (r *logRecorder) WithAttrs([]slog.Attr) slog.Handler     { return r }
func (r *logRecorder) WithGroup(string) slog.Handler          { return r }

func (r *logRecorder) Handle(ctx context.Context, record slog.Record) error {
	var line bytes.Buffer
	h := slog.NewTextHandler(&line, &slog.HandlerOptions{Level: slog.LevelDebug, ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey {
			return slog.Attr{}
		}
		return a
	}})
	err := h.Handle(ctx, record)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.out = append(r.out, strings.TrimSpace(line.String()))
	return err
}

func (r *logRecorder) lines() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]string(nil), r.out...)
}

func (r *logRecorder) clear() { r.mu.Lock(); r.out = nil; r.mu.Unlock() }

func wantLines(t *testing.T, logs *logRecorder, want ...string) {
	t.Helper()
	got := logs.lines()
	if len(got) != len(want) {
		t.Fatalf("logged\n%s\nwant %d lines with %q", strings.Join(got, "\n"), len(want), want)
	}
	for i := range want {
		for _, part := range strings.Split(want[i], "…") {
			if !strings.Contains(got[i], part) {
				t.Errorf("line %d is\n%s\nwant it to contain %q", i+1, got[i], part)
			}
		}
	}
	logs.clear()
}

// An eventRecorder keeps one line for each event.
type eventRecorder struct {
	start time.Time
	lines []string
	last  Event
}

func (r *eventRecorder) observe(_ context.Context, e Event) {
	r.last = e
	line := fmt.Sprintf("%v %s #%d", time.Since(r.start), e.Kind, e.Attempt.Number)
	switch e.Kind {
	case AttemptEnd:
		line += fmt.Sprintf(" %s in %v", words.Code(e.Attempt.Code()), e.Attempt.Duration)
	case Decision:
		if e.Reason == nil {
			line += fmt.Sprintf(" retry after %v by %s", e.Wait, e.WaitSource)
		} else {
			line += " stop: " + reasons.Of(e.Reason).Word
		}
	case CallEnd:
		line += fmt.Sprintf(" %s after %v", outcomeOf(e), e.Elapsed)
		if len(e.Attempts) > 0 {
			line += ", attempts"
		}
		for _, a := range e.Attempts {
			line += fmt.Sprintf(" #%d %s", a.Number, words.Code(a.Code()))
		}
	}
	r.lines = append(r.lines, line)
}

// countingContext knows how many functions wait for its end.
type countingContext struct {
	context.Context // without an end
	mu              sync.Mutex
	waiting         int
}

func (c *countingContext) number() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.waiting
}

func (c *countingContext) Done() <-chan struct{} { return make(chan struct{}) }

func (c *countingContext) AfterFunc(func()) (stop func() bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.waiting++
	stopped := false
	return func() bool {
		c.mu.Lock()
		defer c.mu.Unlock()
		if stopped {
			return false
		}
		stopped = true
		c.waiting--
		return true
	}
}

var errRefused = errors.New("connection refused")

// The tests here are of calls that wait for a connection. A link is what lies between client and
// server: it can be cut, which is what a restart of the server looks like to the client.
type link struct {
	listener *bufconn.Listener

	mu    sync.Mutex
	down  bool
	conns []net.Conn
}

func (l *link) dial(ctx context.Context, _ string) (net.Conn, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.down {
		return nil, errRefused
	}
	conn, err := l.listener.DialContext(ctx)
	if err == nil {
		l.conns = append(l.conns, conn)
	}
	return conn, err
}

// cut ends all connections, and lets none be made until mend.
func (l *link) cut() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.down = true
	for _, conn := range l.conns {
		conn.Close()
	}
	l.conns = nil
}

func (l *link) mend() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.down = false
}

// redials are gRPC's own waits between two dials, without jitter: 1 s, 1.6 s, 2.56 s, 4.096 s.
var redials = grpc.WithConnectParams(grpc.ConnectParams{
	Backoff:           backoff.Config{BaseDelay: second, Multiplier: 1.6, MaxDelay: time.Minute},
	MinConnectTimeout: second,
})

// linked dials the server over a link. The ClientConn is connected.
func (f *fixture) linked(t *testing.T, opts ...grpc.DialOption) (*link, *grpc.ClientConn) {
	t.Helper()
	l := &link{listener: f.listener}
	cc := f.conn(t, append(slices.Clip(opts), redials, grpc.WithContextDialer(l.dial))...)
	connect(t, cc)
	return l, cc
}

func connect(t *testing.T, cc *grpc.ClientConn) {
	t.Helper()
	cc.Connect()
	for state := cc.GetState(); state != connectivity.Ready; state = cc.GetState() {
		if !cc.WaitForStateChange(t.Context(), state) {
			t.Fatalf("no connection, the channel is %v", state)
		}
	}
}

// A switched delay is another one while on returns true.
type switched struct {
	on func() bool
	HedgeDelay
}

func (s switched) Delay(method string, now time.Time) (time.Duration, bool) {
	if !s.on() {
		return 0, false
	}
	return s.HedgeDelay.Delay(method, now)
}

// outcomeOf returns the outcome that a call's last event tells of.
func outcomeOf(e Event) string {
	return reasons.Outcome(e.Err, e.Reason, e.Attempt.Number, e.Attempt.Hedge)
}

func retrierOf(t testing.TB, opts ...Option) *Retrier {
	t.Helper()
	r, err := New(opts...)
	if err != nil {
		t.Fatal(err)
	}
	return r
}
