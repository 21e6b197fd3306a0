package grpcretry

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry/internal/recorded"
	"github.com/grpcretry/grpcretry/telemetry"
)

func TestErrorSpeaksForTheServersLastStatus(t *testing.T) {
	bubble(t, func(t *testing.T) {
		info := &errdetails.ErrorInfo{Reason: "FAILOVER"}
		server := serve(t, script(overloaded(), fail(codes.Unavailable, "db-down", info)))
		_, err := server.client(t, steady, WithMaxAttempts(2)).Echo(t.Context(), request())

		for name, err := range map[string]error{"as it came": err, "wrapped": fmt.Errorf("loading cart: %w", err)} {
			st, ok := status.FromError(err)
			if !ok || st.Code() != codes.Unavailable || !strings.Contains(st.Message(), "db-down") {
				t.Errorf("%s: status is %v, want the server's", name, st)
			}
			details := st.Details()
			if len(details) != 1 || details[0].(*errdetails.ErrorInfo).GetReason() != "FAILOVER" {
				t.Errorf("%s: details are %v, want the server's", name, details)
			}
		}
		if st := status.Convert(err); st.Message() != "db-down" {
			t.Errorf("message is %q, want the server's exactly", st.Message())
		}
		const want = "grpcretry: gave up after 2 attempts in 1s: no attempts left: rpc error: code = Unavailable desc = db-down"
		if err.Error() != want {
			t.Errorf("text is %q, want %q", err, want)
		}
	})
}

func TestErrorListsTheAttempts(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(unavailable().after(2*second), hang(), overloaded().pushback("9000")))
		_, err := server.client(t, steady, WithMaxAttempts(3), WithAttemptTimeout(4*second)).Echo(t.Context(), request())
		e := asError(t, err)
		type brief struct {
			number                int
			start, duration, wait time.Duration
			source                WaitSource
			code                  codes.Code
			timedOut              bool
		}
		var got []brief
		for _, a := range e.Attempts {
			got = append(got, brief{a.Number, a.Start.Sub(server.start), a.Duration, a.Wait, a.WaitSource, a.Code(),
				errors.Is(a.Err, ErrAttemptTimeout)})
		}
		want := []brief{
			{1, 0, 2 * second, 0, waitNone, codes.Unavailable, false},
			{2, 3 * second, 6 * second, 1 * second, WaitBackoff, codes.DeadlineExceeded, true},
			{3, 9 * second, 0, 2 * second, WaitBackoff, codes.ResourceExhausted, false},
		}
		if !slices.Equal(got, want) {
			t.Errorf("attempts are\n%v, want\n%v", got, want)
		}
		if e.Attempts[0].Peer == nil || e.Attempts[0].Method != "/grpcretry.test.v1.EchoService/Echo" {
			t.Errorf("attempt is %+v, want its peer and method", e.Attempts[0])
		}
	})
}

func TestErrorOfABudgetStopSaysThatItIsTheClients(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(unavailable()))
		_, err := server.client(t, WithBudget(&aBudget{refuse: true}), WithPatience(0)).Echo(t.Context(), request())
		if !strings.Contains(err.Error(), "client-side retry budget") || !strings.Contains(err.Error(), "1 attempt ") {
			t.Errorf("%q does not name the client-side retry budget and the attempts", err)
		}
	})
}

func TestErrorOfAnEndedContextKeepsTheServersWord(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(unavailable(), hang()))
		ctx, cancel := context.WithTimeout(t.Context(), 5*second)
		defer cancel()
		_, err := server.client(t, steady).Echo(ctx, request())
		e := wantStop(t, err, codes.DeadlineExceeded, context.DeadlineExceeded, 2)
		if status.Code(e.Last) != codes.Unavailable || !strings.Contains(err.Error(), "db-down") {
			t.Errorf("%v: Last is %v, want what the server said to attempt 1", err, e.Last)
		}
		if st := status.Convert(err); !strings.Contains(st.Message(), "db-down") {
			t.Errorf("status message %q does not keep the server's word", st.Message())
		}
		if errors.Is(err, context.Canceled) {
			t.Error("errors.Is finds context.Canceled after a deadline")
		}
		var said interface{ GRPCStatus() *status.Status }
		found := false
		for _, inner := range e.Unwrap() {
			if errors.As(inner, &said) && said.GRPCStatus().Code() == codes.Unavailable {
				found = true
			}
		}
		if !found {
			t.Errorf("Unwrap gives %v, want the server's word among them", e.Unwrap())
		}
	})
}

