package grpcretry

import (
	"context"
	"errors"
	"math"
	"slices"
	"strconv"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	statuspb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/grpcretry/grpcretry/internal/layers"
	"github.com/grpcretry/grpcretry/internal/messages"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// FuzzFailure has a server fail with any status, pushback and bytes as status details. A plain client
// shows what gRPC makes of that. With the library, the next attempt comes exactly when this asks for it, or
// never, and the error is that of the plain client.
func FuzzFailure(f *testing.F) {
	for i, value := range []string{"0", "1500", "300000", "300001", "2147483647", "2147483648", "-1", "007", " 5", "\x00", ""} {
		f.Add(uint8(14), "db-down", value, "", []byte(nil))
		f.Add(uint8(i), "queue full", value, value, []byte("\x08\x0e\x12\x01x"))
	}
	for _, info := range []time.Duration{0, -1, 7 * time.Second, 300 * time.Second, 301 * time.Second, math.MaxInt64} {
		details, err := anypb.New(retryInfoOf(info))
		if err != nil {
			f.Fatal(err)
		}
		for _, list := range [][]*anypb.Any{{details}, {{TypeUrl: retryInfoURL, Value: []byte{0xff}}, details},
			{{TypeUrl: "x"}, details, details}} {
			raw, err := proto.Marshal(&statuspb.Status{Code: 14, Message: "db-down", Details: list})
			if err != nil {
				f.Fatal(err)
			}
			f.Add(uint8(14), "db-down", "", "", raw)
			f.Add(uint8(8), "db-down", "", "", raw)
		}
	}
	f.Fuzz(func(t *testing.T, code uint8, message, first, second string, details []byte) {
		trailer := metadata.MD{}
		for _, value := range []string{first, second} {
			if value != "" {
				trailer.Append(pushbackKey, value)
			}
		}
		if details != nil {
			trailer.Set("grpc-status-details-bin", string(details))
		}
		bubble(t, func(t *testing.T) {
			failure := fail(codes.Code(code%20), message)
			failure.trailer = trailer
			server := serve(t, func(n int) answer {
				if n <= 2 {
					return failure
				}
				return ok()
			})
			var got metadata.MD
			plain := echov1.NewEchoServiceClient(server.conn(t, grpc.WithDisableRetry()))
			_, plainErr := plain.Echo(t.Context(), request(), grpc.Trailer(&got))
			start := time.Since(server.start)
			_, err := server.fixed(t, 0, steady, WithBudget(Unlimited)).Echo(t.Context(), request())
			checkDelay(t, server.times(), start, got, plainErr, err)
		})
	})
}

// checkDelay checks the attempts that the server saw: the first is a plain client's, the second starts the
// call, and the third is its retry.
func checkDelay(t *testing.T, at []time.Duration, start time.Duration, trailer metadata.MD, plain, err error) {
	wait, retried := wantDelay(trailer, plain)
	switch {
	case !retried && len(at) != 2, retried && len(at) != 3:
		t.Errorf("%v with %q: attempts at %v, want a retry: %v", plain, trailer, at, retried)
	case retried && (at[2] != start+wait || err != nil):
		t.Errorf("%v with %q: %v after attempts at %v, want a retry after %v", plain, trailer, err, at, wait)
	case !retried && (status.Code(err) != status.Code(plain) || err != nil && !errors.Is(err, ErrPushback) && err.Error() != plain.Error()):
		t.Errorf("%v, want %v", err, plain)
	}
}

// wantDelay returns the wait that a failure asks for by gRFC A6 #pushback, and by its RetryInfo; retried is
// false if there is no retry.
func wantDelay(trailer metadata.MD, err error) (wait time.Duration, retried bool) {
	if code := status.Code(err); code != codes.Unavailable && code != codes.ResourceExhausted || code == codes.ResourceExhausted &&
		messages.IsSize(status.Convert(err).Message()) {
		return 0, false
	}
	const longest = 5 * time.Minute
	if values := trailer[pushbackKey]; len(values) > 0 {
		ms, parseErr := strconv.ParseInt(values[0], 10, 32)
		isPlain := parseErr == nil && strconv.FormatInt(ms, 10) == values[0]
		wait = time.Duration(ms) * time.Millisecond
		return wait, len(values) == 1 && isPlain && ms >= 0 && wait <= longest
	}
	for _, detail := range status.Convert(err).Details() {
		info, isInfo := detail.(*errdetails.RetryInfo)
		if !isInfo || !info.GetRetryDelay().IsValid() {
			continue
		}
		if wait := info.GetRetryDelay().AsDuration(); wait > 0 {
			return wait, wait <= longest
		}
		break
	}
	return time.Second, true
}

// FuzzRequestHeaders has a client send any number of previous attempts, and any note of a retry further up.
// The server reads the largest number that is valid, and its calls make one attempt if the request is a
// retry, unless the note is "0".
func FuzzRequestHeaders(f *testing.F) {
	for _, value := range []string{"", "0", "1", "-1", "007", "2147483647", "2147483648", "9999999999999999999999", "+1", "1,2",
		"\xff", "٣"} {
		f.Add(value, "1", uint8(1), uint8(0))
		f.Add(value, "2", uint8(2), uint8(1))
		f.Add(value, value, uint8(0), uint8(2))
	}
	interceptors := []grpc.UnaryServerInterceptor{UnaryServerInterceptor(),
		UnaryServerInterceptor(withMeasures(layers.Measures{StopsCallers: true}))}
	client := UnaryClientInterceptor(WithMaxAttempts(3), WithBackoff(Constant(0)), WithBudget(Unlimited), WithPatience(0))
	f.Fuzz(func(t *testing.T, first, second string, numbers, notes uint8) {
		values := []string{first, second}
		md := metadata.MD{}
		md[previousAttemptsKey] = values[:numbers%3]
		md[callerRetriesKey] = values[:notes%3]
		want := 0
		for _, value := range md[previousAttemptsKey] {
			if n, err := strconv.ParseInt(value, 10, 32); err == nil && strconv.FormatInt(n, 10) == value {
				want = max(want, int(n))
			}
		}
		wantAttempts := 3
		notZero := func(value string) bool { return value != "0" }
		if note := md[callerRetriesKey]; want > 0 && len(note) == 0 || slices.ContainsFunc(note, notZero) {
			wantAttempts = 1
		}
		for i, intercept := range interceptors {
			_, err := intercept(metadata.NewIncomingContext(t.Context(), md), nil, &grpc.UnaryServerInfo{FullMethod: "/s/m"},
				func(ctx context.Context, _ any) (any, error) {
					if got := PreviousAttempts(ctx); got != want {
						t.Errorf("PreviousAttempts with %q = %d, want %d", md, got, want)
					}
					made, err := invoke(ctx, client, func(context.Context, int) error { return errUnavailable })
					if made != []int{wantAttempts, 3}[i] {
						t.Errorf("%d attempts for a request with %q, want %d", made, md, []int{wantAttempts, 3}[i])
					}
					return nil, err
				})
			if status.Code(err) != codes.Unavailable {
				t.Errorf("err = %v", err)
			}
		}
	})
}
