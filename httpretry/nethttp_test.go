package httpretry

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/cookiejar"
	"net/http/httptest"
	"net/http/httptrace"
	"net/textproto"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/internal/errtype"
)

// TestLikeNetHTTP sends the same random requests through net/http's Transport alone and below ours, to
// a server that never fails: everything that a caller sees must be the same. So nothing in a program
// may depend on how fast the machine is: a request is cancelled when it has come to a known point, and
// none is sent while the connection of the one before is being closed. What still depends on it, in net/http
// itself, does not come out the same three times in a row.
func TestLikeNetHTTP(t *testing.T) {
	for seed := range uint64(3) {
		for _, http2 := range []bool{false, true} {
			for name, opts := range map[string][]grpcretry.Option{
				"default": nil, "timeout": {grpcretry.WithAttemptTimeout(time.Minute)}, "unsent": {grpcretry.WithUnsentOnly(true)},
				"off": {grpcretry.WithMaxAttempts(1)},
			} {
				different := differences(t, seed, http2, opts)
				for range 2 {
					if len(different) > 0 {
						again := differences(t, seed, http2, opts)
						maps.DeleteFunc(different, func(i int, _ string) bool { return again[i] == "" })
					}
				}
				for i, d := range different {
					t.Errorf("seed %d, HTTP/2 %v, %s, request %d:\n%s", seed, http2, name, i, d)
				}
			}
		}
	}
}

// differences runs a program without and with the library, and returns which requests differed, and how.
func differences(t *testing.T, seed uint64, http2 bool, opts []grpcretry.Option) map[int]string {
	t.Helper()
	plain := runProgram(t, seed, http2, func(base http.RoundTripper) http.RoundTripper { return base })
	ours := runProgram(t, seed, http2, func(base http.RoundTripper) http.RoundTripper { return NewTransport(newRetrier(t, opts...), base) })
	different := map[int]string{}
	for i := range plain {
		if plain[i] != ours[i] {
			different[i] = "plain " + plain[i] + "\nours  " + ours[i]
		}
	}
	return different
}

// runProgram sends the requests that follow from a seed, and returns what the caller saw of each.
func runProgram(t *testing.T, seed uint64, http2 bool, wrap func(http.RoundTripper) http.RoundTripper) []string {
	t.Helper()
	hanging := make(chan struct{}, 1)
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { obey(w, r, hanging) }))
	var conns atomic.Int32
	server.Config.ConnState = func(_ net.Conn, s http.ConnState) {
		if s == http.StateNew {
			conns.Add(1)
		}
	}
	server.EnableHTTP2 = http2
	if http2 {
		server.StartTLS()
	} else {
		server.Start()
	}
	defer server.Close()
	random := rand.New(rand.NewPCG(seed, 17))
	settings := server.Client().Transport.(*http.Transport)
	settings.DisableKeepAlives = !http2 && random.IntN(4) == 0
	settings.ExpectContinueTimeout = time.Minute
	settings.DisableCompression = random.IntN(3) == 0
	jar, _ := cookiejar.New(nil)
	client := &http.Client{Jar: jar}
	if random.IntN(3) == 0 {
		client.Timeout = time.Minute
	}
	var seen []string
	for closing := true; len(seen) < 12; {
		what := pick(random, paths...)
		// Whether net/http notices in time that a connection is being closed, or that a request for which
		// it has a connection was cancelled, depends on the machine.
		if closing || what == "early" {
			base := settings.Clone()
			defer base.CloseIdleConnections()
			client.Transport = wrap(base)
		}
		one := sendOne(random, client, server.URL, what, hanging)
		seen = append(seen, strings.ReplaceAll(one, server.Listener.Addr().String(), "HOST"))
		closing = slices.Contains(closingPaths, what)
	}
	if http2 || settings.DisableKeepAlives {
		seen = append(seen, fmt.Sprint("connections ", conns.Load()))
	}
	return seen
}

func pick[T any](random *rand.Rand, of ...T) T { return of[random.IntN(len(of))] }

// What requests ask the server to do.
var (
	paths = []string{
		"echo", "echo", "empty", "204", "304", "hints", "gzip", "chunked", "trailer", "404", "redirect301", "redirect307", "cookie",
		"ignore", "early", "hang", "stall", "truncate", "401", "500", "close",
	}
	closingPaths = []string{"ignore", "hang", "stall", "truncate", "close"} // after these, the connection may be closed
)

