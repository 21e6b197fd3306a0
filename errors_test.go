package grpcretry

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
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
			{1, 0, 2 * second, 0, WaitNone, codes.Unavailable, false},
			{2, 3 * second, 4 * second, 1 * second, WaitBackoff, codes.DeadlineExceeded, true},
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
		_, err := server.client(t, WithBudget(&aBudget{refuse: true})).Echo(t.Context(), request())
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

func TestReasonsAreOneEach(t *testing.T) {
	reasons := []error{ErrAttemptsExhausted, ErrBudgetExhausted, ErrDeadline, ErrMaxElapsed, ErrPushback, ErrNotRetryable, ErrCommitted,
		errConnClosed}
	names := map[string]bool{}
	for i, reason := range reasons {
		names[ReasonName(reason)] = true
		err := error(&Error{Last: unavailable().err, Reason: reason})
		for j, other := range reasons {
			if errors.Is(err, other) != (i == j) {
				t.Errorf("errors.Is(%v, %v) is wrong", err, other)
			}
		}
	}
	if len(names) != len(reasons) {
		t.Errorf("%d names for %d reasons: %v", len(names), len(reasons), names)
	}
}

// An Error that a user's test creates by hand has a sensible text, too.
func TestErrorMadeByHand(t *testing.T) {
	e := &Error{}
	if got := status.Code(e); got != codes.Unknown {
		t.Errorf("code is %v, want Unknown", got)
	}
	if got := e.Error(); got == "" || len(e.Unwrap()) != 0 {
		t.Errorf("text is %q, Unwrap %v", got, e.Unwrap())
	}
	e = &Error{Last: errors.New("plain"), Reason: ErrPushback, Attempts: make([]Attempt, 2)}
	if got := e.Error(); !strings.Contains(got, "2 attempts") || !strings.Contains(got, "plain") {
		t.Errorf("text is %q", got)
	}
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
		{"with the attempt timeout", errors.Join(ErrNotConnected, ErrAttemptTimeout), nil, []error{ErrNotConnected}},
		{"the application's", mine, []error{mine}, []error{ErrBudgetExhausted}},
		{"none", nil, nil, []error{ErrBudgetExhausted}},
	} {
		for _, when := range []string{"in an attempt", "in a wait"} {
			t.Run(tt.name+", "+when, func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					spans, recorder := recordSpans()
					var events []Event
					opts := []Option{steady, WithTracerProvider(spans), WithCallSpan(true), WithObserver(func(_ context.Context, e Event) { events = append(events, e) })}
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
					if got := attributeLine(withoutWaits(recorder)[0].Attributes()); !strings.Contains(got, telemetry.AttrReason+"=cancelled") {
						t.Errorf("call span has %s, want the reason cancelled", got)
					}
					if got := events[len(events)-1].Outcome(); got != "cancelled" {
						t.Errorf("outcome is %s, want cancelled", got)
					}
				})
			})
		}
	}
}

// An interceptor below may return the Error of a call that it made itself.
func TestAReasonInTheLastErrorIsNotOurs(t *testing.T) {
	inner := &Error{Last: errUnavailable, Reason: ErrBudgetExhausted}
	err := UnaryClientInterceptor(WithMaxAttempts(2), WithBackoff(Constant(0)))(t.Context(), brokenMethod, nil, &basket{}, nil,
		func(context.Context, string, any, any, *grpc.ClientConn, ...grpc.CallOption) error { return inner })
	e := wantStop(t, err, codes.Unavailable, ErrAttemptsExhausted, 2)
	if e.Last != error(inner) || !errors.Is(err, inner) || errors.Is(err, ErrBudgetExhausted) {
		t.Errorf("err = %v with Last %v, want the inner error in it, and not its reason", err, e.Last)
	}
}

