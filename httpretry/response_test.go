package httpretry

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/cookiejar"
	"net/http/httptest"
	"net/http/httptrace"
	"strings"
	"testing"
	"testing/iotest"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry"
)

// The connection of a discarded response is used again, if there is not too much to read.
func TestConnectionIsReused(t *testing.T) {
	large := func(size int, flush bool) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			if !flush {
				w.Header().Set("Content-Length", fmt.Sprint(size))
			}
			w.WriteHeader(503)
			w.Write(make([]byte, size))
		}
	}
	for _, tt := range []struct {
		name  string
		first http.HandlerFunc
		reuse bool
	}{
		{"empty", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(503) }, true},
		{"small", answer(503), true},
		{"the most", large(MaxDrained, false), true},
		{"the most, in chunks", large(MaxDrained, true), true},
		{"too large", large(MaxDrained+1, false), since127},
		{"too large, in chunks", large(2*MaxDrained, true), since127},
		{"too large for any Go", large(1<<20, false), false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			reused := reuses(t, tt.first)
			for range 5 { // a busy machine may need more than MaxDrainTime
				if reused != tt.reuse {
					reused = reuses(t, tt.first)
				}
			}
			if reused != tt.reuse {
				t.Errorf("the connection was used again: %v, want %v", reused, tt.reuse)
			}
		})
	}
}

// reuses reports whether the attempt after a response uses its connection.
func reuses(t *testing.T, first http.HandlerFunc) bool {
	t.Helper()
	client, web := serve(t, answers(t, first, says("hello")), quick)
	var reused []bool
	req := newRequest(t, "GET", web.URL, nil)
	req = req.WithContext(httptrace.WithClientTrace(req.Context(), &httptrace.ClientTrace{
		GotConn: func(info httptrace.GotConnInfo) { reused = append(reused, info.Reused) },
	}))
	wantResponse(t, client, req, 200, "hello")
	if len(reused) != 2 || reused[0] {
		t.Fatalf("connections reused: %v, want two", reused)
	}
	return reused[1]
}

// Each discarded body is closed once, before the wait, and the last one by the caller alone.
func TestBodiesOfResponses(t *testing.T) {
	var bodies []*trackedBody
	transport := NewTransport(newRetrier(t, quick, grpcretry.WithMaxAttempts(3)), roundTripper(func(r *http.Request) (*http.Response, error) {
		for _, b := range bodies {
			wantClosed(t, b)
		}
		resp, body := reply(r, 503, ""), tracked("busy")
		resp.Body = body
		bodies = append(bodies, body)
		return resp, nil
	}))
	resp, err := transport.RoundTrip(newRequest(t, "GET", "http://test", nil))
	if err != nil || len(bodies) != 3 || resp.Body != bodies[2] || bodies[2].reads.Load() != 0 || bodies[2].closes.Load() != 0 {
		t.Errorf("RoundTrip = %v, %v after %d attempts", resp, err, len(bodies))
	}
}

// A body that is not read is closed immediately, and the next attempt does not wait for it.
func TestBodiesThatAreNotRead(t *testing.T) {
	for name, prepare := range map[string]func(*http.Response){
		"too large":    func(r *http.Response) { r.ContentLength = MaxDrained + 1 },
		"uncompressed": func(r *http.Response) { r.Uncompressed, r.ContentLength = true, -1 },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				body, made := tracked("busy"), 0
				transport := NewTransport(newRetrier(t, grpcretry.WithBackoff(grpcretry.Constant(0))),
					roundTripper(func(r *http.Request) (*http.Response, error) {
						if made++; made > 1 {
							wantClosed(t, body)
							return reply(r, 200, ""), nil
						}
						resp := reply(r, 503, "")
						resp.Body = body
						prepare(resp)
						return resp, nil
					}))
				start := time.Now()
				if _, err := transport.RoundTrip(newRequest(t, "GET", "http://test", nil)); err != nil {
					t.Error(err)
				}
				if made != 2 || body.reads.Load() != 0 || time.Since(start) != 0 {
					t.Errorf("%d attempts in %v, and %d reads; want 2 in no time, and none", made, time.Since(start), body.reads.Load())
				}
			})
		})
	}
}

