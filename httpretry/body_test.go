package httpretry

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/grpcretry/grpcretry"
)

// echo answers with a status, what was sent and its length.
func echo(code int) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		w.Header().Set("X-Length", http.StatusText(code))
		w.WriteHeader(code)
		w.Write(body)
	}
}

// A tracked body counts how often it is closed, and is not replayable.
type trackedBody struct {
	io.Reader
	reads, closes atomic.Int64
}

func tracked(s string) *trackedBody { return &trackedBody{Reader: strings.NewReader(s)} }

func (b *trackedBody) Read(p []byte) (int, error) {
	b.reads.Add(1)
	return b.Reader.Read(p)
}

func (b *trackedBody) Close() error { b.closes.Add(1); return nil }

func wantClosed(t *testing.T, bodies ...*trackedBody) {
	t.Helper()
	for i, b := range bodies {
		if got := b.closes.Load(); got != 1 {
			t.Errorf("body %d was closed %d times, want once", i+1, got)
		}
	}
}

func TestBodyIsReplayed(t *testing.T) {
	server := answers(t, echo(503), echo(503), echo(200))
	client, web := serve(t, server, quick)
	wantResponse(t, client, newRequest(t, "PUT", web.URL, bytes.NewBufferString("hello")), 200, "hello")
	server.wantCount(t, 3)
}

// Each attempt's body is closed once, and the caller's request stays as it was.
func TestBodiesAreClosed(t *testing.T) {
	server := answers(t, echo(503), echo(503), echo(200))
	client, web := serve(t, server, quick)
	bodies := []*trackedBody{tracked("hello")}
	req := newRequest(t, "PUT", web.URL, nil)
	req.Body, req.ContentLength = bodies[0], 5
	req.GetBody = func() (io.ReadCloser, error) {
		bodies = append(bodies, tracked("hello"))
		return bodies[len(bodies)-1], nil
	}
	before := *req
	wantResponse(t, client, req, 200, "hello")
	if req.Body != before.Body || req.ContentLength != 5 || req.Context() != before.Context() || len(req.Header) != 0 {
		t.Errorf("the request has changed: %+v", req)
	}
	if len(bodies) != 3 {
		t.Errorf("%d bodies, want 3", len(bodies))
	}
	wantClosed(t, bodies...)
}

// A body that cannot be replayed is sent once. Its response is the caller's.
func TestBodyWithoutGetBody(t *testing.T) {
	server := answers(t, echo(503))
	client, web := serve(t, server, grpcretry.WithBackoff(grpcretry.Constant(time.Hour))) // nobody waits
	body := tracked("hello")
	wantResponse(t, client, newRequest(t, "PUT", web.URL, body), 503, "hello")
	server.wantCount(t, 1)
	wantClosed(t, body)
}

// If nothing was read of it, because there was no connection, it is sent again.
func TestUnreadBodyWithoutGetBody(t *testing.T) {
	for _, failures := range []int{1, 2, 4, 7} {
		server := httptest.NewServer(answers(t, echo(200)))
		dials := 0
		var dialer net.Dialer
		base := &http.Transport{DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			if dials++; dials <= failures {
				return nil, &net.OpError{Op: "dial", Net: network, Err: errors.New("connection refused")}
			}
			return dialer.DialContext(ctx, network, address)
		}}
		client := &http.Client{Transport: NewTransport(newRetrier(t, quick), base)}
		body := tracked("hello")
		code, text, err := do(t, client, newRequest(t, "PUT", server.URL, body))
		if code != 200 || text != "hello" || dials != failures+1 {
			t.Errorf("after %d failures: %d %q, %v", failures, code, text, err)
		}
		wantClosed(t, body)
		client.CloseIdleConnections()
		server.Close()
	}
}

func TestGetBodyFails(t *testing.T) {
	server := answers(t, echo(503))
	client, web := serve(t, server, quick)
	broken, body := errors.New("disk on fire"), tracked("hello")
	req := newRequest(t, "PUT", web.URL, body)
	req.GetBody = func() (io.ReadCloser, error) { return nil, broken }
	_, _, err := do(t, client, req)
	if !errors.Is(err, broken) || !errors.Is(err, grpcretry.ErrNotRetryable) || len(asError(t, err).Attempts) != 2 {
		t.Errorf("err = %v", err)
	}
	server.wantCount(t, 1)
	wantClosed(t, body)
}

// An error of the body is the caller's own, whatever it looks like.
func TestBodyFails(t *testing.T) {
	for _, broken := range []error{io.ErrUnexpectedEOF, &net.OpError{Op: "read", Err: errors.New("reset")}, errors.New("disk on fire")} {
		client, web := serve(t, http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { io.Copy(io.Discard, r.Body) }),
			quick, grpcretry.WithCodes(codes.Unknown, codes.Unavailable))
		body := &trackedBody{Reader: io.MultiReader(strings.NewReader("hel"), iotestErr{broken})}
		req := newRequest(t, "PUT", web.URL, body)
		made := 0
		req.GetBody = func() (io.ReadCloser, error) { made++; return nil, errors.New("no retry") }
		_, err := client.Transport.RoundTrip(req)
		if err != broken || made != 0 {
			t.Errorf("RoundTrip = %v with %d retries, want %v", err, made, broken)
		}
		wantClosed(t, body)
	}
}

type iotestErr struct{ err error }

func (e iotestErr) Read([]byte) (int, error) { return 0, e.err }

