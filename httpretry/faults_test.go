package httpretry

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/grpcretry/grpcretry"
)

// A source is a request's body that counts how often it is closed.
type source struct {
	io.Reader
	closes atomic.Int32
}

func (s *source) Close() error { s.closes.Add(1); return nil }

func (s *source) wantClosed(t *testing.T) {
	t.Helper()
	if n := s.closes.Load(); n != 1 {
		t.Errorf("the request's body was closed %d times, want 1", n)
	}
}

var errDial = &net.OpError{Op: "dial", Net: "tcp", Err: errors.New("connection refused")}

// refuse is a base without a connection. Like net/http, it closes the body.
func refuse(r *http.Request) (*http.Response, error) {
	if r.Body != nil {
		r.Body.Close()
	}
	return nil, errDial
}

// The body that was kept for another attempt is closed if that attempt is not made.
func TestBodyIsClosedWhenTheWaitEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeoutCause(t.Context(), time.Hour, nil)
		defer cancel()
		go func() { time.Sleep(second / 2); cancel() }()
		body := &source{Reader: strings.NewReader("hello")}
		req := newRequest(t, "PUT", "http://test/", body).WithContext(ctx)
		_, err := NewTransport(newRetrier(t, steady), roundTripper(refuse)).RoundTrip(req)
		if !errors.Is(err, context.Canceled) {
			t.Errorf("err = %v, want that of the context", err)
		}
		body.wantClosed(t)
	})
}

func TestBodyIsClosedWhenAnObserverPanics(t *testing.T) {
	for _, kind := range []grpcretry.EventKind{grpcretry.AttemptStart, grpcretry.AttemptEnd, grpcretry.Decision, grpcretry.CallEnd} {
		t.Run(string(kind), func(t *testing.T) {
			requests, responses := &source{Reader: strings.NewReader("hello")}, &source{Reader: strings.NewReader("sorry")}
			base := roundTripper(func(r *http.Request) (*http.Response, error) {
				r.Body.Close()
				resp := reply(r, 503, "")
				resp.Body = responses
				return resp, nil
			})
			panics := grpcretry.WithObserver(func(_ context.Context, e grpcretry.Event) {
				if e.Kind == kind {
					panic("observer")
				}
			})
			defer func() {
				if recover() == nil {
					t.Error("the panic did not reach the caller")
				}
				requests.wantClosed(t)
				if kind != grpcretry.AttemptStart {
					responses.wantClosed(t)
				}
			}()
			NewTransport(newRetrier(t, panics, grpcretry.WithMaxElapsed(1)), base).RoundTrip(newRequest(t, "PUT", "http://test/", requests))
		})
	}
}

// A request that was let through because it could not run twice does not run twice, even if the
// policy changes at that moment.
func TestUpdateBetweenLookUps(t *testing.T) {
	retrier := newRetrier(t, quick, grpcretry.WithUnsentOnly(true))
	ctx, n := &updating{Context: t.Context(), update: func() { retrier.Update(grpcretry.WithUnsentOnly(false)) }}, 0
	base := roundTripper(func(r *http.Request) (*http.Response, error) {
		n++
		return reply(r, 503, ""), nil
	})
	resp, err := NewTransport(retrier, base).RoundTrip(newRequest(t, "POST", "http://test/", nil).WithContext(ctx))
	if err != nil || resp.StatusCode != 503 || n != 1 {
		t.Errorf("RoundTrip = %v, %v after %d requests, want 503 after one", resp, err, n)
	}
}

// updating calls update when a value is first asked for, which happens between the look at the policy
// and the call.
type updating struct {
	context.Context
	update func()
	done   bool
}

func (u *updating) Value(key any) any {
	if !u.done {
		u.done = true
		u.update()
	}
	return u.Context.Value(key)
}

