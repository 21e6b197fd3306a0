package httpretry

import (
	"context"
	"go/build"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/test/bufconn"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/grpcretrytest"
	"github.com/grpcretry/grpcretry/internal/errtype"
	"github.com/grpcretry/grpcretry/internal/goroutines"
)

// TestMain fails if a test outside a bubble leaves a goroutine behind.
func TestMain(m *testing.M) { goroutines.Main(m) }

const second = time.Second

// Since Go 1.27 net/http reads up to 256 KiB of a body after Close, for up to 50 ms, to use the connection again, and
// no longer repeats a request after PROTOCOL_ERROR.
var since127 = slices.Contains(build.Default.ReleaseTags, "go1.27")

// quick is a backoff that a test over real connections can wait for.
var quick = grpcretry.WithBackoff(grpcretry.Constant(time.Millisecond))

// steady is a backoff without jitter: 1 s, 2 s, 4 s, …
var steady = grpcretry.WithBackoff(grpcretry.Exponential{Base: time.Second, Max: time.Hour, Jitter: grpcretry.NoJitter})

func newRetrier(t testing.TB, opts ...grpcretry.Option) *grpcretry.Retrier {
	t.Helper()
	unmoved := grpcretrytest.Jitter(0) // a target that is failing makes no wait longer
	r, err := grpcretry.New(append([]grpcretry.Option{unmoved}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// A script answers the requests of a test, one handler for each, and fails the test if there are more.
// It remembers when they came.
type script struct {
	t        testing.TB
	handlers []http.HandlerFunc
	start    time.Time

	mu    sync.Mutex
	times []time.Duration
}

func (s *script) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	n := len(s.times)
	s.times = append(s.times, time.Since(s.start))
	s.mu.Unlock()
	if n >= len(s.handlers) {
		s.t.Errorf("request %d: %s %s, want %d at most", n+1, r.Method, r.URL, len(s.handlers))
		w.WriteHeader(http.StatusTeapot)
		return
	}
	s.handlers[n](w, r)
}

func (s *script) count() int { return len(s.seen()) }

func (s *script) seen() []time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]time.Duration(nil), s.times...)
}

// wantCount compares the number of requests that the server has seen.
func (s *script) wantCount(t testing.TB, want int) {
	t.Helper()
	if got := s.count(); got != want {
		t.Errorf("server saw %d requests, want %d", got, want)
	}
}

func (s *script) wantTimes(t testing.TB, want ...time.Duration) {
	t.Helper()
	got := s.seen()
	if len(got) != len(want) {
		t.Fatalf("server saw requests at %v, want %v", got, want)
	}
	for i := range want {
		if got[i] != want[i] {
			t.Fatalf("server saw requests at %v, want %v", got, want)
		}
	}
}

func answers(t testing.TB, handlers ...http.HandlerFunc) *script {
	return &script{t: t, handlers: handlers, start: time.Now()}
}

// answer answers with a status and its name as the body.
func answer(code int, header ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		for i := 0; i < len(header); i += 2 {
			w.Header().Add(header[i], header[i+1])
		}
		w.WriteHeader(code)
		io.WriteString(w, http.StatusText(code))
	}
}

// says answers with a body.
func says(body string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, body) }
}

// serve starts a server on the loopback interface and returns a client whose requests are retried.
func serve(t testing.TB, handler http.Handler, opts ...grpcretry.Option) (*http.Client, *httptest.Server) {
	t.Helper()
	server := httptest.NewServer(handler)
	t.Cleanup(server.Close)
	return clientOf(t, server, opts...), server
}

// clientOf returns a client of a server.
func clientOf(t testing.TB, server *httptest.Server, opts ...grpcretry.Option) *http.Client {
	t.Helper()
	client := server.Client()
	base := client.Transport
	client.Transport = NewTransport(newRetrier(t, opts...), base)
	t.Cleanup(client.CloseIdleConnections)
	return client
}

// inBubble runs a test in virtual time, with a server in memory at http://test.
func inBubble(
	t *testing.T, handlers []http.HandlerFunc, opts []grpcretry.Option, test func(t *testing.T, client *http.Client, server *script),
) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		server, listener := answers(t, handlers...), bufconn.Listen(1<<20)
		web := &http.Server{Handler: server}
		served := make(chan struct{})
		go func() { defer close(served); web.Serve(listener) }()
		base := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return listener.DialContext(ctx) }}
		defer func() { base.CloseIdleConnections(); web.Close(); <-served }()
		test(t, &http.Client{Transport: NewTransport(newRetrier(t, opts...), base)}, server)
	})
}

// roundTripper is a RoundTripper of a test.
type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

// reply is a response of a roundTripper.
func reply(r *http.Request, code int, body string) *http.Response {
	return &http.Response{
		StatusCode: code, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, Header: http.Header{},
		Body: io.NopCloser(strings.NewReader(body)), ContentLength: int64(len(body)), Request: r,
	}
}

func newRequest(t testing.TB, method, url string, body io.Reader) *http.Request {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, body)
	if err != nil {
		t.Fatal(err)
	}
	return req
}

// do sends a request and returns the response's status and body, or the error.
func do(t testing.TB, client *http.Client, req *http.Request) (code int, body string, err error) {
	t.Helper()
	resp, err := client.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Errorf("reading the body of %s %s: %v", req.Method, req.URL, err)
	}
	return resp.StatusCode, string(text), nil
}

func wantResponse(t testing.TB, client *http.Client, req *http.Request, code int, body string) {
	t.Helper()
	gotCode, gotBody, err := do(t, client, req)
	if err != nil || gotCode != code || gotBody != body {
		t.Errorf("%s %s = %d %q, %v, want %d %q", req.Method, req.URL, gotCode, gotBody, err, code, body)
	}
}

// asError returns the *grpcretry.Error of a request that must have one.
func asError(t testing.TB, err error) *grpcretry.Error {
	t.Helper()
	e, ok := errtype.As[*grpcretry.Error](err)
	if !ok {
		t.Fatalf("err = %v (%T), want a *grpcretry.Error", err, err)
	}
	return e
}
