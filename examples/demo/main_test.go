package main

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
	"unicode/utf8"

	coltracepb "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	commonpb "go.opentelemetry.io/proto/otlp/common/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	"github.com/grpcretry/grpcretry"
	names "github.com/grpcretry/grpcretry/telemetry"
)

// playVirtually plays the demo in virtual time, and returns what it prints.
func playVirtually(t *testing.T, color bool) string {
	t.Helper()
	var out bytes.Buffer
	synctest.Test(t, func(t *testing.T) {
		var listener atomic.Pointer[bufconn.Listener] // of the server as it is, or as it was until it went away
		server, err := startServer(func() (net.Listener, error) {
			listener.Store(bufconn.Listen(1 << 20))
			return listener.Load(), nil
		})
		if err != nil {
			t.Fatal(err)
		}
		defer server.stop()
		client, err := dial("passthrough:///demo", nowhere(),
			grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
				return listener.Load().DialContext(ctx)
			}))
		if err != nil {
			t.Fatalf("dial: %v", err)
		}
		defer client.Close()
		if err := play(t.Context(), &picture{out: &out, color: color}, server, client, nowhere().tracer()); err != nil {
			t.Errorf("play: %v", err)
		}
	})
	return out.String()
}

func TestPlay(t *testing.T) {
	got := playVirtually(t, false)
	for _, want := range []string{wantOutage, wantDeadline, wantRestart, wantRecovery, wantTotals} {
		if !strings.Contains(got, want) {
			t.Errorf("play printed\n%s\nwant in it\n%s", got, want)
		}
	}
	if strings.Contains(got, "\x1b") {
		t.Errorf("play without colours printed an escape sequence:\n%q", got)
	}
	for line := range strings.Lines(got) {
		line = strings.TrimSuffix(line, "\n")
		if n := utf8.RuneCountInString(line); n > columns {
			t.Errorf("play printed a line of %d columns, want at most %d:\n%s", n, columns, line)
		}
		if strings.TrimRight(line, " ") != line {
			t.Errorf("play printed blanks at the end of %q", line)
		}
	}
}

func TestPlayInColor(t *testing.T) {
	got := playVirtually(t, true)
	if !strings.Contains(got, string(red)+"×") {
		t.Errorf("play in colours printed no red ×:\n%q", got)
	}
	got = regexp.MustCompile(`\x1b\[[0-9]*m`).ReplaceAllString(got, "")
	if !strings.Contains(got, wantOutage) {
		t.Errorf("play in colours printed, colours taken out,\n%s\nwant in it\n%s", got, wantOutage)
	}
}

// In virtual time every attempt starts exactly when it should.
const wantOutage = `
  get cart   ×───────×────────────────━━━●
   #1     0 ms  UNAVAILABLE         waits 60 ms (backoff)
   #2    60 ms  UNAVAILABLE         waits 120 ms (backoff)
   #3   180 ms  OK                  rescued by a retry

  get user   ×───────×────────────────×──────────────────────────────────×
   #1     0 ms  UNAVAILABLE         waits 60 ms (backoff)
   #2    60 ms  UNAVAILABLE         waits 120 ms (backoff)
   #3   180 ms  UNAVAILABLE         waits 240 ms (backoff)
   #4   420 ms  UNAVAILABLE         stop: exhausted
   the caller gets: grpcretry: gave up after 4 attempts in 420ms: no attempts
     left: rpc error: code = Unavailable desc = replica is restarting
`

const wantDeadline = `
   #1     0 ms  DEADLINE_EXCEEDED   timeout; replaced after 60 ms (backoff)
   #2   360 ms  OK                  rescued by a retry

  get user   ×
   #1     0 ms  RESOURCE_EXHAUSTED  stop: deadline; needs 5000 ms (pushback)
`

// When gRPC connects again is its own draw, and so is the place of the second attempt.
const wantRestart = `
   #1     0 ms  UNAVAILABLE         reached no server; waits for a connection
   #2  `

const wantRecovery = `
  call 6     ×──────────────────────━━━━━━━━●          waits 60 ms, OK
  call 7     ×──────────────────────━━━━━━━━●          waits 60 ms, OK
`

const wantTotals = `
                           calls attempts  server saw  retries  rescued  gave up
   1  All is well              3        3           3        0        0        0
   2  Outage                   2        7           7        5        1        1
   3  Full jitter              6       18          18       12        6        0
   4  The server says when     3        8           8        5        3        0
   5  The server says stop     2        2           2        0        0        2
   6  No cure                  2        2           2        0        0        2
   7  Deadlines                2        3           3        1        1        1
   8  The server restarts      2        4           2        2        2        0
      (2 reached no server)
   9  The budget runs out     20       23          23        3        0       20
  10  Recovery                 7        9           9        2        2        0
  ──────────────────────────────────────────────────────────────────────────────
  all                         49       79          77       30       15       26

  Amplification 1.57: for 49 calls the server saw 77 attempts.
  Of 79 attempts 2 reached no server.
  Gave up because of
    exhausted            1   grpcretry: no attempts left
    budget              20   grpcretry: client-side retry budget exhausted
    deadline             1   grpcretry: deadline too near for another attempt
    pushback             2   grpcretry: stopped by server pushback
    not_retryable        2   grpcretry: failure is not retryable
`

