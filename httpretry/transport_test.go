package httpretry

import (
	"context"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/internal/errtype"
)

func TestRetriesUntilSuccess(t *testing.T) {
	server := answers(t, answer(503), answer(429), says("hello"))
	client, web := serve(t, server, quick)
	wantResponse(t, client, newRequest(t, "GET", web.URL, nil), 200, "hello")
	server.wantCount(t, 3)
}

func TestZeroTransport(t *testing.T) {
	server := answers(t, answer(503), says("hello"))
	_, web := serve(t, server)
	client := &http.Client{Transport: &Transport{}}
	t.Cleanup(client.CloseIdleConnections)
	wantResponse(t, client, newRequest(t, "GET", web.URL, nil), 200, "hello")
	server.wantCount(t, 2)
}

// The waits are the policy's: exact times, in virtual time.
func TestWaits(t *testing.T) {
	handlers := []http.HandlerFunc{answer(503), answer(503), answer(503), says("hello")}
	inBubble(t, handlers, []grpcretry.Option{steady}, func(t *testing.T, client *http.Client, server *script) {
		wantResponse(t, client, newRequest(t, "GET", "http://test", nil), 200, "hello")
		server.wantTimes(t, 0, second, 3*second, 7*second)
	})
}

func TestMethods(t *testing.T) {
	key := http.Header{"Idempotency-Key": {"1"}}
	for _, tt := range []struct {
		method string
		header http.Header
		want   int
	}{
		{"", nil, 2},
		{"GET", nil, 2},
		{"HEAD", nil, 2},
		{"OPTIONS", nil, 2},
		{"TRACE", nil, 2},
		{"PUT", nil, 2},
		{"DELETE", nil, 2},
		{"POST", nil, 1},
		{"PATCH", nil, 1},
		{"get", nil, 1}, // methods are case-sensitive
		{"POST", key, 2},
		{"PATCH", key, 2},
		{"POST", http.Header{"X-Idempotency-Key": {"1"}}, 2},
		{"POST", http.Header{"Idempotency-Key": nil}, 2}, // as for net/http, not sent
	} {
		t.Run(tt.method, func(t *testing.T) {
			made := 0
			transport := NewTransport(newRetrier(t, quick), roundTripper(func(r *http.Request) (*http.Response, error) {
				made++
				return reply(r, 503, ""), nil
			}))
			req := newRequest(t, tt.method, "http://test", nil)
			req.Method = tt.method
			if tt.header != nil {
				req.Header = tt.header
			}
			req = req.WithContext(t.Context())
			transport.Retrier = newRetrier(t, quick, grpcretry.WithMaxAttempts(2))
			resp, err := transport.RoundTrip(req)
			if err != nil || resp.StatusCode != 503 || made != tt.want {
				t.Errorf("RoundTrip = %v, %v after %d attempts, want status 503 after %d", resp, err, made, tt.want)
			}
		})
	}
}

func TestNames(t *testing.T) {
	for _, tt := range []struct{ method, url, name, host string }{
		{"", "http://example.com/a/b?c", "/http/example.com/GET", "example.com"},
		{"GET", "http://API.Example.com:80/", "/http/api.example.com/GET", "api.example.com"},
		{"PUT", "https://example.com:443", "/http/example.com/PUT", "example.com"},
		{"PUT", "https://example.com:80", "/http/example.com:80/PUT", "example.com:80"},
		{"POST", "http://user:secret@example.com:8080", "/http/example.com:8080/POST", "example.com:8080"},
		{"GET", "http://[::1]:8080/", "/http/[::1]:8080/GET", "[::1]:8080"},
		{"GET", "http://[::1]:80/", "/http/[::1]/GET", "[::1]"},
		{"GET", "/path", "", ""},
	} {
		u, err := url.Parse(tt.url)
		if err != nil {
			t.Fatal(err)
		}
		name, host := names(&http.Request{Method: tt.method, URL: u})
		if name != tt.name || host != tt.host {
			t.Errorf("names(%q %q) = %q, %q, want %q, %q", tt.method, tt.url, name, host, tt.name, tt.host)
		}
	}
}

