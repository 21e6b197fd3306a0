//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"go.opentelemetry.io/otel/trace"

	"github.com/grpcretry/grpcretry/e2e/waterfall"
	"github.com/grpcretry/grpcretry/telemetry"
)

// A layersTest is one call through four services whose last one is down, and what Jaeger has of it.
type layersTest struct {
	setup string
	spans int
	want  string
}

var layersTests = []layersTest{
	{"everything", 18, `
client: one call, everything span.kind=internal
  client: Echo span.kind=client
    A: Echo span.kind=server
    @ grpcretry.no_retry
      A: Echo grpcretry.attempts=1 grpcretry.reason=pushback span.kind=internal
      @ grpcretry.attempt grpcretry.attempt.number=1 grpcretry.decision=stop grpcretry.reason=pushback
        A: Echo grpcretry.attempt.number=1 span.kind=client
          B: Echo span.kind=server
          @ grpcretry.no_retry
            B: Echo grpcretry.attempts=1 grpcretry.reason=pushback span.kind=internal
            @ grpcretry.attempt grpcretry.attempt.number=1 grpcretry.decision=stop grpcretry.reason=pushback
              B: Echo grpcretry.attempt.number=1 span.kind=client
                C: Echo span.kind=server
                @ grpcretry.no_retry
                  C: Echo grpcretry.attempts=3 grpcretry.reason=exhausted span.kind=internal
                  @ grpcretry.attempt grpcretry.attempt.number=1 grpcretry.decision=retry
                  @ grpcretry.attempt grpcretry.attempt.number=2 grpcretry.decision=retry
                  @ grpcretry.attempt grpcretry.attempt.number=3 grpcretry.decision=stop grpcretry.reason=exhausted
                    C: Echo grpcretry.attempt.number=1 span.kind=client
                      D: Echo span.kind=server
                    C: Echo grpcretry.attempt.number=2 span.kind=client
                      D: Echo span.kind=server
                    C: Echo grpcretry.attempt.number=3 span.kind=client
                      D: Echo span.kind=server
`},
	{"one attempt for retries", 48, `
client: one call, one attempt for retries span.kind=internal
  client: Echo span.kind=client
    A: Echo span.kind=server
      A: Echo grpcretry.attempts=3 grpcretry.reason=exhausted span.kind=internal
      @ grpcretry.attempt grpcretry.attempt.number=1 grpcretry.decision=retry
      @ grpcretry.attempt grpcretry.attempt.number=2 grpcretry.decision=retry
      @ grpcretry.attempt grpcretry.attempt.number=3 grpcretry.decision=stop grpcretry.reason=exhausted
        A: Echo grpcretry.attempt.number=1 span.kind=client
          B: Echo span.kind=server
            B: Echo grpcretry.attempts=3 grpcretry.reason=exhausted span.kind=internal
            @ grpcretry.attempt grpcretry.attempt.number=1 grpcretry.decision=retry
            @ grpcretry.attempt grpcretry.attempt.number=2 grpcretry.decision=retry
            @ grpcretry.attempt grpcretry.attempt.number=3 grpcretry.decision=stop grpcretry.reason=exhausted
              B: Echo grpcretry.attempt.number=1 span.kind=client
                C: Echo span.kind=server
                  C: Echo grpcretry.attempts=3 grpcretry.reason=exhausted span.kind=internal
                  @ grpcretry.attempt grpcretry.attempt.number=1 grpcretry.decision=retry
                  @ grpcretry.attempt grpcretry.attempt.number=2 grpcretry.decision=retry
                  @ grpcretry.attempt grpcretry.attempt.number=3 grpcretry.decision=stop grpcretry.reason=exhausted
                    C: Echo grpcretry.attempt.number=1 span.kind=client
                      D: Echo span.kind=server
                    C: Echo grpcretry.attempt.number=2 span.kind=client
                      D: Echo span.kind=server
                    C: Echo grpcretry.attempt.number=3 span.kind=client
                      D: Echo span.kind=server
              B: Echo grpcretry.attempt.number=2 span.kind=client
                C: Echo grpcretry.previous_attempts=1 grpcretry.retried_by=caller span.kind=server
                  C: Echo grpcretry.attempts=1 grpcretry.reason=caller_retries span.kind=internal
                  @ grpcretry.attempt grpcretry.attempt.number=1 grpcretry.decision=stop grpcretry.reason=caller_retries
                    C: Echo grpcretry.attempt.number=1 span.kind=client
                      D: Echo span.kind=server
              B: Echo grpcretry.attempt.number=3 span.kind=client
                C: Echo grpcretry.previous_attempts=2 grpcretry.retried_by=caller span.kind=server
                  C: Echo grpcretry.attempts=1 grpcretry.reason=caller_retries span.kind=internal
                  @ grpcretry.attempt grpcretry.attempt.number=1 grpcretry.decision=stop grpcretry.reason=caller_retries
                    C: Echo grpcretry.attempt.number=1 span.kind=client
                      D: Echo span.kind=server
        A: Echo grpcretry.attempt.number=2 span.kind=client
          B: Echo grpcretry.previous_attempts=1 grpcretry.retried_by=caller span.kind=server
            B: Echo grpcretry.attempts=1 grpcretry.reason=caller_retries span.kind=internal
            @ grpcretry.attempt grpcretry.attempt.number=1 grpcretry.decision=stop grpcretry.reason=caller_retries
              B: Echo grpcretry.attempt.number=1 span.kind=client
                C: Echo grpcretry.previous_attempts=0 grpcretry.retried_by=earlier_caller span.kind=server
                  C: Echo grpcretry.attempts=1 grpcretry.reason=caller_retries span.kind=internal
                  @ grpcretry.attempt grpcretry.attempt.number=1 grpcretry.decision=stop grpcretry.reason=caller_retries
                    C: Echo grpcretry.attempt.number=1 span.kind=client
                      D: Echo span.kind=server
        A: Echo grpcretry.attempt.number=3 span.kind=client
          B: Echo grpcretry.previous_attempts=2 grpcretry.retried_by=caller span.kind=server
            B: Echo grpcretry.attempts=1 grpcretry.reason=caller_retries span.kind=internal
            @ grpcretry.attempt grpcretry.attempt.number=1 grpcretry.decision=stop grpcretry.reason=caller_retries
              B: Echo grpcretry.attempt.number=1 span.kind=client
                C: Echo grpcretry.previous_attempts=0 grpcretry.retried_by=earlier_caller span.kind=server
                  C: Echo grpcretry.attempts=1 grpcretry.reason=caller_retries span.kind=internal
                  @ grpcretry.attempt grpcretry.attempt.number=1 grpcretry.decision=stop grpcretry.reason=caller_retries
                    C: Echo grpcretry.attempt.number=1 span.kind=client
                      D: Echo span.kind=server
`},
}