// A part of a response is none.
func TestABrokenResponseIsNotKept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		transport := NewTransport(newRetrier(t, steady, grpcretry.WithPatience(3*second),
			grpcretry.WithRatioBudget(grpcretry.RatioBudget{Ratio: 0.1, Reserve: grpcretry.Nothing})),
			roundTripper(func(r *http.Request) (*http.Response, error) {
				resp := reply(r, 503, "")
				resp.ContentLength = 5
				resp.Body = io.NopCloser(io.MultiReader(strings.NewReader("bus"), iotest.ErrReader(io.ErrUnexpectedEOF)))
				return resp, nil
			}))
		resp, err := transport.RoundTrip(newRequest(t, "GET", "http://test", nil))
		if resp != nil || !errors.Is(err, grpcretry.ErrTargetDown) {
			t.Errorf("RoundTrip = %v, %v, want the reason that it ended with", resp, err)
		}
	})
}

// A call that ends in a wait has the last response, if all of that could be kept.
func TestResponseOfACallThatEndsInItsWait(t *testing.T) {
	for size, kept := range map[int]bool{0: true, 5: true, MaxDrained: true, MaxDrained + 1: false} {
		text := strings.Repeat("x", size)
		inBubble(t, []http.HandlerFunc{func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(503)
			io.WriteString(w, text)
		}}, []grpcretry.Option{steady, grpcretry.WithRatioBudget(grpcretry.RatioBudget{Ratio: 0.1, Reserve: grpcretry.Nothing}),
			grpcretry.WithPatience(3 * second)},
			func(t *testing.T, client *http.Client, server *script) {
				if kept {
					wantResponse(t, client, newRequest(t, "GET", "http://test", nil), 503, text)
				} else if _, err := client.Do(newRequest(t, "GET", "http://test", nil)); !errors.Is(err, grpcretry.ErrTargetDown) {
					t.Errorf("Do = %v, want the reason that it ended with", err)
				}
				server.wantCount(t, 1)
			})
	}
}

// A response without a body, as only faulty RoundTrippers return it, is discarded, too.
func TestNoBody(t *testing.T) {
	made := 0
	for _, timeout := range []time.Duration{0, time.Minute} {
		transport := NewTransport(newRetrier(t, quick, grpcretry.WithAttemptTimeout(timeout)),
			roundTripper(func(r *http.Request) (*http.Response, error) {
				made++
				return &http.Response{StatusCode: 503}, nil
			}))
		resp, err := transport.RoundTrip(newRequest(t, "GET", "http://test", nil))
		if err != nil || resp.Body != nil {
			t.Errorf("RoundTrip = %v, %v", resp, err)
		}
	}
	if made != 8 {
		t.Errorf("%d attempts, want 8", made)
	}
}

// After 101, the body is the connection, to be read, written and closed on either side.
func TestUpgrade(t *testing.T) {
	for _, timeout := range []time.Duration{0, time.Minute} {
		upgrade := func(w http.ResponseWriter, r *http.Request) {
			conn, buffered, err := http.NewResponseController(w).Hijack()
			if err != nil {
				t.Error(err)
				return
			}
			defer conn.Close()
			io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: echo\r\n\r\n")
			line, _ := buffered.ReadString('\n')
			io.WriteString(conn, line)
		}
		client, web := serve(t, answers(t, answer(503), upgrade), quick, grpcretry.WithAttemptTimeout(timeout))
		req := newRequest(t, "GET", web.URL, nil)
		req.Header.Set("Connection", "Upgrade")
		req.Header.Set("Upgrade", "echo")
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		conn, ok := resp.Body.(io.ReadWriteCloser)
		if !ok || resp.StatusCode != 101 {
			t.Fatalf("status %d with a body of %T", resp.StatusCode, resp.Body)
		}
		io.WriteString(conn, "hello\n")
		if half, ok := conn.(interface{ CloseWrite() error }); !ok || half.CloseWrite() != nil {
			t.Errorf("a body of %T cannot be closed for writing", conn)
		}
		if line, err := bufio.NewReader(conn).ReadString('\n'); line != "hello\n" {
			t.Errorf("read %q, %v", line, err)
		}
		if err := conn.Close(); err != nil {
			t.Error(err)
		}
	}
	plain := &upgradedBody{responseBody: &responseBody{ReadCloser: http.NoBody}}
	if err := plain.CloseWrite(); !errors.Is(err, http.ErrNotSupported) {
		t.Errorf("CloseWrite = %v", err)
	}
}