func sendOne(random *rand.Rand, client *http.Client, to, what string, hanging <-chan struct{}) string {
	method := pick(random, "", "GET", "GET", "HEAD", "PUT", "PUT", "POST", "DELETE", "OPTIONS", "PATCH", "get", "PROPFIND")
	var body io.Reader
	closes := &atomic.Int32{}
	withBody := method != "" && method != "GET" && method != "HEAD" && method != "get" && random.IntN(3) > 0
	content := strings.Repeat("x", pick(random, 0, 5, 5000, 300_000))
	if withBody {
		body = strings.NewReader(content)
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	cause := pick(random, nil, errors.New("because"))
	switch what {
	case "early":
		cancel(cause)
	case "hang":
		go func() {
			select {
			case <-hanging:
				cancel(cause)
			case <-ctx.Done():
			}
		}()
	}
	events := &traced{}
	req, err := http.NewRequestWithContext(httptrace.WithClientTrace(ctx, events.trace()), method, to+"/"+what, body)
	if err != nil {
		return err.Error()
	}
	kind := "none"
	if withBody {
		kind = pick(random, "sized", "sized", "unsized", "streamed", "trailer")
		req.Body = counted{req.Body, closes}
		switch kind {
		case "unsized":
			req.ContentLength = -1
		case "streamed":
			req.GetBody = nil
		case "trailer":
			req.ContentLength, req.Trailer = -1, http.Header{"X-Sum": {"1"}}
		}
		if random.IntN(4) == 0 && content != "" {
			req.Header.Set("Expect", "100-continue")
			kind += "+expect"
		}
	}
	if random.IntN(5) == 0 {
		req.Header.Set("Idempotency-Key", "1")
	}
	if random.IntN(6) == 0 && strings.HasPrefix(to, "http:") { // with HTTP/2, net/http may repeat the request
		req.Close = true
	}
	if random.IntN(8) == 0 {
		req.Header.Set("Bad", "a\nb")
	}
	b := &strings.Builder{}
	fmt.Fprintf(b, "%s %s body %s %d close %v: ", method, what, kind, len(content), req.Close)
	resp, err := client.Do(req)
	var start string
	if what == "stall" && err == nil {
		start = readStart(resp)
		cancel(cause)
	}
	describe(b, start, req, resp, err)
	// Some of it may happen after the response.
	for i := 0; (withBody && closes.Load() == 0 || events.count("WroteHeaders") < events.count("GotConn")) && i < 10_000; i++ {
		<-time.After(time.Millisecond) // on a real connection: nothing else says that net/http is done
	}
	fmt.Fprintf(b, " closed %d events %v", closes.Load(), events.sorted())
	return b.String()
}

type counted struct {
	io.ReadCloser
	closes *atomic.Int32
}

func (c counted) Close() error { c.closes.Store(1); return c.ReadCloser.Close() }

// readStart reads what a stalling server has sent of a response's body.
func readStart(resp *http.Response) string {
	start := make([]byte, len("some"))
	n, _ := io.ReadFull(resp.Body, start)
	return string(start[:n])
}

// describe writes down a response, of whose body the start has been read, or an error.
func describe(b *strings.Builder, start string, req *http.Request, resp *http.Response, err error) {
	if err != nil {
		var u *url.Error
		errors.As(err, &u)
		text := u.Err.Error()
		if e, ours := errtype.As[*grpcretry.Error](u.Err); ours { // documented
			text = e.Last.Error()
		}
		if errors.Is(err, context.Canceled) {
			text = "cancelled"
		}
		fmt.Fprintf(b, "error %q %q %q timeout %v canceled %v eof %v", u.Op, u.URL, text, u.Timeout(), errors.Is(err, context.Canceled),
			errors.Is(err, io.EOF))
		return
	}
	rest, readErr := io.ReadAll(resp.Body)
	text := start + string(rest)
	closeErr := resp.Body.Close()
	resp.Header.Del("Date")
	_, writes := resp.Body.(io.Writer)
	fmt.Fprintf(b, "%s %s %v trailer %v %d %.20q %v %v length %d %v close %v uncompressed %v tls %v request %v %v writer %v",
		resp.Proto, resp.Status, resp.Header, resp.Trailer, len(text), text, readErr, closeErr, resp.ContentLength, resp.TransferEncoding,
		resp.Close,
		resp.Uncompressed, resp.TLS != nil, resp.Request == req, resp.Request.Context() == req.Context(), writes)
}

// traced records the events of httptrace.
type traced struct {
	mu   sync.Mutex
	list []string
}

func (e *traced) add(name string, args ...any) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.list = append(e.list, name+fmt.Sprint(args...))
}

