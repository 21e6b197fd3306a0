//go:build e2e

package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/sdk/resource"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/attemptspan"
	"github.com/grpcretry/grpcretry/e2e/waterfall"
	"github.com/grpcretry/grpcretry/grpcretrytest"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
	"github.com/grpcretry/grpcretry/telemetry"
)

// The name that the caller has in Jaeger.
const serviceName = "shop"

// A jaeger is Jaeger's all-in-one, which keeps traces in memory.
type jaeger struct{ otlp, query string }

func startJaeger(t *testing.T) jaeger {
	t.Helper()
	free := freeAddresses(t, 3)
	otlp, query, admin := free[0], free[1], free[2]
	const anywhere = "127.0.0.1:0" // what Jaeger listens on and nobody asks for
	p := start(t, binary(t, "E2E_JAEGER"),
		"--log-level=warn",
		"--collector.otlp.enabled=true",
		"--collector.otlp.grpc.host-port="+otlp,
		"--query.http-server.host-port="+query,
		"--admin.http.host-port="+admin,
		"--collector.otlp.http.host-port="+anywhere,
		"--collector.grpc-server.host-port="+anywhere,
		"--collector.http-server.host-port="+anywhere,
		"--query.grpc-server.host-port="+anywhere,
		"--http-server.host-port="+anywhere,
		"--processor.jaeger-binary.server-host-port="+anywhere,
		"--processor.jaeger-compact.server-host-port="+anywhere,
		"--processor.zipkin-compact.server-host-port="+anywhere)
	p.ready(t, "http://"+query+"/api/services")
	return jaeger{otlp: otlp, query: query}
}

// trace waits until Jaeger has so many spans of a trace, and returns Jaeger's answer.
func (j jaeger) trace(t *testing.T, id trace.TraceID, spans int) (waterfall.Trace, []byte) {
	t.Helper()
	var body []byte
	var traces []waterfall.Trace
	eventually(t, fmt.Sprintf("trace %v with %d spans", id, spans), func() (err error) {
		if body, err = get(t.Context(), "http://"+j.query+"/api/traces/"+id.String()); err != nil {
			return err
		}
		if traces, err = waterfall.Read(bytes.NewReader(body)); err != nil {
			return err
		}
		if len(traces) != 1 || len(traces[0].Spans) != spans {
			return fmt.Errorf("there is\n%s", body)
		}
		return nil
	})
	return traces[0], body
}

// find are the IDs of traces that have a span with these tags, or of this operation, as Jaeger's
// search finds them, sorted.
func (j jaeger) find(t *testing.T, by, what string) []string {
	t.Helper()
	body, err := get(t.Context(), "http://"+j.query+"/api/traces?limit=100&service="+serviceName+"&"+by+"="+url.QueryEscape(what))
	if err != nil {
		t.Fatalf("searching for %s: %v", what, err)
	}
	traces, err := waterfall.Read(bytes.NewReader(body))
	if err != nil {
		t.Fatalf("searching for %s: %v", what, err)
	}
	var ids []string
	for _, found := range traces {
		ids = append(ids, found.TraceID)
	}
	slices.Sort(ids)
	return ids
}

// traced is a provider as a program has it: to Jaeger by OTLP, with attempts numbered.
func traced(t *testing.T, j jaeger) *sdktrace.TracerProvider {
	t.Helper()
	exporter, err := otlptracegrpc.New(t.Context(), otlptracegrpc.WithEndpoint(j.otlp), otlptracegrpc.WithInsecure())
	if err != nil {
		t.Fatalf("otlptracegrpc.New: %v", err)
	}
	provider := sdktrace.NewTracerProvider(
		sdktrace.WithSpanProcessor(attemptspan.NewProcessor()),
		sdktrace.WithBatcher(exporter),
		sdktrace.WithResource(resource.NewSchemaless(attribute.String("service.name", serviceName))))
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := provider.Shutdown(ctx); err != nil {
			t.Errorf("Shutdown of the tracer provider = %v", err)
		}
	})
	return provider
}

// A traceTest is one call, and what Jaeger has of it.
type traceTest struct {
	name    string
	plan    plan
	opts    []grpcretry.Option // in addition
	call    func(ctx context.Context, client echov1.EchoServiceClient) error
	wantErr error // errors.Is
	want    string
}