// Policies apply to all of HTTP, to a host, and to a host's method; the longest pattern wins.
func TestPolicies(t *testing.T) {
	r := newRetrier(t, quick, grpcretry.WithBudget(grpcretry.Unlimited),
		grpcretry.WithMethod("/http/", grpcretry.WithMaxAttempts(2)),
		grpcretry.WithMethod("/http/api.example.com/", grpcretry.WithMaxAttempts(3)),
		grpcretry.WithMethod("/http/api.example.com/PUT", grpcretry.WithMaxAttempts(5)))
	for _, tt := range []struct {
		method, url string
		want        int
	}{
		{"GET", "http://other.example.com", 2},
		{"GET", "http://api.example.com", 3},
		{"PUT", "https://api.example.com:443", 5},
		{"PUT", "https://api.example.com:444", 2},
	} {
		made := 0
		transport := &Transport{Retrier: r, Base: roundTripper(func(r *http.Request) (*http.Response, error) {
			made++
			return reply(r, 503, ""), nil
		})}
		if _, err := transport.RoundTrip(newRequest(t, tt.method, tt.url, nil)); err != nil || made != tt.want {
			t.Errorf("%s %s: %d attempts, %v, want %d", tt.method, tt.url, made, err, tt.want)
		}
	}
}

// Each host has a budget of its own: 3 retries in an outage.
func TestBudgetPerHost(t *testing.T) {
	made := map[string]int{}
	transport := NewTransport(newRetrier(t, quick, grpcretry.WithPatience(0)), roundTripper(func(r *http.Request) (*http.Response, error) {
		made[r.URL.Host]++
		return reply(r, 503, "down"), nil
	}))
	for range 10 {
		for _, host := range []string{"a", "b"} {
			resp, err := transport.RoundTrip(newRequest(t, "GET", "http://"+host, nil))
			if err != nil || resp.StatusCode != 503 {
				t.Fatalf("RoundTrip = %v, %v, want status 503", resp, err)
			}
		}
	}
	if made["a"] != 13 || made["b"] != 13 {
		t.Errorf("attempts: %v, want 13 for each host", made)
	}
}

func TestStatusCodes(t *testing.T) {
	for status, want := range map[int]codes.Code{
		400: codes.InvalidArgument, 401: codes.Unauthenticated, 402: codes.InvalidArgument, 403: codes.PermissionDenied,
		404: codes.NotFound, 405: codes.InvalidArgument, 408: codes.DeadlineExceeded, 409: codes.Aborted,
		410: codes.NotFound, 412: codes.FailedPrecondition, 416: codes.OutOfRange, 418: codes.InvalidArgument,
		429: codes.ResourceExhausted, 499: codes.InvalidArgument, 500: codes.Internal, 501: codes.Unimplemented,
		502: codes.Unavailable, 503: codes.Unavailable, 504: codes.Unavailable, 505: codes.Internal, 599: codes.Internal, 999: codes.Internal,
	} {
		var seen []codes.Code
		made := 0
		r := newRetrier(t, quick, grpcretry.WithMaxAttempts(2), grpcretry.WithObserver(func(_ context.Context, e grpcretry.Event) {
			if e.Kind == grpcretry.AttemptEnd {
				seen = append(seen, e.Attempt.Code())
			}
		}))
		transport := NewTransport(r, roundTripper(func(r *http.Request) (*http.Response, error) {
			made++
			return reply(r, status, ""), nil
		}))
		if _, err := transport.RoundTrip(newRequest(t, "GET", "http://test", nil)); err != nil {
			t.Errorf("%d: %v", status, err)
		}
		wantMade := 1
		if want == codes.ResourceExhausted || want == codes.Unavailable {
			wantMade = 2
		}
		if made != wantMade || len(seen) == 0 || seen[0] != want {
			t.Errorf("%d: %d attempts with %v, want %d with %v", status, made, seen, wantMade, want)
		}
	}
}

