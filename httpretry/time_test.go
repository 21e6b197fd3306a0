package httpretry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/internal/errtype"
)

// hang answers when the client is gone.
func hang(_ http.ResponseWriter, r *http.Request) { <-r.Context().Done() }

// An attempt that gets no header in time is replaced.
func TestAttemptTimeout(t *testing.T) {
	inBubble(t, []http.HandlerFunc{hang, says("hello")}, []grpcretry.Option{steady, grpcretry.WithAttemptTimeout(5 * second)},
		func(t *testing.T, client *http.Client, server *script) {
			wantResponse(t, client, newRequest(t, "GET", "http://test", nil), 200, "hello")
			server.wantTimes(t, 0, 6*second)
		})
}

// Without another attempt, and without a deadline, the timeout is the call's error.
func TestLastAttemptTimeout(t *testing.T) {
	inBubble(t, []http.HandlerFunc{hang, hang},
		[]grpcretry.Option{steady, grpcretry.WithAttemptTimeout(5 * second), grpcretry.WithMaxAttempts(2)},
		func(t *testing.T, client *http.Client, server *script) {
			_, err := client.Do(newRequest(t, "GET", "http://test", nil))
			if !errors.Is(err, grpcretry.ErrAttemptTimeout) || !errors.Is(err, grpcretry.ErrAttemptsExhausted) {
				t.Errorf("Do = %v, want an attempt timeout", err)
			}
			server.wantTimes(t, 0, 6*second)
		})
}

// The attempt timeout does not cover the body.
func TestBodyOutlastsAttemptTimeout(t *testing.T) {
	slow := func(w http.ResponseWriter, _ *http.Request) {
		for range 10 {
			io.WriteString(w, "x")
			w.(http.Flusher).Flush()
			time.Sleep(second)
		}
	}
	inBubble(t, []http.HandlerFunc{answer(503), slow}, []grpcretry.Option{steady, grpcretry.WithAttemptTimeout(2 * second)},
		func(t *testing.T, client *http.Client, server *script) {
			wantResponse(t, client, newRequest(t, "GET", "http://test", nil), 200, "xxxxxxxxxx")
			server.wantTimes(t, 0, second)
		})
}

// The body ends with the caller's context, with the caller's cause.
func TestContextEndsBody(t *testing.T) {
	forever := func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, "x")
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	}
	for _, timeout := range []time.Duration{0, second} {
		inBubble(t, []http.HandlerFunc{forever}, []grpcretry.Option{grpcretry.WithAttemptTimeout(timeout)},
			func(t *testing.T, client *http.Client, _ *script) {
				ctx, cancel := context.WithCancelCause(t.Context())
				resp, err := client.Do(newRequest(t, "GET", "http://test", nil).WithContext(ctx))
				if err != nil {
					t.Fatal(err)
				}
				defer resp.Body.Close()
				enough := errors.New("enough")
				time.AfterFunc(10*second, func() { cancel(enough) })
				start := time.Now()
				if _, err := io.ReadAll(resp.Body); err != enough || time.Since(start) != 10*second {
					t.Errorf("timeout %v: reading failed with %v after %v", timeout, err, time.Since(start))
				}
			})
	}
}

// The end of the caller's context ends the wait.
func TestContextEndsWait(t *testing.T) {
	inBubble(t, []http.HandlerFunc{answer(503)}, []grpcretry.Option{grpcretry.WithBackoff(grpcretry.Constant(time.Minute))},
		func(t *testing.T, client *http.Client, server *script) {
			ctx, cancel := context.WithCancel(t.Context())
			time.AfterFunc(10*second, cancel)
			start := time.Now()
			_, err := client.Do(newRequest(t, "GET", "http://test", nil).WithContext(ctx))
			status, _ := errtype.As[*StatusError](err)
			if !errors.Is(err, context.Canceled) || time.Since(start) != 10*second || status == nil || status.StatusCode != 503 {
				t.Errorf("Do = %v after %v", err, time.Since(start))
			}
			server.wantCount(t, 1)
		})
}