const usual = 25 * time.Millisecond // what an attempt takes

var down = planned(codes.Unavailable).After(usual)

var traceTests = []traceTest{
	{"recovers", plan{down, down.Pushback(130 * time.Millisecond)}, nil, echo, nil, `
GET /cart span.kind=internal
  grpcretry.test.v1.EchoService/Echo grpcretry.attempts=3 rpc.method=grpcretry.test.v1.EchoService/Echo rpc.response.status_code=OK rpc.system.name=grpc span.kind=internal
  @ grpcretry.attempt grpcretry.attempt.number=1 grpcretry.budget.balance=4 grpcretry.decision=retry grpcretry.message=as planned grpcretry.wait_ms=60 grpcretry.wait_source=backoff rpc.response.status_code=UNAVAILABLE
  @ grpcretry.attempt grpcretry.attempt.number=2 grpcretry.budget.balance=3 grpcretry.decision=retry grpcretry.message=as planned grpcretry.wait_ms=130 grpcretry.wait_source=pushback rpc.response.status_code=UNAVAILABLE
  @ grpcretry.attempt grpcretry.attempt.number=3 grpcretry.decision=success rpc.response.status_code=OK
    grpcretry.test.v1.EchoService/Echo error=true grpcretry.attempt.number=1 otel.status_code=ERROR otel.status_description=as planned rpc.method=grpcretry.test.v1.EchoService/Echo rpc.response.status_code=UNAVAILABLE rpc.system.name=grpc span.kind=client
    retry wait grpcretry.next_attempt.number=2 grpcretry.wait_ms=60 grpcretry.wait_source=backoff span.kind=internal
    attempt 2 grpcretry.test.v1.EchoService/Echo error=true grpcretry.attempt.number=2 grpcretry.attempt.wait_ms=60 grpcretry.attempt.wait_source=backoff otel.status_code=ERROR otel.status_description=as planned rpc.method=grpcretry.test.v1.EchoService/Echo rpc.response.status_code=UNAVAILABLE rpc.system.name=grpc span.kind=client
    retry wait grpcretry.next_attempt.number=3 grpcretry.wait_ms=130 grpcretry.wait_source=pushback span.kind=internal
    attempt 3 grpcretry.test.v1.EchoService/Echo grpcretry.attempt.number=3 grpcretry.attempt.wait_ms=130 grpcretry.attempt.wait_source=pushback rpc.method=grpcretry.test.v1.EchoService/Echo rpc.response.status_code=OK rpc.system.name=grpc span.kind=client
`},
	{"is exhausted", plan{down, down, down}, nil, echo, grpcretry.ErrAttemptsExhausted, `
GET /cart span.kind=internal
  grpcretry.test.v1.EchoService/Echo error=true grpcretry.attempts=3 grpcretry.reason=exhausted otel.status_code=ERROR otel.status_description=grpcretry: gave up after 3 attempts in TIME: no attempts left: rpc error: code = Unavailable desc = as planned rpc.method=grpcretry.test.v1.EchoService/Echo rpc.response.status_code=UNAVAILABLE rpc.system.name=grpc span.kind=internal
  @ grpcretry.attempt grpcretry.attempt.number=1 grpcretry.budget.balance=4 grpcretry.decision=retry grpcretry.message=as planned grpcretry.wait_ms=60 grpcretry.wait_source=backoff rpc.response.status_code=UNAVAILABLE
  @ grpcretry.attempt grpcretry.attempt.number=2 grpcretry.budget.balance=3 grpcretry.decision=retry grpcretry.message=as planned grpcretry.wait_ms=120 grpcretry.wait_source=backoff rpc.response.status_code=UNAVAILABLE
  @ grpcretry.attempt grpcretry.attempt.number=3 grpcretry.budget.balance=2 grpcretry.decision=stop grpcretry.message=as planned grpcretry.reason=exhausted rpc.response.status_code=UNAVAILABLE
    grpcretry.test.v1.EchoService/Echo error=true grpcretry.attempt.number=1 otel.status_code=ERROR otel.status_description=as planned rpc.method=grpcretry.test.v1.EchoService/Echo rpc.response.status_code=UNAVAILABLE rpc.system.name=grpc span.kind=client
    retry wait grpcretry.next_attempt.number=2 grpcretry.wait_ms=60 grpcretry.wait_source=backoff span.kind=internal
    attempt 2 grpcretry.test.v1.EchoService/Echo error=true grpcretry.attempt.number=2 grpcretry.attempt.wait_ms=60 grpcretry.attempt.wait_source=backoff otel.status_code=ERROR otel.status_description=as planned rpc.method=grpcretry.test.v1.EchoService/Echo rpc.response.status_code=UNAVAILABLE rpc.system.name=grpc span.kind=client
    retry wait grpcretry.next_attempt.number=3 grpcretry.wait_ms=120 grpcretry.wait_source=backoff span.kind=internal
    attempt 3 grpcretry.test.v1.EchoService/Echo error=true grpcretry.attempt.number=3 grpcretry.attempt.wait_ms=120 grpcretry.attempt.wait_source=backoff otel.status_code=ERROR otel.status_description=as planned rpc.method=grpcretry.test.v1.EchoService/Echo rpc.response.status_code=UNAVAILABLE rpc.system.name=grpc span.kind=client
`},
	{"streams", plan{planned(codes.ResourceExhausted).Pushback(40 * time.Millisecond).After(usual)}, nil, expand, nil, `
GET /cart span.kind=internal
  grpcretry.test.v1.EchoService/Expand grpcretry.attempts=2 rpc.method=grpcretry.test.v1.EchoService/Expand rpc.response.status_code=OK rpc.system.name=grpc span.kind=internal
  @ grpcretry.attempt grpcretry.attempt.number=1 grpcretry.budget.balance=4 grpcretry.decision=retry grpcretry.message=as planned grpcretry.wait_ms=40 grpcretry.wait_source=pushback rpc.response.status_code=RESOURCE_EXHAUSTED
  @ grpcretry.attempt grpcretry.attempt.number=2 grpcretry.decision=success rpc.response.status_code=OK
    grpcretry.test.v1.EchoService/Expand error=true grpcretry.attempt.number=1 otel.status_code=ERROR otel.status_description=as planned rpc.method=grpcretry.test.v1.EchoService/Expand rpc.response.status_code=RESOURCE_EXHAUSTED rpc.system.name=grpc span.kind=client
    retry wait grpcretry.next_attempt.number=2 grpcretry.wait_ms=40 grpcretry.wait_source=pushback span.kind=internal
    attempt 2 grpcretry.test.v1.EchoService/Expand grpcretry.attempt.number=2 grpcretry.attempt.wait_ms=40 grpcretry.attempt.wait_source=pushback rpc.method=grpcretry.test.v1.EchoService/Expand rpc.response.status_code=OK rpc.system.name=grpc span.kind=client
`},
}