// A classifier finds the status and headers, and opts in to other statuses.
func TestClassifierSeesTheResponse(t *testing.T) {
	server := answers(t, answer(409, "X-Reason", "locked"), answer(409, "X-Reason", "final"))
	client, web := serve(t, server, quick, grpcretry.WithClassifier(func(_ context.Context, a grpcretry.Attempt) grpcretry.Classification {
		e, ok := errtype.As[*StatusError](a.Err)
		if !ok || e.StatusCode != 409 || e.Status != "409 Conflict" {
			t.Errorf("Err = %v, want a StatusError", a.Err)
		}
		if e.Header.Get("X-Reason") == "locked" {
			return grpcretry.Retry
		}
		return grpcretry.Default
	}))
	wantResponse(t, client, newRequest(t, "GET", web.URL, nil), 409, "Conflict")
	server.wantCount(t, 2)
}

func TestWithCodesOptsIn(t *testing.T) {
	server := answers(t, answer(500), says("hello"))
	client, web := serve(t, server, quick, grpcretry.WithMethod("/http/", grpcretry.WithCodes(codes.Internal)))
	wantResponse(t, client, newRequest(t, "GET", web.URL, nil), 200, "hello")
	server.wantCount(t, 2)
}

// The last response is the caller's as the server sent it, whatever ended the call.
func TestLastResponse(t *testing.T) {
	last := func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Trailer", "X-Sum")
		w.Header().Set("Retry-After", "120")
		w.WriteHeader(503)
		io.WriteString(w, strings.Repeat("x", 1<<20))
		w.Header().Set("X-Sum", "42")
	}
	for _, tt := range []struct {
		name string
		opts []grpcretry.Option
	}{
		{"attempts", []grpcretry.Option{grpcretry.WithMaxAttempts(1)}},
		{"disabled", []grpcretry.Option{grpcretry.Disable()}},
		{"MaxServerDelay", []grpcretry.Option{grpcretry.WithMaxServerDelay(time.Minute)}},
		{"MaxElapsed", []grpcretry.Option{grpcretry.WithMaxElapsed(time.Minute)}},
		{"classifier", []grpcretry.Option{grpcretry.WithClassifier(func(context.Context, grpcretry.Attempt) grpcretry.Classification {
			return grpcretry.Stop
		})}},
		{"attempt timeout", []grpcretry.Option{grpcretry.WithAttemptTimeout(time.Minute), grpcretry.WithMaxServerDelay(time.Minute)}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			server := answers(t, last)
			client, web := serve(t, server, tt.opts...)
			resp, err := client.Do(newRequest(t, "GET", web.URL, nil))
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			body, err := io.ReadAll(resp.Body)
			if err != nil || len(body) != 1<<20 || resp.StatusCode != 503 || resp.Trailer.Get("X-Sum") != "42" {
				t.Errorf("read %d bytes, %v, status %d, trailer %v", len(body), err, resp.StatusCode, resp.Trailer)
			}
			server.wantCount(t, 1)
		})
	}
	t.Run("deadline", func(t *testing.T) {
		server := answers(t, last)
		client, web := serve(t, server)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		code, body, err := do(t, client, newRequest(t, "GET", web.URL, nil).WithContext(ctx))
		if code != 503 || len(body) != 1<<20 || err != nil {
			t.Errorf("status %d with %d bytes, %v", code, len(body), err)
		}
	})
	t.Run("after retries", func(t *testing.T) {
		server := answers(t, answer(503), answer(503), last)
		client, web := serve(t, server, quick, grpcretry.WithMaxAttempts(3))
		code, body, err := do(t, client, newRequest(t, "GET", web.URL, nil))
		if code != 503 || len(body) != 1<<20 || err != nil {
			t.Errorf("status %d with %d bytes, %v", code, len(body), err)
		}
		server.wantCount(t, 3)
	})
}

// A response is Base's own, with the caller's request.
func TestResponseIsBases(t *testing.T) {
	var made *http.Response
	transport := NewTransport(newRetrier(t), roundTripper(func(r *http.Request) (*http.Response, error) {
		made = reply(r, 200, "")
		return made, nil
	}))
	req := newRequest(t, "GET", "http://test", nil)
	resp, err := transport.RoundTrip(req)
	if err != nil || resp != made || resp.Request != req {
		t.Errorf("RoundTrip = %p, %v for %p, want %p for %p", resp, err, resp.Request, made, req)
	}
}

