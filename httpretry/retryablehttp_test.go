package httpretry

import (
	"bytes"
	"context"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/internal/errtype"
)

// This file has the scenarios of go-retryablehttp's tests that no other file has.

// A server that is not there yet, then fails and then works gets the body that it needs, whatever its type.
func TestServerStartsLate(t *testing.T) {
	for name, body := range map[string]func() io.Reader{
		"bytes.Buffer":   func() io.Reader { return bytes.NewBufferString("hello") },
		"bytes.Reader":   func() io.Reader { return bytes.NewReader([]byte("hello")) },
		"strings.Reader": func() io.Reader { return strings.NewReader("hello") },
	} {
		t.Run(name, func(t *testing.T) {
			server := httptest.NewServer(answers(t, echo(500), echo(503), echo(200)))
			defer server.Close()
			attempts := 0
			retrier := newRetrier(t, quick, grpcretry.WithMaxAttempts(10), grpcretry.WithBudget(grpcretry.Unlimited),
				grpcretry.WithCodes(codes.Unavailable, codes.Internal),
				grpcretry.WithObserver(func(_ context.Context, e grpcretry.Event) {
					if e.Kind == grpcretry.AttemptEnd {
						attempts++
					}
				}))
			base := &http.Transport{DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
				if attempts < 3 {
					return nil, &net.OpError{Op: "dial", Net: network, Err: syscall.ECONNREFUSED}
				}
				return (&net.Dialer{}).DialContext(ctx, network, address)
			}}
			defer base.CloseIdleConnections()
			client := &http.Client{Transport: NewTransport(retrier, base)}
			wantResponse(t, client, newRequest(t, "PUT", server.URL, body()), 200, "hello")
			if attempts != 6 {
				t.Errorf("%d attempts, want 6", attempts)
			}
		})
	}
}

// Reading the response, too, is retried if it is done within Do.
func TestReadingIsRetried(t *testing.T) {
	url, requests := breaking(t, cut200, ok200)
	base := &http.Transport{}
	defer base.CloseIdleConnections()
	retrier := newRetrier(t, quick)
	client := &http.Client{Transport: NewTransport(retrier, base)}
	var body []byte
	err := retrier.Do(t.Context(), "/orders/list", func(ctx context.Context) error {
		resp, err := client.Do(newRequest(t, "GET", url, nil).WithContext(ctx))
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		body, err = io.ReadAll(resp.Body)
		if err != nil {
			return grpcstatus.Error(codes.Unavailable, err.Error())
		}
		return nil
	})
	if string(body) != "hello" || err != nil || requests() != 2 {
		t.Errorf("body %q, %v after %d requests", body, err, requests())
	}
}

// A RoundTripper below sees each attempt, and may change a copy of the request.
func TestRetryIsPrepared(t *testing.T) {
	var tokens []string
	look := func(code int) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			tokens = append(tokens, r.Header.Get("X-Token"))
			w.WriteHeader(code)
		}
	}
	client, web := serve(t, answers(t, look(503), look(200)), quick)
	transport := client.Transport.(*Transport)
	base := transport.Base
	transport.Base = roundTripper(func(r *http.Request) (*http.Response, error) {
		a, _ := grpcretry.AttemptFromContext(r.Context())
		r = r.Clone(r.Context())
		r.Header.Set("X-Token", []string{"", "first", "second"}[a.Number])
		return base.RoundTrip(r)
	})
	req := newRequest(t, "GET", web.URL, nil)
	wantResponse(t, client, req, 200, "")
	if !slices.Equal(tokens, []string{"first", "second"}) || len(req.Header) != 0 {
		t.Errorf("tokens %q, header %v", tokens, req.Header)
	}
}

// A POST is sent once, and a response with status 500 is returned rather than an error.
func TestPostOnce(t *testing.T) {
	server := answers(t, answer(500), answer(503))
	client, web := serve(t, server, quick)
	wantResponse(t, client, newRequest(t, "POST", web.URL, nil), 500, "Internal Server Error")
	wantResponse(t, client, newRequest(t, "POST", web.URL, nil), 503, "Service Unavailable")
	server.wantCount(t, 2)
}

// Neither an error nor a log line has the password, or the query, of a URL.
func TestNoSecrets(t *testing.T) {
	var lines bytes.Buffer
	logger := slog.New(slog.NewTextHandler(&lines, &slog.HandlerOptions{Level: slog.LevelDebug}))
	client := &http.Client{Transport: NewTransport(newRetrier(t, quick, grpcretry.WithLogger(logger)), roundTripper(
		func(*http.Request) (*http.Response, error) { return nil, reset }))}
	_, err := client.Do(newRequest(t, "GET", "http://user:passw0rd@example.com/path?key=s3cret", nil))
	own := asError(t, err).Error() + lines.String()
	if strings.Contains(err.Error()+lines.String(), "passw0rd") || strings.Contains(own, "s3cret") || !strings.Contains(own, "example.com") {
		t.Errorf("err = %v, log:\n%s", err, lines.String())
	}
}