// Each request of a chain of redirects is retried, with the cookies that were set on the way.
func TestRedirectsAndCookies(t *testing.T) {
	mux := http.NewServeMux()
	seen := map[string]int{}
	flaky := func(path string, handler http.HandlerFunc) {
		mux.HandleFunc(path, func(w http.ResponseWriter, r *http.Request) {
			if seen[path]++; seen[path] == 1 {
				http.SetCookie(w, &http.Cookie{Name: "lost", Value: "x"}) // with a response that is discarded
				w.WriteHeader(503)
				return
			}
			handler(w, r)
		})
	}
	flaky("/start", func(w http.ResponseWriter, r *http.Request) {
		http.SetCookie(w, &http.Cookie{Name: "session", Value: "42"})
		http.Redirect(w, r, "/end", http.StatusTemporaryRedirect)
	})
	flaky("/end", func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		fmt.Fprint(w, r.Method, " ", string(body), " ", r.Header.Get("Cookie"))
	})
	client, web := serve(t, mux, quick)
	client.Jar, _ = cookiejar.New(nil)
	wantResponse(t, client, newRequest(t, "PUT", web.URL+"/start", strings.NewReader("hello")), 200, "PUT hello session=42")
	if seen["/start"] != 2 || seen["/end"] != 2 {
		t.Errorf("requests: %v, want 2 each", seen)
	}
}

// Transport forwards CloseIdleConnections.
func TestCloseIdleConnections(t *testing.T) {
	base := &idler{}
	(&http.Client{Transport: NewTransport(nil, base)}).CloseIdleConnections()
	if base.closed != 1 {
		t.Errorf("closed %d times, want once", base.closed)
	}
	NewTransport(nil, roundTripper(nil)).CloseIdleConnections()
}

type idler struct {
	http.RoundTripper
	closed int
}

func (i *idler) CloseIdleConnections() { i.closed++ }

// The deprecated Request.Cancel ends an attempt, and thereby the call.
func TestRequestCancel(t *testing.T) {
	cancel := make(chan struct{})
	server := answers(t, answer(503), func(_ http.ResponseWriter, r *http.Request) {
		close(cancel)
		<-r.Context().Done()
	})
	client, web := serve(t, server, quick)
	req := newRequest(t, "GET", web.URL, nil)
	req.Cancel = cancel //nolint:staticcheck // deprecated, but http.Client still sets it
	if _, err := client.Do(req); err == nil || !strings.Contains(err.Error(), "request canceled") {
		t.Errorf("Do = %v", err)
	}
	server.wantCount(t, 2)
}

// Responses are compressed and read as without a Transport.
func TestGzip(t *testing.T) {
	zipped := func(code int) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Encoding", "gzip")
			w.WriteHeader(code)
			w.Write(gzipped("hello"))
		}
	}
	client, web := serve(t, answers(t, zipped(503), zipped(200)), quick)
	wantResponse(t, client, newRequest(t, "GET", web.URL, nil), 200, "hello")
}

// The errors that are returned have statuses, also for an outer retry.
func TestStatusError(t *testing.T) {
	made := &StatusError{StatusCode: 503, Status: "503 Service Unavailable"}
	if made.GRPCStatus().Code() != codes.Unavailable || made.Error() != "http: status 503 Service Unavailable" {
		t.Errorf("%v, %v", made, made.GRPCStatus())
	}
	for status, want := range map[string]string{"": "http: status 404 Not Found", "404 No Such Cat": "http: status 404 No Such Cat"} {
		err := newStatusError(&http.Response{StatusCode: 404, Status: status})
		if got := grpcstatus.Convert(err); err.Error() != want || got.Message() != want || len(got.Details()) != 0 {
			t.Errorf("err = %v with %v and details %v, want %s without details", err, got, got.Details(), want)
		}
	}
}