// A hedged call: the hedge fails while the first attempt is in flight, and asks for a wait, which
// outlasts the first attempt. Only then nothing is in flight, and the wait has a span.
var hedgedTest = traceTest{"hedged",
	plan{down.After(250 * time.Millisecond), down.Pushback(400 * time.Millisecond)},
	[]grpcretry.Option{grpcretry.WithPolicy(grpcretry.Policy{MaxAttempts: 3, Hedging: &grpcretry.Hedging{
		Delay: grpcretry.HedgeAfter(100 * time.Millisecond), AllMethodsAreSafe: true, Budget: grpcretry.Unlimited}})},
	echo, nil, `
GET /cart span.kind=internal
  grpcretry.test.v1.EchoService/Echo grpcretry.attempts=3 grpcretry.winner=3 rpc.method=grpcretry.test.v1.EchoService/Echo rpc.response.status_code=OK rpc.system.name=grpc span.kind=internal
  @ grpcretry.attempt grpcretry.attempt.hedge=true grpcretry.attempt.number=2 grpcretry.attempt.sent_after=hedge_delay grpcretry.budget.balance=4 grpcretry.decision=stop grpcretry.message=as planned grpcretry.reason=in_flight rpc.response.status_code=UNAVAILABLE
  @ grpcretry.attempt grpcretry.attempt.number=1 grpcretry.budget.balance=3 grpcretry.decision=retry grpcretry.message=as planned grpcretry.wait_ms=REST grpcretry.wait_source=pushback rpc.response.status_code=UNAVAILABLE
  @ grpcretry.attempt grpcretry.attempt.hedge=false grpcretry.attempt.number=3 grpcretry.attempt.sent_after=pushback grpcretry.decision=success rpc.response.status_code=OK
    grpcretry.test.v1.EchoService/Echo error=true grpcretry.attempt.number=1 otel.status_code=ERROR otel.status_description=as planned rpc.method=grpcretry.test.v1.EchoService/Echo rpc.response.status_code=UNAVAILABLE rpc.system.name=grpc span.kind=client
    hedge 2 grpcretry.test.v1.EchoService/Echo error=true grpcretry.attempt.hedge=true grpcretry.attempt.number=2 grpcretry.attempt.wait_ms=100 grpcretry.attempt.wait_source=hedge_delay otel.status_code=ERROR otel.status_description=as planned rpc.method=grpcretry.test.v1.EchoService/Echo rpc.response.status_code=UNAVAILABLE rpc.system.name=grpc span.kind=client
    retry wait grpcretry.next_attempt.number=3 grpcretry.wait_ms=REST grpcretry.wait_source=pushback span.kind=internal
    attempt 3 grpcretry.test.v1.EchoService/Echo grpcretry.attempt.number=3 grpcretry.attempt.wait_ms=REST grpcretry.attempt.wait_source=pushback rpc.method=grpcretry.test.v1.EchoService/Echo rpc.response.status_code=OK rpc.system.name=grpc span.kind=client
`}

