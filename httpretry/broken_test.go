package httpretry

import (
	"bufio"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/internal/errtype"
)

var discardLog = log.New(io.Discard, "", 0)

// breaking starts a server on the loopback interface that answers request number n, of all
// connections, with the bytes of replies[n], and then closes the connection.
func breaking(t *testing.T, replies ...string) (url string, requests func() int) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	n := 0
	next := func() string {
		mu.Lock()
		defer mu.Unlock()
		if n++; n > len(replies) {
			t.Errorf("request %d, want %d at most", n, len(replies))
			return ""
		}
		return replies[n-1]
	}
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			serving.Go(func() {
				defer conn.Close()
				if r, err := http.ReadRequest(bufio.NewReader(conn)); err == nil {
					io.Copy(io.Discard, r.Body)
					text := next()
					if rst, ok := strings.CutPrefix(text, "RST"); ok {
						text = rst
						conn.(*net.TCPConn).SetLinger(0)
					}
					io.WriteString(conn, text)
				}
			})
		}
	})
	t.Cleanup(func() { listener.Close(); serving.Wait() })
	return "http://" + listener.Addr().String(), func() int { mu.Lock(); defer mu.Unlock(); return n }
}

const (
	ok200  = "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello"
	cut200 = "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhe"
)

func TestBrokenConnections(t *testing.T) {
	for _, tt := range []struct {
		name     string
		method   string
		replies  []string
		opts     []grpcretry.Option
		wantText string // of the body, or of the error
	}{
		{"before the header", "GET", []string{"", "", ok200}, nil, "hello"},
		{"before the header, PUT", "PUT", []string{"", ok200}, nil, "hello"},
		{"before the header, POST", "POST", []string{""}, nil, "EOF"},
		{"before the header, POST, unsent only", "POST", []string{""}, []grpcretry.Option{grpcretry.WithUnsentOnly(true)}, "EOF"},
		{"reset", "GET", []string{"RST", "RST", ok200}, nil, "hello"},
		{"after the status line", "GET", []string{"HTTP/1.1 200 OK\r\n", ok200}, nil, "hello"},
		{"in the header", "GET", []string{"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n", ok200}, nil, "hello"},
		{"in a line of the header", "GET", []string{"HTTP/1.1 200 OK\r\nContent-Le"}, nil, "malformed MIME header"}, // for net/http
		{"in the body", "GET", []string{cut200}, nil, "unexpected EOF"},
		{"malformed", "GET", []string{"SSH-2.0-OpenSSH\r\n"}, nil, "malformed HTTP response"},
		{"malformed version", "GET", []string{"HTTP/x.1 200 OK\r\n\r\n"}, nil, "malformed HTTP version"},
		{"every time", "GET", []string{"", "", "", ""}, nil, "gave up after 4 attempts"},
		{"in the body of a discarded response", "GET", []string{"HTTP/1.1 503 Busy\r\nContent-Length: 5\r\n\r\nhe", ok200}, nil, "hello"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			url, requests := breaking(t, tt.replies...)
			base := &http.Transport{}
			defer base.CloseIdleConnections()
			client := &http.Client{Transport: NewTransport(newRetrier(t, append(tt.opts, quick)...), base)}
			var text string
			resp, err := client.Do(newRequest(t, tt.method, url, strings.NewReader("body")))
			if err == nil {
				var body []byte
				body, err = io.ReadAll(resp.Body)
				resp.Body.Close()
				text = string(body)
			}
			if err != nil {
				text = err.Error()
			}
			if !strings.Contains(text, tt.wantText) || requests() != len(tt.replies) {
				t.Errorf("got %q after %d requests, want %q after %d", text, requests(), tt.wantText, len(tt.replies))
			}
		})
	}
}

// Base's own error is found in the error of a call that made no connection in time.
func TestLastError(t *testing.T) {
	base := &http.Transport{}
	defer base.CloseIdleConnections()
	client := &http.Client{Transport: NewTransport(newRetrier(t, quick, grpcretry.WithPatience(50*time.Millisecond)), base)}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	listener.Close()
	_, err = client.Do(newRequest(t, "GET", "http://"+listener.Addr().String(), nil))
	op, ok := errtype.As[*net.OpError](err)
	if !ok || op.Op != "dial" || !errors.Is(err, grpcretry.ErrTargetDown) || !asError(t, err).Attempts[0].Unsent {
		t.Errorf("Do = %v", err)
	}
}
