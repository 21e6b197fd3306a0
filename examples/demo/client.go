package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/internal/reasons"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// A client is a connection whose calls are retried and observed.
type client struct {
	echov1.EchoServiceClient
	*grpc.ClientConn
	retrier *grpcretry.Retrier
}

// dial connects to target. All that a program needs to have its calls retried is
// grpcretry.DialOptions(), even without options. Those here are for the demo, and the
// Retrier has a name because the debug page asks for it.
func dial(target string, t *telemetry, more ...grpc.DialOption) (*client, error) {
	retrier, err := grpcretry.New(
		// Without jitter, and quick, so that the picture is the same each time. In
		// production stay with the default, which has jitter: scene 3 shows why.
		grpcretry.WithBackoff(grpcretry.Exponential{
			Base: 60 * time.Millisecond, Max: time.Second, Jitter: grpcretry.NoJitter}),
		grpcretry.WithObserver(observe),
		grpcretry.WithTracerProvider(t.client),
		grpcretry.WithCallSpan(true),
	)
	if err != nil {
		return nil, err
	}
	options := append(retrier.DialOptions(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	conn, err := grpc.NewClient(target, slices.Concat(options, t.dialOptions(), more)...)
	if err != nil {
		return nil, err
	}
	return &client{echov1.NewEchoServiceClient(conn), conn, retrier}, nil
}

// A record is what an observer saw of one call.
type record struct {
	name  string
	steps []step
	end   grpcretry.Event // the CallEnd
	err   error           // what the caller got

	serverSaw int // attempts that the server counted
}

// A step is one attempt and what was decided after it.
type step struct {
	grpcretry.Attempt
	decision grpcretry.Event // the zero Event after a success
}

type recordKey struct{}

// observe collects the events of a call in the record that its context carries. All
// events of a call come one after the other, so the record needs no lock.
func observe(ctx context.Context, e grpcretry.Event) {
	r, ok := ctx.Value(recordKey{}).(*record)
	if !ok {
		return
	}
	switch e.Kind {
	case grpcretry.AttemptEnd:
		r.steps = append(r.steps, step{Attempt: e.Attempt})
	case grpcretry.Decision:
		r.steps[len(r.steps)-1].decision = e
	case grpcretry.CallEnd:
		r.end = e
	}
}

// call makes one call, whose observer finds its record in the context.
func (c *client) call(ctx context.Context, name string, req *echov1.EchoRequest, opts ...grpc.CallOption) *record {
	r := &record{name: name}
	_, r.err = c.Echo(context.WithValue(ctx, recordKey{}, r), req, opts...)
	return r
}

func (r *record) succeeded() bool { return r.err == nil }

// sent is the number of attempts that did not end before they reached a server.
func (r *record) sent() (n int) {
	for _, s := range r.steps {
		if !s.Unsent {
			n++
		}
	}
	return n
}

// rescued says whether the caller owes the success to a retry.
func (r *record) rescued() bool { return r.err == nil && len(r.steps) > 1 }

// offset is when a step began, since the start of the call.
func (r *record) offset(s step) time.Duration { return s.Start.Sub(r.steps[0].Start) }

// stopReasons are why the calls of the demo are given up, in the order of the totals.
var stopReasons = []error{
	grpcretry.ErrAttemptsExhausted,
	grpcretry.ErrBudgetExhausted,
	grpcretry.ErrDeadline,
	grpcretry.ErrPushback,
	grpcretry.ErrNotRetryable,
}

// verify checks what must hold for every call, whatever happened in it.
func (r *record) verify() error {
	if len(r.steps) == 0 {
		return errors.New("no attempt was observed")
	}
	if r.serverSaw != r.sent() {
		return fmt.Errorf("the server saw %d attempts, the client sent %d", r.serverSaw, r.sent())
	}
	for i, s := range r.steps[1:] {
		before := r.steps[i]
		ended := before.Duration
		if errors.Is(before.Err, grpcretry.ErrAttemptTimeout) {
			ended = hangsFor // the wait counts from there, not from when gRPC has returned
		}
		if earliest := before.Start.Add(ended + s.Wait); s.Start.Before(earliest) {
			return fmt.Errorf("attempt %d began %v too early", s.Number, earliest.Sub(s.Start))
		}
	}
	// A retried call that failed says so in its error, with every attempt.
	var gaveUp *grpcretry.Error
	if errors.As(r.err, &gaveUp) && len(gaveUp.Attempts) != len(r.steps) {
		return fmt.Errorf("the error tells of %d attempts, the observer of %d", len(gaveUp.Attempts), len(r.steps))
	}
	if gaveUp != nil && !errors.Is(gaveUp.Reason, r.end.Reason) {
		return fmt.Errorf("the error says %s, the observer got %s", reasons.Of(gaveUp.Reason).Word, reasons.Of(r.end.Reason).Word)
	}
	if got, observed := status.Code(r.err), status.Code(r.end.Err); got != observed {
		return fmt.Errorf("the caller got %v, the observer got %v", got, observed)
	}
	return nil
}