// TestJaegerHasOneTraceOfFourServices makes calls through the four processes of the command layers,
// which send their spans to Jaeger themselves.
func TestJaegerHasOneTraceOfFourServices(t *testing.T) {
	j := startJaeger(t)
	ids := traceLayers(t, j)
	for _, tt := range layersTests {
		t.Run(tt.setup, func(t *testing.T) {
			id, err := trace.TraceIDFromHex(ids[tt.setup])
			if err != nil {
				t.Fatalf("trace of %s: %v", tt.setup, err)
			}
			got, answer := j.trace(t, id, tt.spans)
			if tt.setup == "everything" {
				keep(t, "layers.json", answer)
			}
			if lines, want := describeLayers(got, "", ""), strings.TrimPrefix(tt.want, "\n"); lines != want {
				t.Errorf("Jaeger has\n%s\nwant\n%s", lines, want)
			}
		})
	}
}

// traceLayers runs the command, and returns the IDs of the traces that it names.
func traceLayers(t *testing.T, j jaeger) map[string]string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	command := filepath.Join(t.TempDir(), "layers")
	if out, err := exec.CommandContext(ctx, "go", "build", "-o", command, "./layers").CombinedOutput(); err != nil {
		t.Fatalf("go build ./layers: %v\n%s", err, out)
	}
	out, err := exec.CommandContext(ctx, command, "-otlp", j.otlp).CombinedOutput()
	if err != nil {
		t.Fatalf("layers: %v\n%s", err, out)
	}
	ids := map[string]string{}
	for _, line := range regexp.MustCompile(`(?m)^(.*): trace ([0-9a-f]{32})$`).FindAllStringSubmatch(string(out), -1) {
		ids[line[1]] = line[2]
	}
	return ids
}

// describeLayers is a trace as text: a line for each span, with its service, and for each event. Only
// what tells a reader about attempts is shown.
func describeLayers(t waterfall.Trace, parent, indent string) string {
	var out strings.Builder
	for _, s := range t.Below(parent) {
		if s.OperationName == telemetry.SpanWait {
			continue
		}
		fmt.Fprintf(&out, "%s%s: %s%s\n", indent, t.Service(s), s.OperationName[strings.LastIndex(s.OperationName, "/")+1:],
			describeAttempts(s.Tags))
		for _, l := range s.Logs {
			fmt.Fprintf(&out, "%s@ %s%s\n", indent, waterfall.Value(l.Fields, "event"), describeAttempts(l.Fields))
		}
		out.WriteString(describeLayers(t, s.SpanID, indent+"  "))
	}
	return out.String()
}

// describeAttempts leaves out what differs from run to run.
func describeAttempts(tags []waterfall.Tag) string {
	var parts []string
	for _, tag := range tags {
		if slices.Contains([]string{telemetry.AttrAttemptCount, telemetry.AttrAttemptNumber, telemetry.AttrDecision, telemetry.AttrReason,
			telemetry.AttrPreviousAttempts, telemetry.AttrRetriedBy, "span.kind"}, tag.Key) {
			parts = append(parts, " "+tag.Key+"="+waterfall.Value([]waterfall.Tag{tag}, tag.Key))
		}
	}
	slices.Sort(parts)
	return strings.Join(parts, "")
}