// Whatever an error looks like, the request's end explains it: the request is not retryable, and the error is Base's.
func TestErrorAfterTheEnd(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	transport := NewTransport(newRetrier(t, steady), roundTripper(func(*http.Request) (*http.Response, error) {
		cancel()
		return nil, reset
	}))
	if _, err := transport.RoundTrip(newRequest(t, "GET", "http://test", nil).WithContext(ctx)); err != error(reset) {
		t.Errorf("RoundTrip = %v (%T), want Base's own error", err, err)
	}
}

// A context that has ended ends the call before the first attempt reaches the server. The error is as
// without a Transport.
func TestContextHasEnded(t *testing.T) {
	inBubble(t, nil, nil, func(t *testing.T, client *http.Client, server *script) {
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		body := tracked("hello")
		_, err := client.Do(newRequest(t, "PUT", "http://test", body).WithContext(ctx))
		if !errors.Is(err, context.Canceled) {
			t.Errorf("Do = %v", err)
		}
		wantClosed(t, body)
		server.wantCount(t, 0)
	})
}

// Client.Timeout covers all attempts, the waits and the body.
func TestClientTimeout(t *testing.T) {
	slow := func(w http.ResponseWriter, r *http.Request) {
		io.WriteString(w, "x")
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	}
	for _, tt := range []struct {
		name     string
		handlers []http.HandlerFunc
		timeout  time.Duration // of an attempt
		took     time.Duration
		code     int // 0 for a timeout
	}{
		{"in an attempt", []http.HandlerFunc{answer(503), hang}, 0, 10 * second, 0},
		{"in an attempt with a timeout", []http.HandlerFunc{answer(503), hang}, 20 * second, 10 * second, 0},
		{"in the body", []http.HandlerFunc{answer(503), slow}, 0, 10 * second, 0},
		{"before a wait", []http.HandlerFunc{answer(503), answer(503, "Retry-After", "9")}, 0, second, 503},
	} {
		t.Run(tt.name, func(t *testing.T) {
			inBubble(t, tt.handlers, []grpcretry.Option{steady, grpcretry.WithAttemptTimeout(tt.timeout)},
				func(t *testing.T, client *http.Client, server *script) {
					client.Timeout = 10 * second
					start := time.Now()
					resp, err := client.Do(newRequest(t, "GET", "http://test", nil))
					if err == nil {
						defer resp.Body.Close()
						_, err = io.ReadAll(resp.Body)
					}
					timeout, _ := errtype.As[interface {
						error
						Timeout() bool
					}](err)
					switch {
					case tt.code != 0 && (err != nil || resp.StatusCode != tt.code):
						t.Errorf("Do = %v, %v, want status %d", resp, err, tt.code)
					case tt.code == 0 && (timeout == nil || !timeout.Timeout()):
						t.Errorf("Do = %v, want a timeout", err)
					}
					if took := time.Since(start); took != tt.took {
						t.Errorf("took %v, want %v", took, tt.took)
					}
					server.wantTimes(t, 0, second)
				})
		})
	}
}

// The error of a deadline is a timeout for url.Error, as without a Transport.
func TestDeadlineIsTimeout(t *testing.T) {
	inBubble(t, []http.HandlerFunc{hang}, nil, func(t *testing.T, client *http.Client, _ *script) {
		ctx, cancel := context.WithTimeout(t.Context(), second)
		defer cancel()
		_, err := client.Do(newRequest(t, "GET", "http://test", nil).WithContext(ctx))
		if e, ok := err.(*url.Error); !ok || !e.Timeout() || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Do = %v (%T)", err, err)
		}
	})
}

// A body that never ends holds up the retry for no longer than MaxDrainTime, which is a part of the wait.
func TestEndlessBodyIsDiscarded(t *testing.T) {
	if since127 {
		t.Skip("after Close net/http waits on a mutex, for 50 ms, and meanwhile no time passes in a bubble")
	}
	for _, tt := range []struct {
		backoff, want time.Duration
	}{{second, second}, {0, MaxDrainTime}} {
		for _, timeout := range []time.Duration{0, time.Minute} {
			gone := make(chan struct{})
			endless := func(w http.ResponseWriter, r *http.Request) {
				w.WriteHeader(503)
				w.(http.Flusher).Flush()
				<-r.Context().Done()
				close(gone)
			}
			opts := []grpcretry.Option{grpcretry.WithBackoff(grpcretry.Constant(tt.backoff)), grpcretry.WithAttemptTimeout(timeout)}
			inBubble(t, []http.HandlerFunc{func(w http.ResponseWriter, r *http.Request) { endless(w, r) }, says("hello")}, opts,
				func(t *testing.T, client *http.Client, server *script) {
					gone = make(chan struct{})
					wantResponse(t, client, newRequest(t, "GET", "http://test", nil), 200, "hello")
					server.wantTimes(t, 0, tt.want)
					<-gone // the connection was closed
				})
		}
	}
}