// Observers see each attempt with its number, and each decision with the wait.
func TestObserver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var seen []string
		r := newRetrier(t, steady, grpcretry.WithObserver(func(_ context.Context, e grpcretry.Event) {
			if e.Kind == grpcretry.AttemptEnd {
				seen = append(seen, e.Attempt.Method+" "+e.Attempt.Code().String()+" "+e.Attempt.Wait.String())
			}
		}))
		transport := NewTransport(r, roundTripper(func(r *http.Request) (*http.Response, error) {
			if a, _ := grpcretry.AttemptFromContext(r.Context()); a.Number < 3 {
				return reply(r, 503, ""), nil
			}
			return reply(r, 204, ""), nil
		}))
		if _, err := transport.RoundTrip(newRequest(t, "DELETE", "https://api.example.com/x", nil)); err != nil {
			t.Error(err)
		}
		want := []string{
			"/http/api.example.com/DELETE Unavailable 0s", "/http/api.example.com/DELETE Unavailable 1s", "/http/api.example.com/DELETE OK 2s",
		}
		if !slices.Equal(seen, want) {
			t.Errorf("seen %q, want %q", seen, want)
		}
	})
}

// Any Backoff makes the waits.
func TestCustomBackoff(t *testing.T) {
	inBubble(t, []http.HandlerFunc{answer(503), answer(503), says("hello")}, []grpcretry.Option{grpcretry.WithBackoff(linear(second))},
		func(t *testing.T, client *http.Client, server *script) {
			wantResponse(t, client, newRequest(t, "GET", "http://test", nil), 200, "hello")
			server.wantTimes(t, 0, second, 3*second)
		})
}

type linear time.Duration

func (l linear) Delay(retry int, _ time.Duration, _ float64) time.Duration {
	return time.Duration(retry) * time.Duration(l)
}

// A chain of redirects that is too long is no failure of any request in it.
func TestRedirectLoop(t *testing.T) {
	requests := 0
	client, web := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		requests++
		http.Redirect(w, r, "/", http.StatusFound)
	}), quick)
	if _, err := client.Do(newRequest(t, "GET", web.URL, nil)); err == nil || !strings.Contains(err.Error(), "stopped after 10 redirects") ||
		requests != 10 {
		t.Errorf("Do = %v after %d requests", err, requests)
	}
}

// A redirected POST keeps its body, or its lack of one.
func TestRedirectWithBody(t *testing.T) {
	for _, body := range []string{`{"foo":"bar"}`, ""} {
		server := answers(t, answer(307, "Location", "/target"), echo(201))
		client, web := serve(t, server, quick)
		wantResponse(t, client, newRequest(t, "POST", web.URL, strings.NewReader(body)), 201, body)
		server.wantCount(t, 2)
	}
}

// The methods of http.Client work as without a Transport.
func TestClientMethods(t *testing.T) {
	var seen []string
	client, web := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		seen = append(seen, r.Method+" "+r.RequestURI+" "+r.Header.Get("Content-Type")+" "+string(body))
		w.Header().Set("Content-Length", "0")
	}))
	address := web.URL + "/a?b=c"
	for _, send := range []func() (*http.Response, error){
		func() (*http.Response, error) { return client.Get(address) },
		func() (*http.Response, error) { return client.Head(address) },
		func() (*http.Response, error) {
			return client.Post(address, "application/json", strings.NewReader("{}"))
		},
		func() (*http.Response, error) { return client.PostForm(address, url.Values{"hello": {"world"}}) },
	} {
		resp, err := send()
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
	}
	want := []string{"GET /a?b=c  ", "HEAD /a?b=c  ", "POST /a?b=c application/json {}",
		"POST /a?b=c application/x-www-form-urlencoded hello=world"}
	if !slices.Equal(seen, want) {
		t.Errorf("requests %q, want %q", seen, want)
	}
}

// A classifier makes a status retryable.
func TestNotFoundIsRetried(t *testing.T) {
	server := answers(t, answer(404), answer(404), says("success!"))
	client, web := serve(t, server, quick,
		grpcretry.WithMethod("/http/", grpcretry.WithClassifier(func(_ context.Context, a grpcretry.Attempt) grpcretry.Classification {
			if e, ok := errtype.As[*StatusError](a.Err); ok && e.StatusCode == http.StatusNotFound {
				return grpcretry.Retry
			}
			return grpcretry.Default
		})))
	wantResponse(t, client, newRequest(t, "GET", web.URL, nil), 200, "success!")
	server.wantCount(t, 3)
}