// An attempt that no other can replace, because its body cannot be sent again, is not cut.
func TestAttemptTimeoutWithoutGetBody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		base := roundTripper(func(r *http.Request) (*http.Response, error) {
			io.Copy(io.Discard, r.Body)
			r.Body.Close()
			select {
			case <-time.After(3 * second):
				return reply(r, 200, "done"), nil
			case <-r.Context().Done():
				return nil, context.Cause(r.Context())
			}
		})
		req := newRequest(t, "PUT", "http://test/", &source{Reader: strings.NewReader("hello")}).WithContext(ctx)
		resp, err := NewTransport(newRetrier(t, grpcretry.WithAttemptTimeout(second)), base).RoundTrip(req)
		if err != nil || resp.StatusCode != 200 {
			t.Errorf("RoundTrip = %v, %v, want 200", resp, err)
		}
	})
}

// The attempt timeout never looks as if the caller had cancelled the request.
func TestAttemptTimeoutIsNotTheCallers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		base := roundTripper(func(r *http.Request) (*http.Response, error) {
			if r.Body != nil {
				io.Copy(io.Discard, r.Body)
				r.Body.Close()
			}
			<-r.Context().Done()
			return nil, r.Context().Err()
		})
		stop := grpcretry.WithClassifier(func(context.Context, grpcretry.Attempt) grpcretry.Classification { return grpcretry.Stop })
		for name, r := range map[string]*grpcretry.Retrier{
			"body":    newRetrier(t, grpcretry.WithAttemptTimeout(second)),
			"stop":    newRetrier(t, grpcretry.WithAttemptTimeout(second), stop),
			"unsent":  newRetrier(t, grpcretry.WithAttemptTimeout(second), grpcretry.WithUnsentOnly(true)),
			"off":     newRetrier(t, grpcretry.WithAttemptTimeout(second), grpcretry.WithMaxAttempts(1)),
			"retried": newRetrier(t, grpcretry.WithAttemptTimeout(second)),
		} {
			var body io.Reader
			if name == "body" {
				body = &source{Reader: strings.NewReader("hello")}
			}
			_, err := (&http.Client{Transport: NewTransport(r, base)}).Do(newRequest(t, "PUT", "http://test/", body))
			var e *url.Error
			if !errors.As(err, &e) || errors.Is(err, context.Canceled) || !errors.Is(err, grpcretry.ErrAttemptTimeout) || !e.Timeout() {
				t.Errorf("%s: err = %v (%T), want an attempt timeout", name, err, e.Err)
			}
		}
	})
}

func TestGetBodyReturnsNil(t *testing.T) {
	server := answers(t, answer(503))
	client, web := serve(t, server, quick)
	req := newRequest(t, "PUT", web.URL, strings.NewReader("hello"))
	req.GetBody = func() (io.ReadCloser, error) { return nil, nil }
	if _, _, err := do(t, client, req); !errors.Is(err, errNoBody) {
		t.Errorf("err = %v, want that GetBody returned nil", err)
	}
	server.wantCount(t, 1)
}

// Nothing follows after the request was cancelled by its channel, whatever the policy says.
func TestRequestCancelIsFinal(t *testing.T) {
	n, cancel := 0, make(chan struct{})
	base := roundTripper(func(*http.Request) (*http.Response, error) {
		if n++; n == 1 {
			close(cancel)
		}
		return nil, errors.New("net/http: request canceled")
	})
	req := newRequest(t, "GET", "http://test/", nil)
	req.Cancel = cancel //nolint:staticcheck // deprecated, but http.Client still sets it
	_, err := NewTransport(newRetrier(t, quick, grpcretry.WithCodes(codes.Unknown)), base).RoundTrip(req)
	if err == nil || n != 1 {
		t.Errorf("err = %v after %d attempts, want one", err, n)
	}
}

func TestNamesOfHosts(t *testing.T) {
	for in, want := range map[string]string{
		"http://Example.COM:80/a?b": "/http/example.com/GET", "http://example.com:/": "/http/example.com/GET",
		"https://u:p@example.com:443": "/http/example.com/GET", "http://[fe80::1%25eth0]:80/": "/http/[fe80::1%eth0]/GET",
		"http://example.com:": "/http/example.com/GET", "http://example.com:443": "/http/example.com:443/GET",
		"http://[::80]/": "/http/[::80]/GET",
	} {
		name, _ := names(newRequest(t, "", in, nil))
		if name != want {
			t.Errorf("%s: %s, want %s", in, name, want)
		}
		newRetrier(t, grpcretry.WithMethod(name, grpcretry.WithMaxAttempts(2)),
			grpcretry.WithMethod(strings.TrimSuffix(name, "GET"), grpcretry.WithMaxAttempts(3)))
	}
}