// Base may have sent another request than it was given, which is not an attempt's.
func TestResponseOfAnotherRequest(t *testing.T) {
	other := newRequest(t, "GET", "http://elsewhere", nil)
	transport := NewTransport(newRetrier(t), roundTripper(func(*http.Request) (*http.Response, error) { return reply(other, 200, ""), nil }))
	resp, err := transport.RoundTrip(newRequest(t, "GET", "http://test", nil))
	if err != nil || resp.Request != other {
		t.Errorf("RoundTrip = %v for %p, want %p", err, resp.Request, other)
	}
}

// Not every Base says what request a response is for.
func TestResponseWithoutARequest(t *testing.T) {
	made := 0
	transport := NewTransport(newRetrier(t, quick), roundTripper(func(r *http.Request) (*http.Response, error) {
		made++
		resp := reply(r, []int{503, 200}[made-1], "hello")
		resp.Request = nil
		return resp, nil
	}))
	wantResponse(t, &http.Client{Transport: transport}, newRequest(t, "GET", "http://test", nil), 200, "hello")
}

// A request that may not be sent twice goes to Base as it is, and no attempt timeout ends it.
func TestOtherRequestsAreLeftAlone(t *testing.T) {
	req := newRequest(t, "POST", "http://test", strings.NewReader("hello"))
	transport := NewTransport(newRetrier(t, grpcretry.WithAttemptTimeout(second)), roundTripper(func(r *http.Request) (*http.Response, error) {
		if r != req {
			t.Errorf("Base got another request, %+v", r)
		}
		return reply(r, 200, ""), nil
	}))
	if _, err := transport.RoundTrip(req); err != nil {
		t.Error(err)
	}
}

// Base has to see that there is no body.
func TestNoBodyIsSentAsSuch(t *testing.T) {
	transport := NewTransport(newRetrier(t), roundTripper(func(r *http.Request) (*http.Response, error) {
		if r.Body != http.NoBody {
			t.Errorf("the body is a %T, want NoBody", r.Body)
		}
		return reply(r, 200, ""), nil
	}))
	if _, err := transport.RoundTrip(newRequest(t, "PUT", "http://test", http.NoBody)); err != nil {
		t.Error(err)
	}
}

// Attempts of an outer Transport are not retried again.
func TestNested(t *testing.T) {
	made := 0
	base := roundTripper(func(r *http.Request) (*http.Response, error) {
		made++
		return reply(r, 503, ""), nil
	})
	inner := NewTransport(newRetrier(t, quick), base)
	outer := NewTransport(newRetrier(t, quick, grpcretry.WithMaxAttempts(3)), inner)
	if _, err := outer.RoundTrip(newRequest(t, "GET", "http://test", nil)); err != nil || made != 3 {
		t.Errorf("%d attempts, %v, want 3", made, err)
	}
}

// What Base sees: the attempt, and the caller's values.
func TestAttemptContext(t *testing.T) {
	type key struct{}
	for _, timeout := range []time.Duration{0, time.Minute} {
		var numbers []int
		transport := NewTransport(newRetrier(t, quick, grpcretry.WithAttemptTimeout(timeout)),
			roundTripper(func(r *http.Request) (*http.Response, error) {
				a, _ := grpcretry.AttemptFromContext(r.Context())
				numbers = append(numbers, a.Number)
				if a.Method != "/http/test/GET" || r.Context().Value(key{}) != "value" {
					t.Errorf("attempt %+v with value %v", a, r.Context().Value(key{}))
				}
				return reply(r, 503, ""), nil
			}))
		ctx := context.WithValue(t.Context(), key{}, "value")
		if _, err := transport.RoundTrip(newRequest(t, "GET", "http://test", nil).WithContext(ctx)); err != nil {
			t.Error(err)
		}
		if !slices.Equal(numbers, []int{1, 2, 3, 4}) {
			t.Errorf("attempts %v, want 4", numbers)
		}
	}
}

