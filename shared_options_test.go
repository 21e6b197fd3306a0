package grpcretry

import (
	"context"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// This file passes options in ways that their authors may not think of: twice, to two Retriers, changed
// afterwards, in a type of one's own, and from a logger.

// TestLoggerMayUpdate: a logger that reacts to a warning with an Update does not wait for itself.
func TestLoggerMayUpdate(t *testing.T) {
	var r *Retrier
	log := &callingHandler{Handler: slog.DiscardHandler}
	r = retrierOf(t, WithLogger(slog.New(log)))
	log.call = func() {
		log.call = nil
		if err := r.Update(WithAttemptTimeout(time.Second)); err != nil {
			t.Error(err)
		}
	}
	if err := r.Update(WithAttemptTimeout(time.Nanosecond)); err != nil {
		t.Fatal(err)
	}
	if p := r.Policy("/a.Service/Method"); log.call != nil || p.AttemptTimeout != time.Second {
		t.Errorf("the timeout is %v, want that of the logger's Update", p.AttemptTimeout)
	}
}

type callingHandler struct {
	slog.Handler
	call func()
}

func (h *callingHandler) Enabled(context.Context, slog.Level) bool { return true }

func (h *callingHandler) Handle(context.Context, slog.Record) error {
	if h.call != nil {
		h.call()
	}
	return nil
}

func TestOptionInAnotherType(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := serve(t, always(unavailable()))
		client := f.client(t, WithBackoff(Constant(0)), WithBudget(Unlimited))
		_, err := client.Echo(t.Context(), &echov1.EchoRequest{}, namedOption{WithMaxAttempts(2), "twice"})
		if n := len(f.attempts()); n != 2 {
			t.Errorf("%d attempts, want 2: %v", n, err)
		}
		_, err = client.Echo(t.Context(), &echov1.EchoRequest{}, namedOption{WithMaxAttempts(-1), "never"})
		if status.Code(err) != codes.Internal {
			t.Errorf("error %v, want INTERNAL because of the invalid value", err)
		}
	})
}

// A namedOption is an option in a type of the application's own.
type namedOption struct {
	CallOption
	name string
}
