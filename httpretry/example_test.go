package httpretry_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"time"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/httpretry"
)

// flaky is a server whose first response to each client is a failure.
func flaky(status int, header http.Header) *httptest.Server {
	var requests atomic.Int64
	return httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if requests.Add(1) == 1 {
			for key, values := range header {
				w.Header()[key] = values
			}
			w.WriteHeader(status)
			return
		}
		body, _ := io.ReadAll(r.Body)
		fmt.Fprintf(w, "%s %s in request %d", r.Method, body, requests.Load())
	}))
}

// A GET survives a 503.
func Example() {
	server := flaky(http.StatusServiceUnavailable, nil)
	defer server.Close()

	retrier, err := grpcretry.New()
	if err != nil {
		fmt.Println(err)
		return
	}
	client := &http.Client{Transport: httpretry.NewTransport(retrier, nil)}
	defer client.CloseIdleConnections()

	resp, err := client.Get(server.URL)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	fmt.Println(resp.Status, string(body), err)
	// Output: 200 OK GET  in request 2 <nil>
}

// A server that asks for more patience than the policy allows gets no second request: the response
// is returned, and the caller can see how long to wait.
func ExampleTransport_retryAfter() {
	server := flaky(http.StatusTooManyRequests, http.Header{"Retry-After": {"60"}})
	defer server.Close()

	retrier, err := grpcretry.New(grpcretry.WithMethod("/http/", grpcretry.WithMaxServerDelay(10*time.Second)))
	if err != nil {
		fmt.Println(err)
		return
	}
	client := &http.Client{Transport: httpretry.NewTransport(retrier, nil)}
	defer client.CloseIdleConnections()

	resp, err := client.Get(server.URL)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer resp.Body.Close()
	fmt.Println(resp.Status, "after", resp.Header.Get("Retry-After"), "s")
	// Output: 429 Too Many Requests after 60 s
}

// A POST is retried if it has an Idempotency-Key, by which the server recognizes the second request
// as the same order. The body is sent again.
func ExampleTransport_idempotencyKey() {
	server := flaky(http.StatusServiceUnavailable, nil)
	defer server.Close()

	client := &http.Client{Transport: &httpretry.Transport{}} // with default settings
	defer client.CloseIdleConnections()

	req, err := http.NewRequest("POST", server.URL, strings.NewReader("one pizza"))
	if err != nil {
		fmt.Println(err)
		return
	}
	req.Header.Set("Idempotency-Key", "order-4711")
	resp, err := client.Do(req)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	fmt.Println(string(body), err)
	// Output: POST one pizza in request 2 <nil>
}

// Patterns set policies for all of HTTP, for a host, and for a host's method.
func ExampleNewTransport() {
	retrier, err := grpcretry.New(
		grpcretry.WithMethod("/http/", grpcretry.WithMaxAttempts(3)),
		grpcretry.WithMethod("/http/api.example.com/", grpcretry.WithMaxAttempts(5)),
		grpcretry.WithMethod("/http/api.example.com/PUT", grpcretry.WithAttemptTimeout(2*time.Second)),
	)
	if err != nil {
		fmt.Println(err)
		return
	}
	client := &http.Client{Transport: httpretry.NewTransport(retrier, nil)}
	defer client.CloseIdleConnections()

	for _, name := range []string{"/http/example.org/GET", "/http/api.example.com/GET", "/http/api.example.com/PUT"} {
		p := retrier.Policy(name)
		fmt.Println(name, p.MaxAttempts, p.AttemptTimeout)
	}
	// Output:
	// /http/example.org/GET 3 0s
	// /http/api.example.com/GET 5 0s
	// /http/api.example.com/PUT 5 2s
}

// A classifier makes a further status retryable.
func ExampleStatusError() {
	server := flaky(http.StatusLocked, nil)
	defer server.Close()

	locked := grpcretry.WithClassifier(func(_ context.Context, a grpcretry.Attempt) grpcretry.Classification {
		var e *httpretry.StatusError
		if errors.As(a.Err, &e) && e.StatusCode == http.StatusLocked {
			return grpcretry.Retry
		}
		return grpcretry.Default
	})
	retrier, err := grpcretry.New(grpcretry.WithMethod("/http/", locked))
	if err != nil {
		fmt.Println(err)
		return
	}
	client := &http.Client{Transport: httpretry.NewTransport(retrier, nil)}
	defer client.CloseIdleConnections()

	resp, err := client.Get(server.URL)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer resp.Body.Close()
	fmt.Println(resp.Status)
	// Output: 200 OK
}