// The length, the trailer and the absence of a body reach the server in each attempt.
func TestRequestIsPreserved(t *testing.T) {
	var lengths []int64
	var trailers []string
	look := func(code int) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			io.Copy(io.Discard, r.Body)
			lengths, trailers = append(lengths, r.ContentLength), append(trailers, r.Trailer.Get("X-Sum"))
			w.WriteHeader(code)
		}
	}
	client, web := serve(t, answers(t, look(503), look(200), look(503), look(200), look(503), look(200)), quick)
	wantResponse(t, client, newRequest(t, "PUT", web.URL, strings.NewReader("hello")), 200, "")
	wantResponse(t, client, newRequest(t, "PUT", web.URL, nil), 200, "")
	req := newRequest(t, "PUT", web.URL, strings.NewReader("hello"))
	req.ContentLength, req.Trailer = -1, http.Header{"X-Sum": {"42"}}
	wantResponse(t, client, req, 200, "")
	for i, want := range []int64{5, 5, 0, 0, -1, -1} {
		if lengths[i] != want || (trailers[i] == "42") != (want < 0) {
			t.Errorf("request %d: length %d, trailer %q", i+1, lengths[i], trailers[i])
		}
	}
}

// With 100-continue, a server that rejects the header never gets the body, so that even a body without
// GetBody can be sent with the next attempt.
func TestExpectContinue(t *testing.T) {
	for _, replayable := range []bool{true, false} {
		server := answers(t, answer(503), echo(200))
		client, web := serve(t, server, quick)
		transport := client.Transport.(*Transport).Base.(*http.Transport)
		transport.ExpectContinueTimeout = 10 * second
		continued := 0
		req := newRequest(t, "PUT", web.URL, strings.NewReader("hello"))
		if !replayable {
			req.GetBody = nil
		}
		req.Header.Set("Expect", "100-continue")
		req = req.WithContext(httptrace.WithClientTrace(req.Context(), &httptrace.ClientTrace{Got100Continue: func() { continued++ }}))
		wantResponse(t, client, req, 200, "hello")
		server.wantCount(t, 2)
		if continued != 1 {
			t.Errorf("replayable %v: %d times 100 Continue, want 1", replayable, continued)
		}
	}
}

// A body that is read after the retry was decided on cannot be sent again: the response is the caller's
// after all.
func TestBodyIsReadLate(t *testing.T) {
	var sent *http.Request
	made := 0
	r := newRetrier(t, quick, grpcretry.WithObserver(func(_ context.Context, e grpcretry.Event) {
		if e.Kind == grpcretry.Decision && e.Attempt.Number == 1 {
			io.ReadAll(sent.Body)
		}
	}))
	transport := NewTransport(r, roundTripper(func(r *http.Request) (*http.Response, error) {
		made++
		sent = r
		return reply(r, 503, "still here"), nil
	}))
	body := tracked("hello")
	resp, err := transport.RoundTrip(newRequest(t, "PUT", "http://test", body))
	if err != nil || made != 1 {
		t.Fatalf("RoundTrip = %v after %d attempts", err, made)
	}
	if text, err := io.ReadAll(resp.Body); string(text) != "still here" || err != nil {
		t.Errorf("body %q, %v", text, err)
	}
	sent.Body.Close()
	wantClosed(t, body)
}

// An attempt that was given up cannot read the next one's body.
func TestRetiredBody(t *testing.T) {
	var requests []*http.Request
	transport := NewTransport(newRetrier(t, quick), roundTripper(func(r *http.Request) (*http.Response, error) {
		if requests = append(requests, r); len(requests) == 1 {
			return reply(r, 503, ""), nil
		}
		if n, err := requests[0].Body.Read(make([]byte, 1)); n != 0 || err == nil {
			t.Errorf("Read = %d, %v, want an error", n, err)
		}
		requests[0].Body.Close()
		text, err := io.ReadAll(r.Body)
		r.Body.Close()
		return reply(r, 200, string(text)), err
	}))
	body := tracked("hello")
	wantResponse(t, &http.Client{Transport: transport}, newRequest(t, "PUT", "http://test", body), 200, "hello")
	wantClosed(t, body)
}

// A body that was read is closed as soon as Base closes it. After that, it cannot be read, and an error of
// the source is not the caller's fault.
func TestRequestBody(t *testing.T) {
	source := tracked("hello")
	body := &requestBody{source: source, only: true}
	if n, err := body.Read(make([]byte, 2)); n != 2 || err != nil {
		t.Errorf("Read = %d, %v", n, err)
	}
	body.Close()
	wantClosed(t, source)
	if n, err := body.Read(make([]byte, 2)); n != 0 || err != http.ErrBodyReadAfterClose {
		t.Errorf("Read = %d, %v, want an error", n, err)
	}
	unread := &requestBody{source: tracked("hello"), only: true}
	unread.Close()
	if n, err := unread.Read(make([]byte, 2)); n != 0 || err != http.ErrBodyReadAfterClose {
		t.Errorf("Read = %d, %v, want an error", n, err)
	}
	retired := &requestBody{source: tracked("hello"), only: true}
	if !retired.retire() {
		t.Error("a body that was not read is not retired")
	}
	if n, err := retired.Read(make([]byte, 2)); n != 0 || err != http.ErrBodyReadAfterClose {
		t.Errorf("Read = %d, %v, want an error: another attempt will have the source", n, err)
	}
	late := &requestBody{}
	late.source = &trackedBody{Reader: readerFunc(func() (int, error) {
		late.Close()
		return 0, errors.New("file already closed")
	})}
	if _, err := late.Read(make([]byte, 2)); err == nil || late.readError() != nil {
		t.Errorf("Read = %v, of the caller: %v", err, late.readError())
	}
}

type readerFunc func() (int, error)

func (f readerFunc) Read([]byte) (int, error) { return f() }
