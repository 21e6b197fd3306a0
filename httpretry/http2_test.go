package httpretry

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/test/bufconn"

	"github.com/grpcretry/grpcretry"
)

// Frames of HTTP/2 (RFC 9113, section 6).
const (
	frameData, frameHeaders, frameReset, frameSettings, framePing, frameGoAway = 0, 1, 3, 4, 6, 7

	flagAck, flagEndStream, flagEndHeaders = 1, 1, 4
)

// An h2Conn is the server's side of an HTTP/2 connection, as far as tests need it.
type h2Conn struct {
	net.Conn
}

func (c h2Conn) frame(kind, flags byte, stream uint32, payload ...byte) {
	n := len(payload)
	header := []byte{byte(n >> 16), byte(n >> 8), byte(n), kind, flags}
	c.Write(append(binary.BigEndian.AppendUint32(header, stream), payload...))
}

func (c h2Conn) ok(stream uint32) {
	c.frame(frameHeaders, flagEndHeaders|flagEndStream, stream, 0x88) // ":status: 200" in the static table of HPACK
}

func (c h2Conn) reset(stream, code uint32) {
	c.frame(frameReset, 0, stream, binary.BigEndian.AppendUint32(nil, code)...)
}

func (c h2Conn) goAway(last, code uint32) {
	c.frame(frameGoAway, 0, 0, binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(nil, last), code)...)
}

// serve reads frames, and calls request for each stream and data, unless that is nil, for each piece of a request's body.
func (c h2Conn) serve(request func(stream uint32), data func(piece string)) {
	defer c.Close()
	in := bufio.NewReader(c.Conn)
	if _, err := in.Discard(len("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")); err != nil {
		return
	}
	c.frame(frameSettings, 0, 0)
	for {
		header := make([]byte, 9)
		if _, err := io.ReadFull(in, header); err != nil {
			return
		}
		payload := make([]byte, int(header[0])<<16|int(header[1])<<8|int(header[2]))
		if _, err := io.ReadFull(in, payload); err != nil {
			return
		}
		switch kind, flags := header[3], header[4]; {
		case kind == frameSettings && flags&flagAck == 0:
			c.frame(frameSettings, flagAck, 0)
		case kind == framePing && flags&flagAck == 0:
			c.frame(framePing, flagAck, 0, payload...)
		case kind == frameHeaders:
			request(binary.BigEndian.Uint32(header[5:]))
		case kind == frameData && data != nil:
			data(string(payload))
		}
	}
}

const (
	h2ProtocolError  = 0x1
	h2HTTP11Required = 0xd
)