// rescuedCall is a result that is as it should be: one call, two attempts.
func rescuedCall() result {
	start := time.Now()
	first := grpcretry.Attempt{Number: 1, Start: start, Duration: time.Millisecond,
		Err: status.Error(codes.Unavailable, "down")}
	second := grpcretry.Attempt{Number: 2, Start: start.Add(61 * time.Millisecond), Duration: time.Millisecond,
		Wait: 60 * time.Millisecond, WaitSource: grpcretry.WaitBackoff}
	return result{
		scene:   scene{title: "test", want: tally{calls: 1, attempts: 2, rescued: 1}},
		records: []*record{{name: "call", serverSaw: 2, steps: []step{{Attempt: first}, {Attempt: second}}}},
	}
}

func TestVerifyAcceptsWhatIsExpected(t *testing.T) {
	if err := verify([]result{rescuedCall()}); err != nil {
		t.Errorf("verify = %v, want nil", err)
	}
}

// What is not as expected makes the exit status 1.
func TestVerifyNotices(t *testing.T) {
	for _, tt := range []struct {
		name  string
		spoil func(*result)
		want  string
	}{
		{"an attempt that the client did not count", func(r *result) { r.records[0].serverSaw = 3 },
			"the server saw 3 attempts, the client sent 2"},
		{"an attempt that reached a server after all", func(r *result) { r.records[0].steps[0].Unsent = true },
			"the server saw 2 attempts, the client sent 1"},
		{"a wait cut short", func(r *result) { r.records[0].steps[1].Start = r.records[0].steps[0].Start },
			"attempt 2 began 61ms too early"},
		{"a call that no observer heard of", func(r *result) { r.records[0].steps = nil },
			"no attempt was observed"},
		{"more attempts than written", func(r *result) { r.scene.want.attempts = 1 },
			"got 1 calls, 2 attempts, 1 rescued; want 1, 1, 1"},
		{"another reason to stop", func(r *result) { r.scene.want.stops = map[string]int{"budget": 1} },
			"calls given up by reason: map[], want map[budget:1]"},
		{"an error that tells another story", func(r *result) {
			r.records[0].err = &grpcretry.Error{Reason: grpcretry.ErrDeadline}
		}, "the error tells of 0 attempts, the observer of 2"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := rescuedCall()
			tt.spoil(&r)
			if err := verify([]result{r}); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("verify = %v, want %q in it", err, tt.want)
			}
		})
	}
}

// A spoilt result is still drawn, or nobody would see what went wrong.
func TestPictureOfACallWithoutAttempts(t *testing.T) {
	r := rescuedCall()
	r.records[0].steps = nil
	for _, r.scene.brief = range []bool{false, true} {
		var out bytes.Buffer
		(&picture{out: &out}).scene(r)
		if !strings.Contains(out.String(), "call") {
			t.Errorf("scene printed %q, want the call in it", out.String())
		}
	}
}

// A collector keeps the spans that it is sent.
type collector struct {
	coltracepb.UnimplementedTraceServiceServer
	refuse error

	mu    sync.Mutex
	spans []*tracepb.Span // guarded by mu
}

func (c *collector) Export(_ context.Context, req *coltracepb.ExportTraceServiceRequest) (*coltracepb.ExportTraceServiceResponse, error) {
	if c.refuse != nil {
		return nil, c.refuse
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, r := range req.GetResourceSpans() {
		for _, s := range r.GetScopeSpans() {
			c.spans = append(c.spans, s.GetSpans()...)
		}
	}
	return &coltracepb.ExportTraceServiceResponse{}, nil
}

// of returns the spans of a kind with a name, in the order of their start.
func (c *collector) of(kind tracepb.Span_SpanKind, name string) []*tracepb.Span {
	return c.where(func(s *tracepb.Span) bool { return s.GetKind() == kind && s.GetName() == name })
}

// below returns the children of a span.
func (c *collector) below(parent *tracepb.Span) []*tracepb.Span {
	return c.where(func(s *tracepb.Span) bool { return bytes.Equal(s.GetParentSpanId(), parent.GetSpanId()) })
}

func (c *collector) where(is func(*tracepb.Span) bool) (spans []*tracepb.Span) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, s := range c.spans {
		if is(s) {
			spans = append(spans, s)
		}
	}
	slices.SortFunc(spans, func(a, b *tracepb.Span) int { return cmp.Compare(a.GetStartTimeUnixNano(), b.GetStartTimeUnixNano()) })
	return spans
}

// collect starts a collector and points the environment to it.
func collect(t *testing.T, refuse error) *collector {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	c, s := &collector{refuse: refuse}, grpc.NewServer()
	coltracepb.RegisterTraceServiceServer(s, c)
	served := make(chan error, 1)
	go func() { served <- s.Serve(listener) }()
	t.Cleanup(func() {
		s.Stop()
		if err := <-served; err != nil {
			t.Errorf("Serve: %v", err)
		}
	})
	t.Setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "")
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://"+listener.Addr().String())
	return c
}

