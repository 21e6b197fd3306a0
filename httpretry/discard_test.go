package httpretry

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/grpcretry/grpcretry"
)

// A compressed body that stalls holds up nothing: while net/http's reader waits for the header of the
// compressed data, it holds the lock that its Close needs.
func TestStalledGzipIsDiscarded(t *testing.T) {
	for _, http2 := range []bool{false, true} {
		stalled := func(w http.ResponseWriter, r *http.Request) {
			w.Header().Set("Content-Encoding", "gzip")
			w.WriteHeader(503)
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		}
		server := httptest.NewUnstartedServer(answers(t, stalled, says("hello")))
		server.EnableHTTP2 = http2
		server.StartTLS()
		client := clientOf(t, server, quick)
		ctx, cancel := context.WithTimeout(t.Context(), 30*second)
		start := time.Now()
		wantResponse(t, client, newRequest(t, "GET", server.URL, nil).WithContext(ctx), 200, "hello")
		if took := time.Since(start); took > 20*second {
			t.Errorf("HTTP/2 %v: the call took %v", http2, took)
		}
		cancel()
		client.CloseIdleConnections()
		server.Close()
	}
}

// A body whose Close does not interrupt Read holds up the retry for no longer than any other.
func TestBodyThatCloseDoesNotInterrupt(t *testing.T) {
	for _, backoff := range []time.Duration{0, second} {
		synctest.Test(t, func(t *testing.T) {
			var times []time.Duration
			start, body := time.Now(), &stubbornBody{release: make(chan struct{})}
			transport := NewTransport(newRetrier(t, grpcretry.WithBackoff(grpcretry.Constant(backoff))),
				roundTripper(func(r *http.Request) (*http.Response, error) {
					times = append(times, time.Since(start))
					if len(times) > 1 {
						return reply(r, 200, "hello"), nil
					}
					resp := reply(r, 503, "")
					resp.Body, resp.ContentLength = body, -1
					return resp, nil
				}))
			wantResponse(t, &http.Client{Transport: transport}, newRequest(t, "GET", "http://test", nil), 200, "hello")
			if want := max(backoff, MaxDrainTime); len(times) != 2 || times[1] != want {
				t.Errorf("attempts after %v, want one immediately and one after %v", times, want)
			}
			close(body.release)
			synctest.Wait()
			if n := body.closes.Load(); n != 1 {
				t.Errorf("the body was closed %d times, want once", n)
			}
		})
	}
}

// A caller who leaves while a response is discarded is not kept waiting.
func TestContextEndsDiscarding(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		body := &stubbornBody{release: make(chan struct{})}
		transport := NewTransport(newRetrier(t, steady), roundTripper(func(r *http.Request) (*http.Response, error) {
			resp := reply(r, 503, "")
			resp.Body, resp.ContentLength = body, -1
			return resp, nil
		}))
		ctx, cancel := context.WithCancel(t.Context())
		time.AfterFunc(MaxDrainTime/2, cancel)
		start := time.Now()
		_, err := transport.RoundTrip(newRequest(t, "GET", "http://test", nil).WithContext(ctx))
		if took := time.Since(start); !errors.Is(err, context.Canceled) || took != MaxDrainTime/2 {
			t.Errorf("RoundTrip = %v after %v, want the context's error after %v", err, took, MaxDrainTime/2)
		}
		close(body.release)
	})
}

// A stubbornBody is a body whose Close, and whose Read, return only when the test lets them.
type stubbornBody struct {
	release chan struct{}
	closes  atomic.Int32
}

func (b *stubbornBody) Read([]byte) (int, error) { <-b.release; return 0, io.EOF }
func (b *stubbornBody) Close() error             { b.closes.Add(1); <-b.release; return nil }

// A response without a body that nobody closes leaves nothing in the caller's context.
func TestUnclosedResponsesWithoutABody(t *testing.T) {
	for _, http2 := range []bool{false, true} {
		for _, method := range []string{"HEAD", "GET", "PUT"} {
			contexts := make(chan context.Context, 1)
			server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if io.Copy(io.Discard, r.Body); method == "HEAD" {
					w.Header().Set("Content-Length", "5")
				} else {
					w.WriteHeader(204)
				}
			}))
			server.EnableHTTP2 = http2
			server.StartTLS()
			client := clientOf(t, server, grpcretry.WithAttemptTimeout(time.Minute))
			transport := client.Transport.(*Transport)
			base := transport.Base
			transport.Base = roundTripper(func(r *http.Request) (*http.Response, error) {
				contexts <- r.Context()
				return base.RoundTrip(r)
			})
			ctx, cancel := context.WithCancel(t.Context())
			var body io.Reader
			if method == "PUT" {
				body = strings.NewReader("hello")
			}
			resp, err := client.Do(newRequest(t, method, server.URL, body).WithContext(ctx))
			if err != nil {
				t.Fatal(err)
			}
			select {
			case <-(<-contexts).Done(): // maybe soon: another goroutine of net/http closes the request's body
			case <-time.After(time.Minute):
				t.Errorf("%s with %s: the context of the attempt is still there", method, resp.Proto)
			}
			if text, err := io.ReadAll(resp.Body); len(text) > 0 || err != nil {
				t.Errorf("%s with %s: read %q, %v", method, resp.Proto, text, err)
			}
			cancel()
			base.(*http.Transport).CloseIdleConnections()
			server.Close()
		}
	}
}