// Many requests at the same time, some of whose callers leave, share a Transport.
func TestConcurrent(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		if len(body)%3 != 0 {
			w.WriteHeader(503)
		}
		w.Write(body)
	}))
	defer server.Close()
	client := clientOf(t, server, quick, grpcretry.WithBudget(grpcretry.Unlimited), grpcretry.WithAttemptTimeout(30*second),
		grpcretry.WithPatience(0))
	done := make(chan error)
	const requests = 60
	for n := range requests {
		go func() {
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			if n%5 == 0 {
				time.AfterFunc(time.Duration(n)*100*time.Microsecond, cancel)
			}
			text := strings.Repeat("x", n)
			req, _ := http.NewRequestWithContext(ctx, "PUT", server.URL, strings.NewReader(text))
			resp, err := client.Do(req)
			var body []byte
			if err == nil {
				body, err = io.ReadAll(resp.Body)
				resp.Body.Close()
			}
			switch {
			case err != nil && n%5 == 0 && errors.Is(err, context.Canceled):
				err = nil
			case err == nil && (string(body) != text || (resp.StatusCode == 200) != (n%3 == 0)):
				err = fmt.Errorf("request %d: %d bytes with status %d", n, len(body), resp.StatusCode)
			}
			done <- err
		}()
	}
	for range requests {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

func gzipped(text string) []byte {
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	io.WriteString(w, text)
	w.Close()
	return b.Bytes()
}

// A response whose attempt the context's end has crossed is returned, as net/http does. One that is not returned is closed: the
// request's body, which cannot be sent twice, was read after the decision, and then the context ends in the wait.
func TestAResponseIsReturnedOrClosed(t *testing.T) {
	for name, tt := range map[string]struct {
		code     int
		crosses  bool
		returned bool
	}{
		"a success":      {200, true, true},
		"not found":      {404, true, true},
		"a timeout":      {408, true, true},
		"down":           {503, true, true},
		"down, and then": {503, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				body := &closeCounter{Reader: strings.NewReader("sorry")}
				var sent io.Reader
				base := roundTripper(func(r *http.Request) (*http.Response, error) {
					sent = r.Body
					resp := reply(r, tt.code, "")
					resp.Body = body
					if tt.crosses {
						cancel()
					}
					return resp, nil
				})
				retrier := newRetrier(t, steady, grpcretry.WithObserver(func(_ context.Context, e grpcretry.Event) {
					if e.Kind == grpcretry.Decision && !tt.crosses {
						sent.Read(make([]byte, 1)) // as net/http's goroutine does that writes a request
						time.AfterFunc(time.Millisecond, cancel)
					}
				}))
				req := newRequest(t, "PUT", "http://test", struct{ io.Reader }{strings.NewReader("once")}).WithContext(ctx)
				resp, err := NewTransport(retrier, base).RoundTrip(req)
				if (resp != nil) != tt.returned || (err == nil) != tt.returned || (body.closed > 0) == tt.returned {
					t.Errorf("RoundTrip = %v, %v, body closed %d times, want a response %v", resp, err, body.closed, tt.returned)
				}
				if resp != nil {
					resp.Body.Close()
				}
			})
		})
	}
}

type closeCounter struct {
	io.Reader
	closed int
}

func (c *closeCounter) Close() error { c.closed++; return nil }

// The cause of a context may be one of the library's own reasons, if another call has given up.
func TestACauseThatIsAReasonEndsTheWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancelCause(t.Context())
		time.AfterFunc(time.Millisecond, func() { cancel(grpcretry.ErrBudgetExhausted) })
		base := roundTripper(func(r *http.Request) (*http.Response, error) { return reply(r, 503, "sorry"), nil })
		resp, err := NewTransport(newRetrier(t, steady), base).RoundTrip(newRequest(t, "GET", "http://test", nil).WithContext(ctx))
		if resp != nil || !errors.Is(err, context.Canceled) {
			t.Errorf("RoundTrip = %v, %v, want the end of the context", resp, err)
		}
	})
}