// Streams and connections of HTTP/2 that end before the response. net/http itself sends a request
// again if its stream was refused: 7 times, with waits that grow to half a minute.
func TestHTTP2(t *testing.T) {
	refuse := func(c h2Conn, stream uint32) { c.reset(stream, resetRefusedStream) }
	fail := func(code uint32) func(h2Conn, uint32) { return func(c h2Conn, stream uint32) { c.reset(stream, code) } }
	unsent := grpcretry.WithUnsentOnly(true)
	again, broken := 2, codes.OK // after PROTOCOL_ERROR, net/http itself sends a request again
	if since127 {
		again, broken = 1, codes.Unknown
	}
	for _, tt := range []struct {
		name     string
		fail     func(c h2Conn, stream uint32)
		times    int // that it fails
		method   string
		opts     []grpcretry.Option
		attempts int
		requests int
		code     codes.Code // of the first failure
		fails    bool
	}{
		{name: "refused once", fail: refuse, times: 1, attempts: 1, requests: 2},
		{name: "refused for long", fail: refuse, times: 8, attempts: 2, requests: 9, code: codes.Unavailable},
		{name: "refused for long, POST", fail: refuse, times: 8, method: "POST", opts: []grpcretry.Option{unsent}, attempts: 2, requests: 9,
			code: codes.Unavailable},
		{name: "internal error", fail: fail(resetInternalError), times: 1, attempts: 2, requests: 2, code: codes.Unavailable},
		{name: "internal error, POST", fail: fail(resetInternalError), times: 1, method: "POST", opts: []grpcretry.Option{unsent}, attempts: 1,
			requests: 1, code: codes.Unavailable, fails: true},
		{name: "no error", fail: fail(resetNoError), times: 1, attempts: 2, requests: 2, code: codes.Unavailable},
		{name: "cancel", fail: fail(resetCancel), times: 1, attempts: 2, requests: 2, code: codes.Unavailable},
		{name: "enhance your calm", fail: fail(resetEnhanceYourCalm), times: 1, attempts: 2, requests: 2, code: codes.ResourceExhausted},
		{name: "HTTP/1.1 required", fail: fail(h2HTTP11Required), times: 1, attempts: 1, requests: 1, code: codes.Unknown, fails: true},
		{name: "protocol error", fail: fail(h2ProtocolError), times: 1, attempts: 1, requests: again, code: broken, fails: since127},
		{name: "graceful GOAWAY", fail: func(c h2Conn, _ uint32) { c.goAway(0, 0) }, times: 1, attempts: 1, requests: 2},
		{name: "GOAWAY with an error", fail: func(c h2Conn, _ uint32) {
			c.goAway(0, resetEnhanceYourCalm)
		}, times: 1, method: "POST", opts: []grpcretry.Option{unsent}, attempts: 2, requests: 2, code: codes.Unavailable},
		{name: "GOAWAY and close", fail: func(c h2Conn, stream uint32) {
			c.goAway(stream, 0)
			c.Close()
		}, times: 1, attempts: 2, requests: 2, code: codes.Unavailable},
		{name: "GOAWAY and close, POST", fail: func(c h2Conn, stream uint32) {
			c.goAway(stream, 0)
			c.Close()
		}, times: 1, method: "POST", opts: []grpcretry.Option{unsent}, attempts: 1, requests: 1, code: codes.Unavailable, fails: true},
		{name: "close", fail: func(c h2Conn, _ uint32) { c.Close() }, times: 1, attempts: 2, requests: 2, code: codes.Unavailable},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				requests, attempts := 0, 0
				var first codes.Code
				listener := bufconn.Listen(1 << 20)
				base := &http.Transport{Protocols: new(http.Protocols), DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
					go func() {
						accepted, err := listener.Accept()
						if err != nil {
							t.Errorf("Accept: %v", err)
							return
						}
						conn := h2Conn{accepted}
						conn.serve(func(stream uint32) {
							if requests++; requests <= tt.times {
								tt.fail(conn, stream)
							} else {
								conn.ok(stream)
							}
						}, nil)
					}()
					return listener.DialContext(ctx)
				}}
				base.Protocols.SetUnencryptedHTTP2(true)
				defer base.CloseIdleConnections()
				r := newRetrier(t, append(tt.opts, steady, grpcretry.WithObserver(func(_ context.Context, e grpcretry.Event) {
					if e.Kind == grpcretry.AttemptEnd {
						if attempts++; attempts == 1 {
							first = e.Attempt.Code()
						}
					}
				}))...)
				method := tt.method
				if method == "" {
					method = "GET"
				}
				resp, err := NewTransport(r, base).RoundTrip(newRequest(t, method, "http://test", nil))
				if err == nil {
					resp.Body.Close()
				}
				if (err != nil) != tt.fails || attempts != tt.attempts || requests != tt.requests || first != tt.code {
					t.Errorf("RoundTrip = %v after %d attempts with %d requests, first %v; want %d with %d, first %v, error %v",
						err, attempts, requests, first, tt.attempts, tt.requests, tt.code, tt.fails)
				}
				synctest.Wait()
			})
		})
	}
}