func (e *traced) trace() *httptrace.ClientTrace {
	return &httptrace.ClientTrace{
		GetConn:              func(string) { e.add("GetConn") },
		GotConn:              func(httptrace.GotConnInfo) { e.add("GotConn") },
		GotFirstResponseByte: func() { e.add("FirstByte") },
		Got100Continue:       func() { e.add("100") },
		Got1xxResponse:       func(code int, h textproto.MIMEHeader) error { e.add("1xx", code, h); return nil },
		TLSHandshakeDone:     func(tls.ConnectionState, error) {},
		WroteHeaderField:     func(k string, v []string) { e.add("Field", k, v) },
		WroteHeaders:         func() { e.add("WroteHeaders") },
		Wait100Continue:      func() { e.add("Wait100") },
		WroteRequest:         func(i httptrace.WroteRequestInfo) {},
	}
}

func (e *traced) count(name string) (n int) {
	for _, one := range e.sorted() {
		if one == name {
			n++
		}
	}
	return n
}

// sorted returns the events in an order that does not depend on the scheduler.
func (e *traced) sorted() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Sorted(slices.Values(e.list))
}

// obey is a server that does what a request's path says. If that is to hang, it says so when it does.
func obey(w http.ResponseWriter, r *http.Request, hanging chan<- struct{}) {
	what := strings.TrimPrefix(r.URL.Path, "/")
	if what != "ignore" || r.ProtoMajor == 2 { // net/http's server may close the connection of HTTP/2
		io.Copy(io.Discard, r.Body)
	}
	switch what {
	case "echo":
		fmt.Fprintf(w, "%s %d %v %v %v", r.Method, r.ContentLength, r.TransferEncoding, r.Header, r.Trailer)
	case "empty", "ignore":
	case "204", "304":
		w.WriteHeader(map[string]int{"204": 204, "304": 304}[what])
	case "401", "404", "500":
		w.WriteHeader(map[string]int{"401": 401, "404": 404, "500": 500}[what])
		io.WriteString(w, what)
	case "hints":
		w.Header().Set("Link", "</style.css>")
		w.WriteHeader(http.StatusEarlyHints)
		w.WriteHeader(200)
		io.WriteString(w, "hinted")
	case "gzip":
		if strings.Contains(r.Header.Get("Accept-Encoding"), "gzip") {
			w.Header().Set("Content-Encoding", "gzip")
			var z bytes.Buffer
			zw := gzip.NewWriter(&z)
			io.WriteString(zw, strings.Repeat("zip", 1000))
			zw.Close()
			w.Write(z.Bytes())
		}
	case "chunked":
		for range 3 {
			io.WriteString(w, "chunk")
			w.(http.Flusher).Flush()
		}
	case "trailer":
		w.Header().Set("Trailer", "X-End")
		io.WriteString(w, "body")
		w.Header().Set("X-End", "yes")
	case "redirect301", "redirect307":
		http.SetCookie(w, &http.Cookie{Name: "where", Value: what})
		http.Redirect(w, r, "/echo", map[string]int{"redirect301": 301, "redirect307": 307}[what])
	case "cookie":
		http.SetCookie(w, &http.Cookie{Name: "a", Value: "b"})
	case "stall", "hang":
		if what == "stall" {
			io.WriteString(w, "some")
			w.(http.Flusher).Flush()
		} else {
			hanging <- struct{}{}
		}
		select {
		case <-r.Context().Done():
		case <-time.After(10 * second):
		}
	case "truncate":
		w.Header().Set("Content-Length", "100")
		io.WriteString(w, "short")
		w.(http.Flusher).Flush()
		panic(http.ErrAbortHandler)
	case "close":
		w.Header().Set("Connection", "close")
		io.WriteString(w, "bye")
	}
}