func echo(ctx context.Context, client echov1.EchoServiceClient) error {
	_, err := client.Echo(ctx, &echov1.EchoRequest{})
	return err
}

func expand(ctx context.Context, client echov1.EchoServiceClient) error {
	stream, err := client.Expand(ctx, &echov1.EchoRequest{})
	if err != nil {
		return err
	}
	for {
		if _, err := stream.Recv(); err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
	}
}

func TestJaegerGivesBackEveryAttempt(t *testing.T) {
	j := startJaeger(t)
	provider := traced(t, j)
	server := serve(t)
	ids := map[string]string{}
	for _, tt := range traceTests {
		t.Run(tt.name, func(t *testing.T) {
			got, response := tt.trace(t, j, provider, server)
			ids[tt.name] = got.TraceID
			if lines, want := describe(got, "", ""), strings.TrimPrefix(tt.want, "\n"); lines != want {
				t.Errorf("Jaeger has\n%s\nwant\n%s", lines, want)
			}
			checkTimes(t, got)
			if tt.name == "recovers" {
				keep(t, "trace.json", response)
			}
		})
	}

	t.Run(hedgedTest.name, func(t *testing.T) {
		got, _ := hedgedTest.trace(t, j, provider, server)
		ids[hedgedTest.name] = got.TraceID
		lines := rest.ReplaceAllString(describe(got, "", ""), "wait_ms=REST$1")
		if want := strings.TrimPrefix(hedgedTest.want, "\n"); lines != want {
			t.Errorf("Jaeger has\n%s\nwant\n%s", lines, want)
		}
		checkHedgedTimes(t, got)
	})

	t.Run("search", func(t *testing.T) {
		third := []string{ids["recovers"], ids["is exhausted"], ids["hedged"]}
		slices.Sort(third)
		for _, tt := range []struct {
			by, what string
			want     []string
		}{
			{"tags", `{"grpcretry.attempt.number":"3"}`, third},
			{"operation", "attempt 3 grpcretry.test.v1.EchoService/Echo", third},
			{"operation", "hedge 2 grpcretry.test.v1.EchoService/Echo", []string{ids["hedged"]}},
			{"tags", `{"grpcretry.reason":"exhausted"}`, []string{ids["is exhausted"]}},
			{"tags",
				`{"grpcretry.attempt.wait_source":"pushback","rpc.response.status_code":"OK","rpc.method":"grpcretry.test.v1.EchoService/Expand"}`,
				[]string{ids["streams"]}},
		} {
			if got := j.find(t, tt.by, tt.what); !slices.Equal(got, tt.want) {
				t.Errorf("Jaeger finds by %s %s the traces %v, want %v", tt.by, tt.what, got, tt.want)
			}
		}
	})
}