// Faults of a RoundTripper come out as they are.
func TestFaultyBase(t *testing.T) {
	closed := false
	transport := NewTransport(nil, roundTripper(func(r *http.Request) (*http.Response, error) {
		if r.URL.Path == "/nil" {
			return nil, nil
		}
		resp := reply(r, 200, "")
		resp.Body = closer(func() { closed = true })
		return resp, io.ErrNoProgress
	}))
	if resp, err := transport.RoundTrip(newRequest(t, "GET", "http://test/nil", nil)); resp != nil || err != nil {
		t.Errorf("RoundTrip = %v, %v, want nil, nil", resp, err)
	}
	if resp, err := transport.RoundTrip(newRequest(t, "GET", "http://test/both", nil)); resp != nil || err != io.ErrNoProgress || !closed {
		t.Errorf("RoundTrip = %v, %v, closed %v, want only the error", resp, err, closed)
	}
}

type closer func()

func (c closer) Read([]byte) (int, error) { return 0, io.EOF }
func (c closer) Close() error             { c(); return nil }

func TestPanics(t *testing.T) {
	for _, timeout := range []time.Duration{0, time.Minute} {
		var ctx context.Context
		var closed bool
		transport := NewTransport(newRetrier(t, quick, grpcretry.WithAttemptTimeout(timeout)),
			roundTripper(func(r *http.Request) (*http.Response, error) {
				ctx = r.Context()
				panic("base")
			}))
		func() {
			defer func() {
				if p := recover(); p != "base" {
					t.Errorf("recovered %v", p)
				}
			}()
			req := newRequest(t, "PUT", "http://test", nil)
			req.Body = closer(func() { closed = true })
			transport.RoundTrip(req)
		}()
		if !closed || timeout > 0 && ctx.Err() == nil {
			t.Errorf("timeout %v: body closed %v, context %v", timeout, closed, ctx.Err())
		}
	}
}

// A hedged policy is an error that Do explains. The body is closed all the same.
func TestHedgingIsRejected(t *testing.T) {
	closed := false
	transport := NewTransport(newRetrier(t, grpcretry.WithMethod("/http/",
		grpcretry.WithPolicy(grpcretry.Policy{MaxAttempts: 2, Hedging: &grpcretry.Hedging{Delay: grpcretry.HedgeAfter(second)}}))),
		roundTripper(func(*http.Request) (*http.Response, error) { panic("sent") }))
	req := newRequest(t, "PUT", "http://test", nil)
	req.Body = closer(func() { closed = true })
	if _, err := transport.RoundTrip(req); err == nil || !strings.Contains(err.Error(), "hedged") || !closed {
		t.Errorf("RoundTrip = %v, body closed %v", err, closed)
	}
}

// Requests that net/http rejects are rejected with its errors, and not retried.
func TestInvalidRequests(t *testing.T) {
	for name, change := range map[string]func(*http.Request){
		"no URL":        func(r *http.Request) { r.URL = nil },
		"no host":       func(r *http.Request) { r.URL.Host = "" },
		"scheme":        func(r *http.Request) { r.URL.Scheme = "ftp" },
		"header name":   func(r *http.Request) { r.Header["Na\033me"] = []string{"value"} },
		"header value":  func(r *http.Request) { r.Header.Set("Name", "va\033lue") },
		"nil header":    func(r *http.Request) { r.Header = nil },
		"port":          func(r *http.Request) { r.URL.Host = "127.0.0.1:99999" },
		"trailer":       func(r *http.Request) { r.Trailer = http.Header{"Na\033me": nil} },
		"bad method":    func(r *http.Request) { r.Method = "A B"; r.Header.Set("Idempotency-Key", "1") },
		"other network": func(r *http.Request) { r.URL.Scheme = "" },
	} {
		t.Run(name, func(t *testing.T) {
			base := &http.Transport{}
			defer base.CloseIdleConnections()
			made := 0
			transport := NewTransport(newRetrier(t, quick), roundTripper(func(r *http.Request) (*http.Response, error) {
				made++
				return base.RoundTrip(r)
			}))
			bad := func() *http.Request {
				req := newRequest(t, "GET", "http://127.0.0.1:1", nil)
				change(req)
				return req
			}
			_, want := base.RoundTrip(bad())
			_, err := transport.RoundTrip(bad())
			if made != 1 || err == nil || want == nil || err.Error() != want.Error() {
				t.Errorf("%d attempts, %v, want 1, %v", made, err, want)
			}
		})
	}
}