// The whole program, in real time and over the loopback interface.
func TestRunSendsTraces(t *testing.T) {
	c := collect(t, nil)
	var out bytes.Buffer
	if err := run(t.Context(), &out, false, ""); err != nil {
		t.Fatalf("run: %v\n%s", err, out.String())
	}
	const echo = "grpcretry.test.v1.EchoService/Echo"
	roots := c.of(tracepb.Span_SPAN_KIND_INTERNAL, "scene 2: Outage")
	calls := c.of(tracepb.Span_SPAN_KIND_INTERNAL, echo)
	if len(roots) != 1 || len(calls) != 49 {
		t.Fatalf("the collector got %d spans of scene 2 and %d of calls, want 1 and 49", len(roots), len(calls))
	}
	below := map[string]int{}
	for _, call := range calls {
		var want []string
		for i, decision := range strings.Fields(decisions(call)) {
			name := echo
			if i > 0 {
				name = fmt.Sprintf("attempt %d %s", i+1, echo)
			}
			if want = append(want, name); decision == "retry" && !replaced(call) {
				want = append(want, names.SpanWait)
			}
		}
		var got []string
		for _, s := range c.below(call) {
			got = append(got, s.GetName())
			below[s.GetKind().String()]++
		}
		if !slices.Equal(got, want) {
			t.Errorf("a call with the decisions %s has below it the spans %q, want %q", decisions(call), got, want)
		}
	}
	// In the scene in which the budget runs out, calls learn from one another whether they wait.
	waits := below["SPAN_KIND_INTERNAL"]
	if below["SPAN_KIND_CLIENT"] != 79 || waits < 40 || waits > 49 {
		t.Errorf("below the calls are spans of the kinds %v, want 79 attempts and 40 to 49 waits", below)
	}
	requests := c.of(tracepb.Span_SPAN_KIND_SERVER, echo)
	for _, request := range requests {
		if of := c.where(func(s *tracepb.Span) bool { return bytes.Equal(s.GetSpanId(), request.GetParentSpanId()) }); len(of) != 1 ||
			of[0].GetKind() != tracepb.Span_SPAN_KIND_CLIENT {
			t.Errorf("a request is below %v, want an attempt", of)
		}
	}
	if want := fmt.Sprintf("Sent %d spans to http://", 10+49+79+waits+77); len(requests) != 77 || !strings.Contains(out.String(), want) {
		t.Errorf("the server has %d requests, want 77; run printed\n%s\nwant in it %q", len(requests), out.String(), want)
	}
	got := map[string]bool{}
	for _, call := range c.below(roots[0]) {
		got[decisions(call)] = true
	}
	if len(got) != 2 || !got["retry retry success"] || !got["retry retry retry stop"] {
		t.Errorf("the calls of scene 2 have the decisions %v, want retry retry success, and retry retry retry stop", got)
	}
}

// decisions are those of the attempts on the span of a call, in order.
// replaced reports whether an attempt of the call has run until another one replaced it, so that there was no wait.
func replaced(call *tracepb.Span) bool {
	return slices.ContainsFunc(call.GetEvents(), func(e *tracepb.Span_Event) bool {
		return slices.ContainsFunc(e.GetAttributes(), func(a *commonpb.KeyValue) bool {
			return strings.HasPrefix(a.GetValue().GetStringValue(), "attempt timeout")
		})
	})
}

func decisions(call *tracepb.Span) string {
	var all []string
	for _, e := range call.GetEvents() {
		for _, a := range e.GetAttributes() {
			if e.GetName() == names.SpanEventAttempt && a.GetKey() == names.AttrDecision {
				all = append(all, a.GetValue().GetStringValue())
			}
		}
	}
	return strings.Join(all, " ")
}

func TestTracesThatAreRefusedAreReported(t *testing.T) {
	collect(t, status.Error(codes.PermissionDenied, "no"))
	traces, err := newTelemetry(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	_, span := traces.tracer().Start(t.Context(), "test")
	span.End()
	var out bytes.Buffer
	if err := traces.finish(t.Context(), &out); err == nil || out.Len() > 0 {
		t.Errorf("finish = %v and printed %q, want an error and nothing", err, out.String())
	}
}

func TestWithoutCollectorSaysHow(t *testing.T) {
	t.Setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "")
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "")
	traces, err := newTelemetry(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := traces.finish(t.Context(), &out); err != nil || !strings.Contains(out.String(), "OTEL_EXPORTER_OTLP_ENDPOINT=") {
		t.Errorf("finish = %v and printed %q, want nil and how to send traces", err, out.String())
	}
}

func TestRunInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := run(ctx, &bytes.Buffer{}, false, ""); !errors.Is(err, context.Canceled) {
		t.Errorf("run = %v, want %v", err, context.Canceled)
	}
}