// The memory that an Error keeps and the length of its text are bounded, whatever servers send.
func TestAnErrorOfLargeFailuresIsBounded(t *testing.T) {
	const large = 1 << 18
	message := strings.Repeat("é", large/2)
	details := &errdetails.ErrorInfo{Reason: strings.Repeat("r", large)}
	st, err := status.New(codes.Unavailable, message).WithDetails(details)
	if err != nil {
		t.Fatal(err)
	}
	var logs bytes.Buffer
	opts := []Option{WithMaxAttempts(100), WithBackoff(Constant(0)), WithBudget(Unlimited), WithCommitOnHeaders(false),
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
	kept := 0
	for _, a := range e.Attempts[:99] {
		kept += len(status.Convert(a.Err).Message()) + len(fmt.Sprint(a.Trailer)) + len(fmt.Sprint(status.Convert(a.Err).Proto().GetDetails()))
		if a.Code() != codes.Unavailable || !utf8.ValidString(status.Convert(a.Err).Message()) {
			t.Errorf("attempt %d ended with %v", a.Number, a.Code())
		}
	}
	if kept > 64<<10 {
		t.Errorf("%d bytes are kept of 99 attempts, want at most 64 KiB", kept)
	}
	if last := e.Attempts[99]; first(last.Trailer["k"]) != "v" || status.Convert(last.Err).Message() != message {
		t.Error("the last attempt is not kept as it was")
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

// It is also bounded if attempts fail with the error of a call below, whose details are not in their
// own trailers.
func TestAnErrorOfLargeFailuresBelowIsBounded(t *testing.T) {
	large := strings.Repeat("r", 1<<20)
	detailed, err := status.New(codes.Unavailable, "db-down").WithDetails(&errdetails.ErrorInfo{Reason: large})
	if err != nil {
		t.Fatal(err)
	}
	for name, below := range map[string]error{
		"its details":  detailed.Err(),
		"its attempts": &Error{Last: errUnavailable, Reason: ErrAttemptsExhausted, Attempts: []Attempt{{Number: 1, Err: errUnavailable, Trailer: metadata.Pairs("k", large)}}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := invoke(t.Context(), UnaryClientInterceptor(WithBackoff(Constant(0))), func(context.Context, int) error { return below })
			e := wantStop(t, err, codes.Unavailable, ErrAttemptsExhausted, 4)
			for _, a := range e.Attempts[:3] {
				if inner := (*Error)(nil); errors.As(a.Err, &inner) || len(status.Convert(a.Err).Details()) > 0 || a.Code() != codes.Unavailable {
					t.Errorf("attempt %d keeps %T, want only its code and message", a.Number, a.Err)
				}
			}
			if last := e.Attempts[3].Err; last != below {
				t.Errorf("the last attempt has %v, want the error as it came", last)
			}
		})
	}
}

// Headers and trailers that fit are kept for every attempt.
func TestAnErrorOfSmallFailuresKeepsAll(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(unavailable().withTrailer("k", "v")))
		_, err := server.client(t, steady, WithBudget(Unlimited)).Echo(t.Context(), request())
		for _, a := range wantStop(t, err, codes.Unavailable, ErrAttemptsExhausted, 4).Attempts {
			if first(a.Trailer["k"]) != "v" || status.Convert(a.Err).Message() != "db-down" {
				t.Errorf("attempt %d has trailer %v and error %v", a.Number, a.Trailer, a.Err)
			}
		}
	})
}

// The wait in the text was not started.
func TestTheTextNamesAWaitThatWasNotStarted(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(unavailable()))
		_, err := server.client(t, steady, WithMaxElapsed(second/2)).Echo(t.Context(), request())
		const want = "grpcretry: gave up after 1 attempt in 0s: maximum elapsed time too near for another attempt" +
			" (a wait of 1s by backoff was not started): rpc error: code = Unavailable desc = db-down"
		if err.Error() != want {
			t.Errorf("text is %q, want %q", err, want)
		}
	})
}

// gRPC's own error for an attempt that the timeout has cut is kept: here, why there was no
// connection.
func TestAnAttemptTimeoutKeepsGRPCsWords(t *testing.T) {
	refused := errors.New("connection refused")
	for _, kind := range []string{"unary", "stream"} {
		t.Run(kind, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, script())
				cc := server.conn(t, append(DialOptions(WithAttemptTimeout(10*second), WithMaxAttempts(2), WithConnectWait(0)),
					grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) { return nil, refused }))...)
				err := echoOnce(t.Context(), cc, kind, grpc.WaitForReady(true))
				e := wantStop(t, err, codes.DeadlineExceeded, ErrAttemptsExhausted, 2)
				for _, a := range e.Attempts {
					if !strings.Contains(a.Err.Error(), "attempt timeout of 10s: ") || !strings.Contains(a.Err.Error(), refused.Error()) ||
						a.Code() != codes.DeadlineExceeded || !errors.Is(a.Err, ErrAttemptTimeout) {
						t.Errorf("attempt %d ended with %v, want the timeout and gRPC's words", a.Number, a.Err)
					}
					found := false
					for _, inner := range a.Err.(interface{ Unwrap() []error }).Unwrap() {
						found = found || status.Code(inner) == codes.Canceled && strings.Contains(inner.Error(), refused.Error())
					}
					if !found {
						t.Errorf("Unwrap of %v does not give gRPC's error", a.Err)
					}
				}
				if !strings.Contains(err.Error(), refused.Error()) || errors.Is(err, context.Canceled) {
					t.Errorf("err = %v, want the words, and nothing of a cancellation", err)
				}
			})
		})
	}
}
