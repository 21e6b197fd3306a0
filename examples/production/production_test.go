package production

import (
	"encoding/hex"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry/examples/production/client"
	"github.com/grpcretry/grpcretry/examples/production/server"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
	"github.com/grpcretry/grpcretry/telemetry"
)

// The second request that the server receives fails, and its retry succeeds.
func TestARetryIsSeenEverywhere(t *testing.T) {
	collector := startCollector(t)
	srv := startServer(t, anyPort, 100, server.Faults{FailEvery: 2})
	cli := startClient(t, srv.public, "", nil)
	for range 2 {
		if got := want(t, http.StatusOK, "PUT", "http://"+cli.public+"/value?message=hello"); got != "0 hello\n" {
			t.Errorf("PUT /value returned %q", got)
		}
	}

	const put = `rpc_method="grpcretry.test.v1.EchoService/Put"`
	for _, m := range []struct {
		where  *program
		name   string
		labels []string
		want   float64
	}{
		{cli, "grpcretry_calls_total", []string{put, `grpcretry_outcome="first_try"`}, 1},
		{cli, "grpcretry_calls_total", []string{put, `grpcretry_outcome="recovered"`}, 1},
		{cli, "grpcretry_attempts_total", []string{put}, 3},
		{srv, "grpcretry_server_retries_total", []string{put, `grpcretry_retried_by="caller"`}, 1},
	} {
		if got := m.where.metric(t, m.name, m.labels...); got != m.want {
			t.Errorf("/metrics: %s%v = %v, want %v", m.name, m.labels, got, m.want)
		}
	}

	calls := cli.page(t).Calls
	if len(calls) != 1 || calls[0].Made != 2 || calls[0].Attempts[0].Code != "UNAVAILABLE" || calls[0].Attempts[1].Code != "OK" {
		t.Errorf("the page shows the calls %+v, want one of two attempts", calls)
	}

	// What the programs record last is sent when they stop.
	cli.stop()
	srv.stop()
	trace := collector.traceOf(t, telemetry.AttrAttemptNumber, 2)
	for _, problem := range wrongSpans(trace) {
		t.Errorf("the trace of the retried call: %s", problem)
	}
	for _, name := range []string{telemetry.MetricCalls, telemetry.MetricServerRetries, "rpc.server.call.duration"} {
		if !collector.metrics[name] {
			t.Errorf("the collector did not receive the metric %s, but %v", name, slices.Sorted(maps.Keys(collector.metrics)))
		}
	}

	// The log lines of both programs lead to the trace.
	id := hex.EncodeToString(trace[0].GetTraceId())
	for _, lines := range [][]map[string]any{
		cli.log.lines(t, "grpcretry: retrying"), srv.log.lines(t, "failing on purpose")} {
		if len(lines) != 1 || lines[0]["trace_id"] != id {
			t.Errorf("the log has %v, want one line with the trace_id %s", lines, id)
		}
	}
}

// A method without an idempotency level is not retried if it may have run.
func TestNothingRunsTwice(t *testing.T) {
	srv := startServer(t, anyPort, 100, server.Faults{FailEvery: 2})
	cli := startClient(t, srv.public, "", nil)
	want(t, http.StatusOK, "POST", "http://"+cli.public+"/entries")
	want(t, http.StatusServiceUnavailable, "POST", "http://"+cli.public+"/entries")
	if got := want(t, http.StatusOK, "POST", "http://"+cli.public+"/entries?message=x"); got != "2 x\n" {
		t.Errorf("after one success and one failure, POST /entries returned %q, want entry 2", got)
	}
	// The next failure comes after the call has run: a retry would have appended a second entry.
	want(t, http.StatusServiceUnavailable, "POST", "http://"+cli.public+"/entries")
	if got := want(t, http.StatusOK, "POST", "http://"+cli.public+"/entries?message=y"); got != "4 y\n" {
		t.Errorf("after a failed call that ran once, POST /entries returned %q, want entry 4", got)
	}
}

// traceOf returns the spans of the trace in which a span has an attribute.
func (c *collector) traceOf(t *testing.T, attribute string, value int64) (trace []*tracepb.Span) {
	t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, span := range c.spans {
		if integer(span, attribute) != value {
			continue
		}
		for _, other := range c.spans {
			if string(other.GetTraceId()) == string(span.GetTraceId()) {
				trace = append(trace, other)
			}
		}
		return trace
	}
	t.Fatalf("none of %d spans has %s = %d", len(c.spans), attribute, value)
	return nil
}