// ResponseHeaderTimeout is an attempt timeout of Base's.
func TestResponseHeaderTimeout(t *testing.T) {
	inBubble(t, []http.HandlerFunc{hang, says("hello")}, []grpcretry.Option{steady}, func(t *testing.T, client *http.Client, server *script) {
		client.Transport.(*Transport).Base.(*http.Transport).ResponseHeaderTimeout = 3 * second
		wantResponse(t, client, newRequest(t, "GET", "http://test", nil), 200, "hello")
		server.wantTimes(t, 0, 4*second)
	})
}

// While there is no connection, requests of any method wait for as long as there is patience.
func TestRequestsWaitForAConnection(t *testing.T) {
	for _, method := range []string{"GET", "POST"} {
		synctest.Test(t, func(t *testing.T) {
			dials := 0
			r := newRetrier(t, steady, grpcretry.WithUnsentOnly(true), grpcretry.WithPatience(time.Hour))
			transport := NewTransport(r, roundTripper(func(r *http.Request) (*http.Response, error) {
				if dials++; dials <= 6 {
					return nil, refused
				}
				return reply(r, 200, ""), nil
			}))
			start := time.Now()
			resp, err := transport.RoundTrip(newRequest(t, method, "http://test", strings.NewReader("hello")))
			if err != nil || resp.StatusCode != 200 || dials != 7 || time.Since(start) != 63*second {
				t.Errorf("%s: %v after %d attempts and %v", method, err, dials, time.Since(start))
			}
		})
	}
}

// With UnsentOnly, requests of any method are retried if the server cannot have acted on them, or has
// asked for that.
func TestUnsentOnly(t *testing.T) {
	for _, tt := range []struct {
		name   string
		first  roundTripper
		method string
		want   int
	}{
		{"dial", func(*http.Request) (*http.Response, error) { return nil, refused }, "POST", 2},
		{"reset", func(*http.Request) (*http.Response, error) { return nil, reset }, "POST", 1},
		{"reset of a GET", func(*http.Request) (*http.Response, error) { return nil, reset }, "GET", 1},
		{"503", func(r *http.Request) (*http.Response, error) { return reply(r, 503, ""), nil }, "POST", 1},
		{"Retry-After", func(r *http.Request) (*http.Response, error) {
			resp := reply(r, 503, "")
			resp.Header.Set("Retry-After", "1")
			return resp, nil
		}, "POST", 2},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				made := 0
				transport := NewTransport(newRetrier(t, grpcretry.WithUnsentOnly(true)), roundTripper(func(r *http.Request) (*http.Response, error) {
					if made++; made == 1 {
						return tt.first(r)
					}
					return reply(r, 200, ""), nil
				}))
				resp, err := transport.RoundTrip(newRequest(t, tt.method, "http://test", nil))
				if made != tt.want || tt.want == 2 && (err != nil || resp.StatusCode != 200) ||
					err != nil && (!errors.Is(err, reset) || !errors.Is(err, grpcretry.ErrMayHaveRun)) {
					t.Errorf("RoundTrip = %v, %v after %d attempts, want %d", resp, err, made, tt.want)
				}
			})
		})
	}
}

// A response that comes at the moment of the attempt timeout is not used, because its body has ended.
func TestResponseAtTheTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		made, closed := 0, 0
		transport := NewTransport(newRetrier(t, steady, grpcretry.WithAttemptTimeout(second)),
			roundTripper(func(r *http.Request) (*http.Response, error) {
				resp := reply(r, 200, "hello")
				if made++; made == 1 {
					<-r.Context().Done()
					if cause := context.Cause(r.Context()); cause != grpcretry.ErrAttemptTimeout {
						t.Errorf("cause = %v", cause)
					}
					resp.Body = closer(func() { closed++ })
				}
				return resp, nil
			}))
		wantResponse(t, &http.Client{Transport: transport}, newRequest(t, "GET", "http://test", nil), 200, "hello")
		if made != 2 || closed != 1 {
			t.Errorf("%d attempts, closed %d times", made, closed)
		}
	})
}

