package e2e

import (
	"io"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"
	"time"

	"go.opentelemetry.io/contrib/instrumentation/net/http/otelhttp"
	"go.opentelemetry.io/otel/propagation"
	tracesdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/httpretry"
)

// otelhttp below a Transport records a span for each attempt, and above it one for the request, on which
// the attempts are events. With the call span, the attempts' spans are its children.
func TestOtelHTTP(t *testing.T) {
	for _, tt := range []struct {
		name    string
		options []grpcretry.Option
		parent  string // of the attempts' spans
	}{
		{"plain", nil, "outer"},
		{"attempt timeout", []grpcretry.Option{grpcretry.WithAttemptTimeout(time.Minute)}, "outer"},
		{"call span", []grpcretry.Option{grpcretry.WithCallSpan(true), grpcretry.WithAttemptTimeout(time.Minute)}, "call"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			recorder := tracetest.NewSpanRecorder()
			provider := tracesdk.NewTracerProvider(tracesdk.WithSpanProcessor(recorder))
			spans := flakyHTTP(t, provider, tt.options...)
			named := func(name string) (found []tracesdk.ReadOnlySpan) {
				for _, s := range recorder.Ended() {
					if s.Name() == name {
						found = append(found, s)
					}
				}
				return found
			}
			outer, attempts := named("outer"), named("attempt")
			if len(outer) != 1 || len(attempts) != 3 || len(spans) != 3 {
				t.Fatalf("%d outer spans, %d of attempts, %d at the server, want 1, 3 and 3", len(outer), len(attempts), len(spans))
			}
			parent := outer[0]
			if tt.parent == "call" {
				for _, s := range recorder.Ended() {
					if s.Parent().SpanID() == outer[0].SpanContext().SpanID() && s.Name() != "attempt" {
						parent = s
					}
				}
			}
			if len(parent.Events()) != 3 {
				t.Errorf("%d events on %s, want one for each attempt", len(parent.Events()), parent.Name())
			}
			for i, a := range attempts {
				if a.Parent().SpanID() != parent.SpanContext().SpanID() {
					t.Errorf("the parent of attempt %d is not %s", i+1, parent.Name())
				}
				if spans[i] != a.SpanContext().SpanID() {
					t.Errorf("the server saw another span than that of attempt %d", i+1)
				}
			}
		})
	}
}

// flakyHTTP makes a request that succeeds in its third attempt, with otelhttp below and above the
// Transport, and returns the spans that the server was sent.
func flakyHTTP(t *testing.T, provider trace.TracerProvider, opts ...grpcretry.Option) []trace.SpanID {
	t.Helper()
	var requests atomic.Int64
	var seen []trace.SpanID
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx := propagation.TraceContext{}.Extract(r.Context(), propagation.HeaderCarrier(r.Header))
		seen = append(seen, trace.SpanContextFromContext(ctx).SpanID())
		if requests.Add(1) < 3 {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
		io.WriteString(w, "hello")
	}))
	defer server.Close()
	retrier, err := grpcretry.New(append(opts, grpcretry.WithTracerProvider(provider),
		grpcretry.WithBackoff(grpcretry.Constant(time.Millisecond)))...)
	if err != nil {
		t.Fatal(err)
	}
	traced := func(name string, base http.RoundTripper) http.RoundTripper {
		return otelhttp.NewTransport(base, otelhttp.WithTracerProvider(provider), otelhttp.WithPropagators(propagation.TraceContext{}),
			otelhttp.WithSpanNameFormatter(func(string, *http.Request) string { return name }))
	}
	base := &http.Transport{}
	defer base.CloseIdleConnections()
	client := &http.Client{Transport: traced("outer", httpretry.NewTransport(retrier, traced("attempt", base)))}
	resp, err := client.Get(server.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if body, err := io.ReadAll(resp.Body); string(body) != "hello" || err != nil {
		t.Errorf("body %q, %v", body, err)
	}
	return seen
}