// integer returns an attribute of a span, 0 without it.
func integer(span *tracepb.Span, attribute string) int64 {
	for _, a := range span.GetAttributes() {
		if a.GetKey() == attribute {
			return a.GetValue().GetIntValue()
		}
	}
	return 0
}

// wrongSpans compares a trace with the request: HTTP, call, two attempts, the server's span of each.
func wrongSpans(trace []*tracepb.Span) (problems []string) {
	parents := map[string]*tracepb.Span{}
	for _, span := range trace {
		parents[string(span.GetSpanId())] = span
	}
	attempts := map[int64]string{} // the span of each, by number
	var served []string            // the parents of the server's spans
	for _, span := range trace {
		parent := parents[string(span.GetParentSpanId())]
		switch number := integer(span, telemetry.AttrAttemptNumber); {
		case number > 0:
			attempts[number] = string(span.GetSpanId())
			if integer(parent, telemetry.AttrAttemptCount) != 2 {
				problems = append(problems, fmt.Sprintf("attempt %d is not below a call of two attempts, but %v", number, parent))
			}
		case span.GetKind() == tracepb.Span_SPAN_KIND_SERVER && parent != nil:
			served = append(served, string(span.GetParentSpanId()))
		}
	}
	if len(attempts) != 2 || attempts[1] == "" || attempts[2] == "" {
		problems = append(problems, fmt.Sprintf("%d attempts, want numbers 1 and 2", len(attempts)))
	}
	slices.Sort(served)
	if want := slices.Sorted(maps.Values(attempts)); !slices.Equal(served, want) {
		problems = append(problems, fmt.Sprintf("the server's spans are below %x, want the attempts %x", served, want))
	}
	return problems
}

// Users see neither the debug page nor metrics, and operators of the same machine do.
func TestInternalPort(t *testing.T) {
	srv := startServer(t, anyPort, 100, server.Faults{})
	cli := startClient(t, srv.public, "", nil)
	for _, path := range []string{"/debug/grpcretry", "/metrics", "/ready"} {
		want(t, http.StatusNotFound, "GET", "http://"+cli.public+path)
		want(t, http.StatusOK, "GET", "http://"+cli.internal+path)
	}
	for _, address := range []string{client.DefaultInternal, server.DefaultInternal} {
		if host, _, err := net.SplitHostPort(address); err != nil || !net.ParseIP(host).IsLoopback() {
			t.Errorf("the default of the internal port is %s, want a loopback address", address)
		}
	}
}

// Calls are made without a pause while the server stops and starts again. All of them succeed, and those
// that must not run twice run once.
func TestARestartLosesNoCall(t *testing.T) {
	faults := server.Faults{Work: 20 * time.Millisecond} // so that calls are in flight when the server stops
	srv := startServer(t, anyPort, 100, faults)
	cli := startClient(t, srv.public, "", nil)

	var (
		callers sync.WaitGroup
		mu      sync.Mutex
		entries = map[int64]int{} // how many calls returned the number; guarded by mu
	)
	enough, answered := make(chan struct{}), make(chan struct{})
	for _, request := range [][2]string{{"GET", "/read"}, {"PUT", "/value"}, {"POST", "/entries"}, {"POST", "/entries"}} {
		callers.Go(func() {
			for {
				code, body, err := send(request[0], "http://"+cli.public+request[1])
				if err != nil || code != http.StatusOK {
					t.Errorf("%s %s = %d %q, %v, want success", request[0], request[1], code, body, err)
				}
				number, _, _ := strings.Cut(body, " ")
				n, _ := strconv.ParseInt(number, 10, 64)
				mu.Lock()
				entries[n]++
				mu.Unlock()
				select {
				case answered <- struct{}{}:
				case <-enough:
					return
				}
			}
		})
	}
	receive := func(n int) {
		for range n {
			<-answered
		}
	}
	receive(20)
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		srv.stop()
	}()
	for running := true; running; {
		select {
		case <-answered:
		case <-stopped:
			running = false
		}
	}
	startServer(t, srv.public, 100, faults)
	receive(20)
	close(enough)
	callers.Wait()

	// Each server counted its entries from 1. A number that is missing, or that one server has and no
	// caller, belongs to a call that ran twice.
	delete(entries, 0) // the other methods
	for n := int64(1); n <= int64(len(entries)); n++ {
		if got := entries[n]; got < 1 || got > 2 || n > 1 && got > entries[n-1] {
			t.Errorf("entry %d was returned to %d callers, of all %v", n, got, entries)
		}
	}
	if entries[1] != 2 {
		t.Errorf("the entries are %v, want some from each of two servers", entries)
	}
}