// An attempt's own context ends when its body has been closed or read, and costs no goroutine.
func TestAttemptContextIsReleased(t *testing.T) {
	for _, how := range []string{"close", "read", "upload", "upgrade"} {
		before := runtime.NumGoroutine()
		var sent context.Context
		transport := NewTransport(newRetrier(t, grpcretry.WithAttemptTimeout(time.Minute)),
			roundTripper(func(r *http.Request) (*http.Response, error) {
				sent = r.Context()
				child, cancel := context.WithCancel(sent)
				defer cancel()
				if child.Err() != nil || runtime.NumGoroutine() > before {
					t.Errorf("%s: %v, %d goroutines, want %d", how, child.Err(), runtime.NumGoroutine(), before)
				}
				resp := reply(r, 200, "hello")
				if how == "upgrade" {
					resp.Body = struct {
						io.ReadCloser
						io.Writer
					}{resp.Body, io.Discard}
				}
				return resp, nil
			}))
		ctx, cancel := context.WithCancel(t.Context())
		req := newRequest(t, "PUT", "http://test", nil).WithContext(ctx)
		if how == "upload" {
			req.Body = tracked("hello")
		}
		resp, err := transport.RoundTrip(req)
		if err != nil || sent.Err() != nil {
			t.Fatalf("%s: %v, context %v", how, err, sent.Err())
		}
		if how == "read" || how == "upload" {
			io.ReadAll(resp.Body)
		}
		if released := sent.Err() != nil; released != (how == "read") {
			t.Errorf("%s: released %v at the end of the body", how, released)
		}
		resp.Body.Close()
		if sent.Err() == nil {
			t.Errorf("%s: the context is still there", how)
		}
		cancel()
	}
}

// The code of a timeout of Base's is UNAVAILABLE, and that of an attempt timeout DEADLINE_EXCEEDED.
func TestTimeoutCodes(t *testing.T) {
	inBubble(t, []http.HandlerFunc{hang, hang},
		[]grpcretry.Option{steady, grpcretry.WithAttemptTimeout(5 * second), grpcretry.WithMaxAttempts(2)},
		func(t *testing.T, client *http.Client, _ *script) {
			base := client.Transport.(*Transport).Base.(*http.Transport)
			base.ResponseHeaderTimeout = 10 * second
			_, err := client.Do(newRequest(t, "GET", "http://test", nil))
			for _, a := range asError(t, err).Attempts {
				if a.Code() != codes.DeadlineExceeded {
					t.Errorf("attempt %d: %v", a.Number, a.Err)
				}
			}
		})
}

// An attempt that was cut has timed out, whatever its error, which is kept, and its context has ended.
func TestErrorAfterTheTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var contexts []context.Context
		transport := NewTransport(newRetrier(t, steady, grpcretry.WithAttemptTimeout(second), grpcretry.WithMaxAttempts(3)),
			roundTripper(func(r *http.Request) (*http.Response, error) {
				if contexts = append(contexts, r.Context()); len(contexts) == 2 {
					return nil, refused
				}
				<-r.Context().Done()
				return nil, reset
			}))
		_, err := transport.RoundTrip(newRequest(t, "GET", "http://test", nil))
		for i, want := range []codes.Code{codes.DeadlineExceeded, codes.Unavailable, codes.DeadlineExceeded} {
			a, cut := asError(t, err).Attempts[i], want == codes.DeadlineExceeded
			if a.Code() != want || errors.Is(a.Err, grpcretry.ErrAttemptTimeout) != cut || errors.Is(a.Err, reset) != cut ||
				contexts[i].Err() == nil {
				t.Errorf("attempt %d: %v, context %v", i+1, a.Err, contexts[i].Err())
			}
		}
	})
}