// trace makes the test's call, and waits until Jaeger has all its spans.
func (tt *traceTest) trace(
	t *testing.T, j jaeger, provider *sdktrace.TracerProvider, server *grpcretrytest.Server,
) (got waterfall.Trace, response []byte) {
	t.Helper()
	// A budget whose level follows from the failures alone, not from the time.
	budget, err := grpcretry.NewThrottle(10, 0.1)
	if err != nil {
		t.Fatalf("NewThrottle: %v", err)
	}
	server.On("/", append(tt.plan, grpcretrytest.OK().After(usual).Always())...)
	client := echov1.NewEchoServiceClient(server.Conn(append(
		grpcretry.DialOptions(append([]grpcretry.Option{
			grpcretry.WithBackoff(grpcretry.Exponential{Base: 60 * time.Millisecond, Jitter: grpcretry.NoJitter}),
			grpcretry.WithMaxAttempts(3),
			grpcretry.WithBudget(budget),
			grpcretry.WithCallSpan(true),
			grpcretry.WithTracerProvider(provider)}, tt.opts...)...),
		grpc.WithStatsHandler(otelgrpc.NewClientHandler(otelgrpc.WithTracerProvider(provider))))...))

	ctx, span := provider.Tracer(serviceName).Start(t.Context(), "GET /cart")
	err = tt.call(ctx, client)
	span.End()
	if !errors.Is(err, tt.wantErr) {
		t.Errorf("call = %v, want %v", err, tt.wantErr)
	}
	if err := provider.ForceFlush(t.Context()); err != nil {
		t.Fatalf("ForceFlush = %v", err)
	}
	lines := strings.TrimPrefix(tt.want, "\n")
	return j.trace(t, span.SpanContext().TraceID(), strings.Count(lines, "\n")-strings.Count(lines, "@"))
}

// rest is what is left of the hedge's pushback when the first attempt fails, which differs from run to
// run.
var rest = regexp.MustCompile(`wait_ms=(?:[12][0-9]{2}|[0-9]{1,2})( \S*wait_source=pushback)`)

// describe is a trace as text: a line for each span, indented below its parent, and for
// each event. Left out are times and addresses, and what Jaeger and the SDK say of themselves.
func describe(t waterfall.Trace, parent, indent string) string {
	var out strings.Builder
	for _, s := range t.Below(parent) {
		fmt.Fprintf(&out, "%s%s%s\n", indent, s.OperationName, describeTags(s.Tags))
		for _, l := range s.Logs {
			fmt.Fprintf(&out, "%s@ %s%s\n", indent, waterfall.Value(l.Fields, "event"), describeTags(l.Fields))
		}
		out.WriteString(describe(t, s.SpanID, indent+"  "))
	}
	return out.String()
}

func describeTags(tags []waterfall.Tag) string {
	var parts []string
	for _, tag := range tags {
		value := waterfall.Value([]waterfall.Tag{tag}, tag.Key)
		switch {
		case slices.Contains([]string{"event", "internal.span.format", "server.address", "server.port", "network.peer.address"}, tag.Key),
			strings.HasPrefix(tag.Key, "otel.scope."), strings.HasPrefix(tag.Key, "otel.library."):
			continue
		case tag.Key == "otel.status_description":
			value = elapsed.ReplaceAllString(value, "in TIME:")
		}
		parts = append(parts, " "+tag.Key+"="+value)
	}
	slices.Sort(parts)
	return strings.Join(parts, "")
}

// elapsed is the part of an error that differs from run to run.
var elapsed = regexp.MustCompile(`in [0-9.]+m?s:`)