// A server that stops says so before it refuses calls.
func TestDrain(t *testing.T) {
	srv := startServer(t, anyPort, 0, server.Faults{}) // health checks need no capacity
	conn := dial(t, srv.public)
	watch, err := healthpb.NewHealthClient(conn).Watch(t.Context(), &healthpb.HealthCheckRequest{})
	if err != nil {
		t.Fatalf("Watch: %v", err)
	}
	next := func() healthpb.HealthCheckResponse_ServingStatus {
		response, err := watch.Recv()
		if err != nil {
			t.Fatalf("watching: %v", err)
		}
		return response.GetStatus()
	}
	if got := next(); got != healthpb.HealthCheckResponse_SERVING {
		t.Errorf("a server that runs is %v", got)
	}
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		srv.stop()
	}()
	if got := next(); got != healthpb.HealthCheckResponse_NOT_SERVING {
		t.Errorf("a server that stops is %v", got)
	}
	conn.Close() // ends the watch, the last stream that the server waits for
	<-stopped
}

func dial(t *testing.T, address string) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatalf("NewClient: %v", err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn
}

// A server without room names a wait.
func TestOverload(t *testing.T) {
	srv := startServer(t, anyPort, 0, server.Faults{})
	var trailer metadata.MD
	_, err := echov1.NewEchoServiceClient(dial(t, srv.public)).Put(t.Context(), &echov1.EchoRequest{}, grpc.Trailer(&trailer))
	if status.Code(err) != codes.ResourceExhausted {
		t.Errorf("Put = %v, want RESOURCE_EXHAUSTED", err)
	}
	pushback := trailer.Get("grpc-retry-pushback-ms")
	if len(pushback) != 1 {
		t.Fatalf("the trailer has the pushback %q, want one", pushback)
	}
	if ms, err := strconv.Atoi(pushback[0]); err != nil || ms < 500 || ms > 1500 {
		t.Errorf("the pushback is %q, want 500 to 1500 ms", pushback[0])
	}
}

// Operators change the number of attempts, and turn retries off, while the client runs.
func TestSettings(t *testing.T) {
	srv := startServer(t, anyPort, 100, server.Faults{FailEvery: 1})
	folder := t.TempDir()
	file := filepath.Join(folder, "settings.json")
	write := func(settings string) { // never half a file, as operators should
		draft := filepath.Join(folder, "draft")
		if err := errors.Join(os.WriteFile(draft, []byte(settings), 0o600), os.Rename(draft, file)); err != nil {
			t.Fatal(err)
		}
	}
	write(`{"max_attempts": 2}`)
	signals := make(chan os.Signal)
	cli := startClient(t, srv.public, file, signals)
	reload := func() {
		for range 2 { // the second signal is received when the first has been obeyed
			select {
			case signals <- syscall.SIGHUP:
			case <-time.After(time.Minute):
				t.Fatal("the client receives no signal")
			}
		}
	}
	failures := 0 // that the server has logged, one for each attempt
	wantAttempts := func(n int, settings string) {
		want(t, http.StatusServiceUnavailable, "PUT", "http://"+cli.public+"/value")
		before := failures
		failures = len(srv.log.lines(t, "failing on purpose"))
		if got := failures - before; got != n {
			t.Errorf("with %s a call made %d attempts, want %d", settings, got, n)
		}
	}

	wantAttempts(2, "the settings at the start")
	for _, step := range []struct {
		settings string
		attempts int // of the next call; the budget's reserve allows three retries in all
	}{
		{`{"retries_off": true}`, 1},
		{`{"retries_of": false}`, 1}, // a typo changes nothing
		{`{"max_attempts": 3}`, 3},
	} {
		write(step.settings)
		reload()
		wantAttempts(step.attempts, step.settings)
	}
	if len(cli.log.lines(t, "settings are unchanged")) == 0 {
		t.Error("the typo was not logged")
	}

	// Settings that are taken out of the file have their defaults again.
	write(`{}`)
	reload()
	if got := cli.page(t).Methods[0].Policy.MaxAttempts; got != 4 {
		t.Errorf("without settings the policy has %d attempts, want 4", got)
	}
}