// A response without a body needs no context, and keeps its body.
func TestNoBodyNeedsNoContext(t *testing.T) {
	var sent context.Context
	transport := NewTransport(newRetrier(t, grpcretry.WithAttemptTimeout(time.Minute)),
		roundTripper(func(r *http.Request) (*http.Response, error) {
			sent = r.Context()
			resp := reply(r, 204, "")
			resp.Body = http.NoBody
			return resp, nil
		}))
	resp, err := transport.RoundTrip(newRequest(t, "GET", "http://test", nil))
	if err != nil || resp.Body != http.NoBody || sent.Err() == nil {
		t.Errorf("RoundTrip = %v, %v, context %v", resp, err, sent.Err())
	}
}

func TestTimeoutOfAnError(t *testing.T) {
	down := errors.New("down")
	for _, tt := range []struct {
		err  gaveUp
		want bool
	}{
		{gaveUp{&grpcretry.Error{Last: down}}, false},
		{gaveUp{&grpcretry.Error{Last: fmt.Errorf("read: %w", context.DeadlineExceeded)}}, true},
		{gaveUp{&grpcretry.Error{Last: refused}}, false},
		{gaveUp{&grpcretry.Error{}}, false},
	} {
		if got := tt.err.Timeout(); got != tt.want {
			t.Errorf("Timeout of %#v = %v, want %v", tt.err, got, tt.want)
		}
	}
}

// The end of the request's context decides whether its error is a timeout, also in the moment before the context's timer runs.
func TestTheContextSaysWhetherItsEndIsATimeout(t *testing.T) {
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	for _, tt := range []struct {
		ctx  context.Context
		want bool
	}{
		{lateContext{t.Context()}, true},
		{canceled, false},
	} {
		transport := NewTransport(newRetrier(t), roundTripper(func(*http.Request) (*http.Response, error) {
			return nil, fmt.Errorf("read: %w", context.DeadlineExceeded)
		}))
		_, err := transport.RoundTrip(newRequest(t, "GET", "http://test", nil).WithContext(tt.ctx))
		timeout, ok := err.(interface{ Timeout() bool })
		if !ok || timeout.Timeout() != tt.want || errors.Is(err, context.Canceled) == tt.want {
			t.Errorf("RoundTrip = %v, a timeout: %v, want %v", err, ok && timeout.Timeout(), tt.want)
		}
	}
}

// lateContext is a context whose deadline has passed before its timer runs, as on a busy machine.
type lateContext struct{ context.Context }

func (lateContext) Deadline() (time.Time, bool) { return time.Now().Add(-time.Millisecond), true }

// An attempt after the first that the request's end has ended tells of the response before, whatever Base says, and when: with
// http.Client's Timeout, net/http has words of its own, and a timer of its own.
func TestTheEarlierResponseIsToldAfterTheEnd(t *testing.T) {
	for name, ends := range map[string]func(*http.Request) <-chan struct{}{
		"context":  func(r *http.Request) <-chan struct{} { return r.Context().Done() },
		"cancel":   func(r *http.Request) <-chan struct{} { return r.Cancel }, //nolint:staticcheck // http.Client sets it
		"deadline": func(*http.Request) <-chan struct{} { time.Sleep(10 * second); return closed },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				made := 0
				base := roundTripper(func(r *http.Request) (*http.Response, error) {
					if made++; made == 1 {
						return &http.Response{StatusCode: 503, Body: http.NoBody}, nil
					}
					<-ends(r)
					return nil, errors.New("net/http: request canceled")
				})
				transport := NewTransport(newRetrier(t, grpcretry.WithBackoff(grpcretry.Constant(0))), base)
				var err error
				around := roundTripper(func(r *http.Request) (*http.Response, error) {
					_, err = transport.RoundTrip(r)
					return nil, err
				})
				_, _ = (&http.Client{Transport: around, Timeout: 10 * second}).Do(newRequest(t, "GET", "http://test", nil))
				said, _ := errtype.As[*StatusError](err)
				if !errors.Is(err, context.DeadlineExceeded) || said == nil || said.StatusCode != 503 {
					t.Errorf("RoundTrip = %v, want the end of the context, and the 503 before", err)
				}
			})
		})
	}
}

var closed = func() <-chan struct{} { c := make(chan struct{}); close(c); return c }()
