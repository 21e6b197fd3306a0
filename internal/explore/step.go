package explore

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/grpcretrytest"
	"github.com/grpcretry/grpcretry/internal/reasons"
)

// A step is one of the kit's, with what the judge has to know about it.
type step struct {
	grpcretrytest.Step
	kind    stepKind
	code    codes.Code // of one that fails
	delay   time.Duration
	trailer metadata.MD // the pushback
}

type stepKind int

const (
	answers stepKind = iota
	fails
	hangs
	cuts
)

func failing(code codes.Code) step {
	return step{Step: grpcretrytest.Fail(code, "drawn"), kind: fails, code: code}
}

func (s step) after(d time.Duration) step {
	s.Step, s.delay = s.Step.After(d), d
	return s
}

func (s step) pushback(d time.Duration) step {
	return s.pushbackValue(strconv.FormatInt(d.Milliseconds(), 10))
}

func (s step) pushbackValue(values ...string) step {
	s.Step, s.trailer = s.Step.PushbackValue(values...), metadata.MD{"grpc-retry-pushback-ms": values}
	return s
}

// attemptsKey is the metadata by which the kit, as every server, knows the number of an attempt.
const attemptsKey = "grpc-previous-rpc-attempts"

// script gives the server the steps of all calls, one after the other.
func (p program) script(server *grpcretrytest.Server) {
	var all []grpcretrytest.Step
	for _, c := range p.calls {
		for _, s := range c.steps {
			all = append(all, s.Step)
		}
	}
	server.On("/", all...)
}

// scripted returns the step of an attempt, and its context with the number of that step in the server's script. An
// attempt without a step has a number after the last.
func (p program) scripted(ctx context.Context, call, attempt int) (step, context.Context) {
	found, number, steps := step{}, 0, 0
	for _, c := range p.calls {
		if c.number == call && attempt <= len(c.steps) {
			found, number = c.steps[attempt-1], steps+attempt
		}
		steps += len(c.steps)
	}
	if number == 0 {
		number = steps + 1
	}
	md, _ := metadata.FromIncomingContext(ctx)
	md = md.Copy()
	md.Set(attemptsKey, strconv.Itoa(number-1))
	return found, metadata.NewIncomingContext(ctx, md)
}

// timeline describes a call's attempts and its end, for a report.
func timeline(end *grpcretry.Event) string {
	attempts := attemptsOf(end)
	var all []string
	for _, a := range attempts {
		text := fmt.Sprintf("%v attempt %d", a.Start.Sub(attempts[0].Start), a.Number)
		if a.WaitSource != 0 {
			text = fmt.Sprintf("wait %v %v; %s", a.Wait, a.WaitSource, text)
		}
		if a.Hedge {
			text += ", a hedge,"
		}
		all = append(all, fmt.Sprintf("%s %v after %v", text, a.Code(), a.Duration))
	}
	if end.Err != nil {
		all = append(all, fmt.Sprintf("%v stop %s", end.Elapsed, reasons.Of(end.Reason).Word))
	}
	return strings.Join(all, "; ")
}

func count(n int, one, many string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, many)
}