// Programs make an Error in their tests, too.
func TestAnErrorThatAProgramMade(t *testing.T) {
	for _, tt := range []struct {
		err    *Error
		text   string
		status *status.Status
		holds  []error
	}{
		{&Error{}, "gave up after 0 attempts in 0s: unknown reason: <nil>", nil, nil},
		{&Error{Last: errUnavailable, Attempts: make([]Attempt, 1)}, "gave up after 1 attempt in 0s: unknown reason: " + errUnavailable.Error(),
			status.Convert(errUnavailable), []error{errUnavailable}},
		{&Error{Reason: ErrDeadline, Attempts: make([]Attempt, 2), Elapsed: second},
			"gave up after 2 attempts in 1s: deadline too near for another attempt: <nil>", nil, []error{ErrDeadline}},
	} {
		text := "grpcretry: " + tt.text
		if tt.status == nil {
			tt.status = status.New(codes.Unknown, text)
		}
		if got := tt.err.Error(); got != text {
			t.Errorf("text is %q, want %q", got, text)
		}
		if got := tt.err.GRPCStatus(); got.String() != tt.status.String() {
			t.Errorf("status is %v, want %v", got, tt.status)
		}
		if got := tt.err.Unwrap(); !slices.Equal(got, tt.holds) {
			t.Errorf("%v holds %v, want %v", tt.err, got, tt.holds)
		}
	}
}

func TestDeadlineWithACauseOfItsOwn(t *testing.T) {
	bubble(t, func(t *testing.T) {
		cause := errors.New("request budget spent")
		server := serve(t, always(hang()))
		ctx, cancel := context.WithTimeoutCause(t.Context(), 5*second, cause)
		defer cancel()
		_, err := server.client(t, WithCodes(codes.DeadlineExceeded)).Echo(ctx, request())
		wantStop(t, err, codes.DeadlineExceeded, context.DeadlineExceeded, 1)
	})
}

// If a call is cancelled because another one gave up, that reason is not its own.
func TestAReasonOfAnotherCallIsNotOurs(t *testing.T) {
	sibling := &Error{Last: errUnavailable, Reason: ErrBudgetExhausted}
	mine := errors.New("user went away")
	for _, tt := range []struct {
		name  string
		cause error
		is    []error
		isNot []error
	}{
		{"an Error of another call", sibling, []error{sibling}, []error{ErrBudgetExhausted}},
		{"wrapped", fmt.Errorf("%w: %w", mine, sibling), []error{mine, sibling}, []error{ErrBudgetExhausted}},
		{"a reason alone", ErrDeadline, nil, []error{ErrDeadline}},
		{"with the attempt timeout", errors.Join(ErrTargetDown, ErrAttemptTimeout), nil, []error{ErrTargetDown}},
		{"the application's", mine, []error{mine}, []error{ErrBudgetExhausted}},
		{"none", nil, nil, []error{ErrBudgetExhausted}},
	} {
		for _, when := range []string{"in an attempt", "in a wait"} {
			t.Run(tt.name+", "+when, func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					spans := &recorded.Spans{}
					var events []Event
					opts := []Option{steady, WithTracerProvider(spans), WithCallSpan(true), WithObserver(func(_ context.Context, e Event) {
						events = append(events, e)
					})}
					ctx, cancel := context.WithCancelCause(t.Context())
					time.AfterFunc(second/2, func() { cancel(tt.cause) })
					err := UnaryClientInterceptor(opts...)(ctx, brokenMethod, nil, &basket{}, nil,
						func(ctx context.Context, _ string, _, _ any, _ *grpc.ClientConn, _ ...grpc.CallOption) error {
							if when == "in a wait" {
								return errUnavailable
							}
							<-ctx.Done()
							return status.FromContextError(ctx.Err()).Err()
						})
					e := asError(t, err)
					cause := tt.cause
					if cause == nil {
						cause = context.Canceled
					}
					if e.Reason != cause && cause != ErrDeadline {
						t.Errorf("Reason is %v, want the cause, %v", e.Reason, cause)
					}
					for _, target := range append(tt.is, context.Canceled) {
						if !errors.Is(err, target) {
							t.Errorf("errors.Is(%v, %v) is false", err, target)
						}
					}
					for _, target := range tt.isNot {
						if errors.Is(err, target) {
							t.Errorf("errors.Is(%v, %v) is true", err, target)
						}
					}
					if got := status.Code(err); got != codes.Canceled {
						t.Errorf("status.Code = %v, want Canceled", got)
					}
					if got := recorded.Text(withoutWaits(spans)[0].Attributes()); !strings.Contains(got, telemetry.AttrReason+"=cancelled") {
						t.Errorf("call span has %s, want the reason cancelled", got)
					}
					if got := outcomeOf(events[len(events)-1]); got != "cancelled" {
						t.Errorf("outcome is %s, want cancelled", got)
					}
				})
			})
		}
	}
}