// Over TLS, with the server of net/http: retries, replayed bodies and trailers.
func TestTLS(t *testing.T) {
	for _, h2 := range []bool{false, true} {
		script := answers(t, echo(503), func(http.ResponseWriter, *http.Request) {
			panic(http.ErrAbortHandler)
		}, func(w http.ResponseWriter, r *http.Request) {
			if (r.ProtoMajor == 2) != h2 {
				t.Errorf("protocol %s, HTTP/2 is %v", r.Proto, h2)
			}
			w.Header().Set("Trailer", "X-Sum")
			io.Copy(w, r.Body)
			w.Header().Set("X-Sum", "42")
		})
		server := httptest.NewUnstartedServer(script)
		server.EnableHTTP2 = h2
		server.StartTLS()
		client := clientOf(t, server, quick, grpcretry.WithAttemptTimeout(30*second))
		resp, err := client.Do(newRequest(t, "PUT", server.URL, strings.NewReader("hello")))
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if string(body) != "hello" || err != nil || resp.Trailer.Get("X-Sum") != "42" {
			t.Errorf("HTTP/2 %v: body %q, %v, trailer %v", h2, body, err, resp.Trailer)
		}
		script.wantCount(t, 3)
		client.CloseIdleConnections()
		server.Close()
	}
}

// A response is the caller's while the request's body is still being sent.
func TestUploadOutlastsResponse(t *testing.T) {
	for _, early := range []bool{false, true} {
		got := make(chan string, 1)
		server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			io.WriteString(w, "hello")
			w.(http.Flusher).Flush()
			text, err := io.ReadAll(r.Body)
			if err != nil {
				t.Errorf("server: %v", err)
			}
			got <- string(text)
		}))
		server.EnableHTTP2 = true
		server.StartTLS()
		client := clientOf(t, server, grpcretry.WithAttemptTimeout(30*second))
		upload, write := io.Pipe()
		resp, err := client.Do(newRequest(t, "PUT", server.URL, upload))
		if err != nil {
			t.Fatal(err)
		}
		if early {
			io.ReadFull(resp.Body, make([]byte, 5))
		}
		io.WriteString(write, "still sending")
		write.Close()
		if text := <-got; text != "still sending" {
			t.Errorf("server read %q", text)
		}
		io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
		client.CloseIdleConnections()
		server.Close()
	}
}

// So it is if the response has no body, and the attempt has a context of its own.
func TestUploadOutlastsAResponseWithoutABody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		listener := bufconn.Listen(1 << 20)
		uploaded := ""
		go func() {
			accepted, _ := listener.Accept()
			conn := h2Conn{accepted}
			conn.serve(conn.ok, func(piece string) { uploaded += piece })
		}()
		base := &http.Transport{Protocols: new(http.Protocols), DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return listener.DialContext(ctx)
		}}
		base.Protocols.SetUnencryptedHTTP2(true)
		upload, write := io.Pipe()
		transport := NewTransport(newRetrier(t, grpcretry.WithAttemptTimeout(30*second)), base)
		resp, err := transport.RoundTrip(newRequest(t, "PUT", "http://test", upload))
		if err != nil {
			t.Fatal(err)
		}
		io.WriteString(write, "still ")
		synctest.Wait()
		io.WriteString(write, "sending")
		write.Close()
		synctest.Wait()
		resp.Body.Close()
		base.CloseIdleConnections()
		synctest.Wait()
		if uploaded != "still sending" {
			t.Errorf("server read %q", uploaded)
		}
	})
}

// A certificate that cannot be verified, and a server without TLS, are not tried again.
func TestTLSErrors(t *testing.T) {
	secure, plain := httptest.NewTLSServer(nil), httptest.NewServer(nil)
	defer secure.Close()
	defer plain.Close()
	secure.Config.ErrorLog, plain.Config.ErrorLog = discardLog, discardLog
	for _, url := range []string{secure.URL, strings.Replace(plain.URL, "http:", "https:", 1)} {
		base := &http.Transport{}
		made := 0
		transport := NewTransport(newRetrier(t, quick), roundTripper(func(r *http.Request) (*http.Response, error) {
			made++
			return base.RoundTrip(r)
		}))
		_, err := transport.RoundTrip(newRequest(t, "GET", url, nil))
		var wrapped *grpcretry.Error
		if made != 1 || err == nil || errors.As(err, &wrapped) {
			t.Errorf("%s: %v after %d attempts", url, err, made)
		}
		base.CloseIdleConnections()
	}
}
