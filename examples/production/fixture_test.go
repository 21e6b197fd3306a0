package production

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	colmetricspb "go.opentelemetry.io/proto/otlp/collector/metrics/v1"
	coltracepb "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"go.uber.org/goleak"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/grpcretry/grpcretry/debug"
	"github.com/grpcretry/grpcretry/examples/production/client"
	"github.com/grpcretry/grpcretry/examples/production/ops"
	"github.com/grpcretry/grpcretry/examples/production/server"
	"github.com/grpcretry/grpcretry/grpcretrytest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func listen(t *testing.T, address string) net.Listener {
	t.Helper()
	listener, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatalf("Listen(%s): %v", address, err)
	}
	return listener
}

const anyPort = "127.0.0.1:0"

// A program is a server or a client that runs in the test's process, on free ports.
type program struct {
	public, internal string // addresses
	log              *logBuffer
	stop             func() // as SIGTERM does; returns when the program has ended
}

// start runs a program until stop, at the latest until the end of the test.
func start(t *testing.T, public, internal net.Listener, log *logBuffer, run func(context.Context) error) *program {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- run(ctx) }()
	stop := sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Run = %v, want nil after a stop", err)
		}
	})
	t.Cleanup(stop)
	return &program{public.Addr().String(), internal.Addr().String(), log, stop}
}

// drain has no delay, because no load balancer watches, and more time than any test takes.
var drain = ops.Drain{Timeout: time.Minute}

// startServer starts a server on an address, with room for 100 requests unless config says otherwise.
func startServer(t *testing.T, address string, capacity int, faults server.Faults) *program {
	t.Helper()
	public, internal, log := listen(t, address), listen(t, anyPort), &logBuffer{}
	return start(t, public, internal, log, func(ctx context.Context) error {
		return server.Run(ctx, server.Config{
			Public: public, Internal: internal,
			Credentials: insecure.NewCredentials(),
			Log:         ops.NewLogger(log, slog.LevelDebug),
			Capacity:    capacity,
			Drain:       drain,
			Faults:      faults,
		})
	})
}

// startClient starts a client of a server. The deadline is far away, so that slow machines meet it as rarely
// as fast ones.
func startClient(t *testing.T, target, settings string, reload <-chan os.Signal) *program {
	t.Helper()
	public, internal, log := listen(t, anyPort), listen(t, anyPort), &logBuffer{}
	return start(t, public, internal, log, func(ctx context.Context) error {
		return client.Run(ctx, client.Config{
			Public: public, Internal: internal,
			Target:      "dns:///" + target,
			Credentials: insecure.NewCredentials(),
			Timeout:     30 * time.Second,
			Log:         ops.NewLogger(log, slog.LevelDebug),
			Settings:    settings,
			Reload:      reload,
			Drain:       drain,
		})
	})
}

// A logBuffer keeps a program's log.
type logBuffer struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (b *logBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

// lines returns the entries with a message.
func (b *logBuffer) lines(t *testing.T, message string) (found []map[string]any) {
	t.Helper()
	b.mu.Lock()
	defer b.mu.Unlock()
	for line := range strings.Lines(b.text.String()) {
		var entry map[string]any
		if err := json.Unmarshal([]byte(line), &entry); err != nil {
			t.Fatalf("the log has the line %q: %v", line, err)
		}
		if entry["msg"] == message {
			found = append(found, entry)
		}
	}
	return found
}

// Without idle connections, which goleak would find.
var web = &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: time.Minute}

// send sends one HTTP request and returns the response's status and body.
func send(method, url string) (code int, body string, err error) {
	request, err := http.NewRequest(method, url, nil)
	if err != nil {
		return 0, "", err
	}
	response, err := web.Do(request)
	if err != nil {
		return 0, "", err
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	return response.StatusCode, string(text), err
}

// want sends one HTTP request, and fails the test if the status is another.
func want(t *testing.T, code int, method, url string) (body string) {
	t.Helper()
	got, body, err := send(method, url)
	if err != nil || got != code {
		t.Fatalf("%s %s = %d %q, %v; want %d", method, url, got, body, err, code)
	}
	return body
}

// metric returns the sum of the samples of a metric that have these labels, as /metrics shows them.
func (p *program) metric(t *testing.T, name string, labels ...string) (sum float64) {
	t.Helper()
	for line := range strings.Lines(want(t, http.StatusOK, "GET", "http://"+p.internal+"/metrics")) {
		missing := func(label string) bool { return !strings.Contains(line, label) }
		if !strings.HasPrefix(line, name+"{") || slices.ContainsFunc(labels, missing) {
			continue
		}
		fields := strings.Fields(line)
		value, err := strconv.ParseFloat(fields[len(fields)-1], 64)
		if err != nil {
			t.Fatalf("/metrics has the line %q: %v", line, err)
		}
		sum += value
	}
	return sum
}

// page returns what the debug page shows.
func (p *program) page(t *testing.T) (snapshot debug.Snapshot) {
	t.Helper()
	text := want(t, http.StatusOK, "GET", "http://"+p.internal+"/debug/grpcretry?format=json")
	if err := json.Unmarshal([]byte(text), &snapshot); err != nil {
		t.Fatalf("the debug page: %v", err)
	}
	return snapshot
}

// A collector receives what an OpenTelemetry collector would.
type collector struct {
	coltracepb.UnimplementedTraceServiceServer

	mu      sync.Mutex
	spans   []*tracepb.Span
	metrics map[string]bool // names
}

type metricsCollector struct {
	colmetricspb.UnimplementedMetricsServiceServer
	*collector
}

// startCollector starts a collector, and points the environment of the programs to it.
func startCollector(t *testing.T) *collector {
	t.Helper()
	c := &collector{metrics: map[string]bool{}}
	s := grpcretrytest.NewServer(t, func(s grpc.ServiceRegistrar) {
		coltracepb.RegisterTraceServiceServer(s, c)
		colmetricspb.RegisterMetricsServiceServer(s, metricsCollector{collector: c})
	}, grpcretrytest.OverTCP())
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", strings.Replace(s.Target(), "passthrough:///", "http://", 1))
	return c
}

func (c *collector) Export(_ context.Context, in *coltracepb.ExportTraceServiceRequest) (*coltracepb.ExportTraceServiceResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, resource := range in.GetResourceSpans() {
		for _, scope := range resource.GetScopeSpans() {
			c.spans = append(c.spans, scope.GetSpans()...)
		}
	}
	return &coltracepb.ExportTraceServiceResponse{}, nil
}

func (c metricsCollector) Export(
	_ context.Context, in *colmetricspb.ExportMetricsServiceRequest,
) (*colmetricspb.ExportMetricsServiceResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, resource := range in.GetResourceMetrics() {
		for _, scope := range resource.GetScopeMetrics() {
			for _, metric := range scope.GetMetrics() {
				c.metrics[metric.GetName()] = true
			}
		}
	}
	return &colmetricspb.ExportMetricsServiceResponse{}, nil
}