// The length of an Error's text and of log lines is bounded, whatever servers send.
func TestTheTextOfLargeFailuresIsBounded(t *testing.T) {
	const large = 1 << 18
	message := strings.Repeat("é", large/2)
	details := &errdetails.ErrorInfo{Reason: strings.Repeat("r", large)}
	st, err := status.New(codes.Unavailable, message).WithDetails(details)
	if err != nil {
		t.Fatal(err)
	}
	var logs bytes.Buffer
	opts := []Option{WithMaxAttempts(100), WithBackoff(Constant(0)), WithBudget(Unlimited), WithPatience(0),
		WithLogger(slog.New(slog.NewTextHandler(&logs, &slog.HandlerOptions{Level: slog.LevelDebug})))}
	err = UnaryClientInterceptor(opts...)(t.Context(), brokenMethod, nil, &basket{}, nil,
		func(_ context.Context, _ string, _, _ any, _ *grpc.ClientConn, opts ...grpc.CallOption) error {
			for _, o := range opts {
				if o, ok := o.(grpc.TrailerCallOption); ok {
					*o.TrailerAddr = metadata.Pairs("grpc-status-details-bin", strings.Repeat("r", large), "k", "v")
				}
			}
			return st.Err()
		})
	e := wantStop(t, err, codes.Unavailable, ErrAttemptsExhausted, 100)
	for _, a := range e.Attempts {
		if first(a.Trailer["k"]) != "v" || status.Convert(a.Err).Message() != message {
			t.Errorf("attempt %d is not kept as it was", a.Number)
		}
	}
	if got := status.Convert(err); got.Message() != message || len(got.Details()) != 1 {
		t.Error("the status is not the server's")
	}
	if text := err.Error(); len(text) > 2<<10 || !utf8.ValidString(text) || !strings.HasSuffix(text, "…") {
		t.Errorf("the text has %d bytes and ends with %q", len(text), text[max(0, len(text)-10):])
	}
	for line := range strings.Lines(logs.String()) {
		if len(line) > 4<<10 {
			t.Errorf("a log line has %d bytes", len(line))
		}
	}
}

// A server forbade a retry, although it was not the last to answer: of a hedged call, any attempt may have heard that.
func TestAServerFurtherDownHasForbiddenARetry(t *testing.T) {
	forbids := metadata.Pairs(pushbackKey, "-1")
	for _, c := range []struct {
		attempts []Attempt
		want     bool
	}{
		{[]Attempt{{Trailer: forbids}, {}}, true},
		{[]Attempt{{}, {Trailer: forbids}}, true},
		{[]Attempt{{Trailer: metadata.Pairs(pushbackKey, "5")}}, false},
		{nil, false},
	} {
		e := &Error{Reason: ErrNotRetryable, Attempts: c.attempts}
		if got := tellsOfGivingUp(fmt.Errorf("handler: %w", e)); got != c.want {
			t.Errorf("attempts %+v: the handler's error tells of giving up: %t, want %t", c.attempts, got, c.want)
		}
	}
}

// brittle is an error whose methods panic if it is a nil pointer.
type brittle struct{ text string }

func (b *brittle) Error() string { return b.text }

// Others have a method Error that works, or nothing but that panics.
type (
	brittleStatus struct{ error }
	brittleIs     struct{ error }
	brittleText   struct{ *brittle }
)

func (brittleStatus) GRPCStatus() *status.Status { panic("no status") }
func (brittleIs) Is(error) bool                  { panic("not comparable") }
func (brittleText) GRPCStatus() *status.Status   { return status.Convert(errUnavailable) }

func TestAnErrorWhoseMethodsPanic(t *testing.T) {
	for _, broken := range []error{(*brittle)(nil), brittleStatus{errDown}, brittleIs{errDown}, brittleText{}} {
		t.Run(fmt.Sprintf("%T", broken), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				err := invokeEcho(t.Context(), UnaryClientInterceptor(), func(context.Context, int) error { return broken })
				if want := fmt.Sprintf("grpcretry: an error of type %T, whose methods panic", broken); err == nil || err.Error() != want {
					t.Errorf("err = %v, want %s", err, want)
				}
			})
		})
	}
}

// What some errors wrap cannot be compared: the text of a validator, for example, is often a slice.
func TestAnErrorThatCannotBeCompared(t *testing.T) {
	invalid := struct{ error }{errorList{"no name"}}
	bubble(t, func(t *testing.T) {
		cc := serveScripts(t, "hang").conn(t, append(DialOptions(steady), below(func(s grpc.ClientStream) grpc.ClientStream {
			return &hookedStream{ClientStream: s, send: func(any) error { return invalid }}
		}))...)
		app := openOn(t, cc, bidiStream)
		defer app.cancel()
		if err := app.stream.SendMsg(request()); err == nil || err.Error() != invalid.Error() {
			t.Errorf("SendMsg = %v, want %v", err, invalid)
		}
	})
	ctx, cancel := context.WithCancelCause(t.Context())
	err := retrierOf(t, steady).Do(ctx, "/sql/read", func(ctx context.Context) error {
		cancel(invalid)
		return context.Cause(ctx)
	})
	if e := asError(t, err); e.Reason.Error() != invalid.Error() || len(e.Attempts) != 1 {
		t.Errorf("Do = %v, want the caller's cause", err)
	}
}

type errorList []string

func (l errorList) Error() string { return strings.Join(l, ", ") }