// An error that panics when it is looked at does not make RoundTrip panic.
func TestErrorPanics(t *testing.T) {
	var typedNil *net.OpError
	_, err := NewTransport(newRetrier(t), roundTripper(func(*http.Request) (*http.Response, error) {
		return nil, typedNil
	})).RoundTrip(newRequest(t, "GET", "http://test/", nil))
	if err == nil {
		t.Error("err = nil")
	}
}

// If a connection breaks while one stream writes, net/http closes it, and the other streams fail with
// this error.
func TestConnectionBreaksInAnotherStream(t *testing.T) {
	n := 0
	base := roundTripper(func(r *http.Request) (*http.Response, error) {
		if n++; n == 1 {
			return nil, errors.New("http2: client connection force closed via ClientConn.Close")
		}
		return reply(r, 200, ""), nil
	})
	resp, err := NewTransport(newRetrier(t, quick), base).RoundTrip(newRequest(t, "GET", "http://test/", nil))
	if err != nil || resp.StatusCode != 200 {
		t.Errorf("RoundTrip = %v, %v, want 200", resp, err)
	}
}

// An upload goes on although it is overdue, if its body was read in the wait before the retry, which then cannot be
// sent. Without a deadline, it is cut.
func TestBodyIsReadInTheWaitForAReplacement(t *testing.T) {
	for _, limited := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			if limited {
				ctx, cancel = context.WithTimeout(t.Context(), time.Hour)
			}
			defer cancel()
			start, n := time.Now(), 0
			base := roundTripper(func(r *http.Request) (*http.Response, error) {
				n++
				time.Sleep(1500 * time.Millisecond) // until the server lets the body be sent
				io.Copy(io.Discard, r.Body)
				r.Body.Close()
				select {
				case <-time.After(3 * second):
					return reply(r, 200, "stored"), nil
				case <-r.Context().Done():
					return nil, r.Context().Err()
				}
			})
			slots, err := grpcretry.NewConcurrencyBudget(1)
			if err != nil {
				t.Fatal(err)
			}
			r := newRetrier(t, grpcretry.WithAttemptTimeout(second), grpcretry.WithBackoff(grpcretry.Constant(second)),
				grpcretry.WithBudget(slots))
			req := newRequest(t, "PUT", "http://test/", &source{Reader: strings.NewReader("hello")}).WithContext(ctx)
			resp, err := NewTransport(r, base).RoundTrip(req)
			took := time.Since(start)
			switch {
			case limited && (err != nil || resp.StatusCode != 200 || took != 4500*time.Millisecond):
				t.Errorf("RoundTrip = %v, %v after %v, want 200 after 4.5s", resp, err, took)
			case !limited && (took != 2*second || !errors.Is(err, grpcretry.ErrAttemptTimeout) || errors.Is(err, context.Canceled)):
				t.Errorf("without a deadline: RoundTrip = %v, %v after %v, want an attempt timeout after 2s", resp, err, took)
			}
			if free := slots.Balance(time.Now()); n != 1 || free != 1 {
				t.Errorf("%d attempts, %v slots are free, want one of each", n, free)
			}
		})
	}
}

// If the body is read at the very moment at which its attempt is cut for a retry, the error is still the attempt
// timeout, and not an end of the request that nobody has asked for.
func TestBodyIsReadWhenItsAttemptIsCut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		base := roundTripper(func(r *http.Request) (*http.Response, error) {
			<-r.Context().Done()
			io.Copy(io.Discard, r.Body)
			return nil, r.Context().Err()
		})
		req := newRequest(t, "PUT", "http://test/", &source{Reader: strings.NewReader("hello")})
		_, err := (&http.Client{Transport: NewTransport(newRetrier(t, steady, grpcretry.WithAttemptTimeout(second)), base)}).Do(req)
		var e *url.Error
		if !errors.As(err, &e) || errors.Is(err, context.Canceled) || !errors.Is(err, grpcretry.ErrAttemptTimeout) {
			t.Errorf("err = %v, want an attempt timeout", err)
		}
	})
}