// checkTimes holds the times of a trace to what must be so: attempts lie within the call
// and do not overlap, each begins no earlier than its wait is over, and each leaves its
// event after its end and before the next begins. Between two attempts there is a span for the
// wait, as long as was decided.
func checkTimes(t *testing.T, got waterfall.Trace) {
	t.Helper()
	call := got.Below(got.Below("")[0].SpanID)[0]
	var attempts, waits []waterfall.Span
	for _, s := range got.Below(call.SpanID) {
		if s.OperationName == telemetry.SpanWait {
			waits = append(waits, s)
		} else {
			attempts = append(attempts, s)
		}
	}
	if len(waits) != len(attempts)-1 {
		t.Fatalf("%d waits between %d attempts", len(waits), len(attempts))
	}
	if attempts[0].Start().Before(call.Start()) || attempts[len(attempts)-1].End().After(call.End()) {
		t.Errorf("attempts from %v to %v, want them within the call, from %v to %v",
			attempts[0].Start(), attempts[len(attempts)-1].End(), call.Start(), call.End())
	}
	for i, a := range attempts {
		event := call.Logs[i].Time()
		if event.Before(a.End()) || event.After(call.End()) {
			t.Errorf("event of attempt %d at %v, want it after the attempt's end at %v and within the call", i+1, event, a.End())
		}
		if i+1 == len(attempts) {
			break
		}
		decided, wait := millis(t, attempts[i+1].Tags, attemptspan.AttrWait), waits[i]
		if wait.Start().Before(a.End()) || wait.End().After(attempts[i+1].Start()) {
			t.Errorf("the wait from %v to %v is not between attempt %d, until %v, and the next, from %v",
				wait.Start(), wait.End(), i+1, a.End(), attempts[i+1].Start())
		}
		if lasted := wait.End().Sub(wait.Start()); lasted < decided || millis(t, wait.Tags, telemetry.AttrWait) != decided {
			t.Errorf("the wait before attempt %d lasts %v and says it was to last %s ms, want at least %v", i+2, lasted,
				waterfall.Value(wait.Tags, telemetry.AttrWait), decided)
		}
	}
}

// checkHedgedTimes checks that the hedge overlaps the first attempt, and that the wait begins when neither
// is in flight and lasts until the next attempt.
func checkHedgedTimes(t *testing.T, got waterfall.Trace) {
	t.Helper()
	spans := got.Below(got.Below(got.Below("")[0].SpanID)[0].SpanID)
	if len(spans) != 4 {
		t.Fatalf("%d spans below the call, want 4", len(spans))
	}
	first, hedge, wait, third := spans[0], spans[1], spans[2], spans[3]
	// The delay itself counts from before the first attempt's span, and is one of the attributes.
	if !hedge.Start().After(first.Start()) || hedge.End().After(first.End()) {
		t.Errorf("the hedge, from %v to %v, is not within the first attempt, from %v to %v",
			hedge.Start(), hedge.End(), first.Start(), first.End())
	}
	if wait.Start().Before(first.End()) || wait.End().After(third.Start()) {
		t.Errorf("the wait from %v to %v is not between the first attempt, until %v, and the third, from %v",
			wait.Start(), wait.End(), first.End(), third.Start())
	}
	if asked := third.Start().Sub(hedge.End()); asked < 400*time.Millisecond {
		t.Errorf("the third attempt follows %v after the hedge, which asked for 400 ms", asked)
	}
	if decided, lasted := millis(t, wait.Tags, telemetry.AttrWait), wait.End().Sub(wait.Start()); lasted < decided || decided == 0 {
		t.Errorf("the wait lasts %v, want at least %v", lasted, decided)
	}
}

// millis returns a tag's number of milliseconds.
func millis(t *testing.T, tags []waterfall.Tag, key string) time.Duration {
	t.Helper()
	var ms time.Duration
	if _, err := fmt.Sscan(waterfall.Value(tags, key), &ms); err != nil {
		t.Errorf("%s: %v", key, err)
	}
	return ms * time.Millisecond
}

// keep writes Jaeger's response into a file for a picture in docs, where make docs-pictures asks for it.
func keep(t *testing.T, file string, answer []byte) {
	t.Helper()
	folder := os.Getenv("E2E_KEEP_TRACES")
	if folder == "" {
		return
	}
	if err := os.WriteFile(filepath.Join(folder, file), answer, 0o644); err != nil {
		t.Errorf("keeping the trace: %v", err)
	}
}
