package httpretry

import (
	"context"
	"errors"
	"io"
	"net/http"
	"testing"

	"github.com/grpcretry/grpcretry"
)

// A failure that is not followed by another attempt only because the body cannot be sent again is not called one that no
// retry is meant for. The caller gets the response, or Base's error, as it is.
func TestBodyThatCannotBeSentAgain(t *testing.T) {
	reset := errors.New("connection reset")
	for _, tt := range []struct {
		name   string
		answer func(*http.Request) (*http.Response, error)
		want   error // the reason
	}{
		{"503", func(r *http.Request) (*http.Response, error) { return reply(r, 503, "busy"), nil }, grpcretry.ErrCommitted},
		{"404", func(r *http.Request) (*http.Response, error) { return reply(r, 404, "gone"), nil }, grpcretry.ErrNotRetryable},
		{"reset", func(*http.Request) (*http.Response, error) { return nil, io.ErrUnexpectedEOF }, grpcretry.ErrCommitted},
		{"other error", func(*http.Request) (*http.Response, error) { return nil, reset }, grpcretry.ErrNotRetryable},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var reasons []error
			r := newRetrier(t, quick, grpcretry.WithObserver(func(_ context.Context, e grpcretry.Event) {
				if e.Kind == grpcretry.Decision {
					reasons = append(reasons, e.Reason)
				}
			}))
			body := tracked("hello")
			var want *http.Response
			var wantErr error
			resp, err := NewTransport(r, roundTripper(func(r *http.Request) (*http.Response, error) {
				io.Copy(io.Discard, r.Body)
				r.Body.Close()
				want, wantErr = tt.answer(r)
				return want, wantErr
			})).RoundTrip(newRequest(t, "PUT", "http://test", body))
			if len(reasons) != 1 || reasons[0] != tt.want {
				t.Errorf("reasons %v, want one: %v", reasons, tt.want)
			}
			if resp != want || err != wantErr {
				t.Errorf("RoundTrip = %v, %v, want %v, %v", resp, err, want, wantErr)
			}
			wantClosed(t, body)
		})
	}
}

// After a retry, the error says how many attempts were made and why there is no other. A body that was read is the reason only if there
// is no other one.
func TestBodyReadInTheSecondAttempt(t *testing.T) {
	for _, tt := range []struct {
		name, method string
		opts         []grpcretry.Option
		readIn, made int
		want         error
	}{
		{"attempts left", "PUT", nil, 2, 2, grpcretry.ErrCommitted},
		{"no attempts left", "PUT", []grpcretry.Option{grpcretry.WithMaxAttempts(2)}, 2, 2, grpcretry.ErrAttemptsExhausted},
		{"it may have run", "POST", []grpcretry.Option{grpcretry.WithUnsentOnly(true)}, 1, 1, grpcretry.ErrMayHaveRun},
	} {
		t.Run(tt.name, func(t *testing.T) {
			attempts := 0
			r := newRetrier(t, append([]grpcretry.Option{quick}, tt.opts...)...)
			_, err := NewTransport(r, roundTripper(func(r *http.Request) (*http.Response, error) {
				if attempts++; attempts == tt.readIn {
					io.Copy(io.Discard, r.Body)
				}
				r.Body.Close()
				return nil, io.ErrUnexpectedEOF
			})).RoundTrip(newRequest(t, tt.method, "http://test", tracked("hello")))
			if e := asError(t, err); attempts != tt.made || e.Reason != tt.want || len(e.Attempts) != tt.made {
				t.Errorf("after %d attempts: %v, want %d, and %v", attempts, err, tt.made, tt.want)
			}
		})
	}
}
