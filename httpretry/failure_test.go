package httpretry

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"go/build"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	grpcstatus "google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/internal/function"
)

var (
	refused = &net.OpError{Op: "dial", Net: "tcp", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}
	reset   = &net.OpError{Op: "read", Net: "tcp", Err: os.NewSyscallError("read", syscall.ECONNRESET)}
)

type timeoutError struct{}

func (timeoutError) Error() string   { return "too slow" }
func (timeoutError) Timeout() bool   { return true }
func (timeoutError) Temporary() bool { return false }

func TestClassify(t *testing.T) {
	const unavailable, unknown = codes.Unavailable, codes.Unknown
	for _, tt := range []struct {
		err    error
		code   codes.Code
		unsent bool
	}{
		{refused, unavailable, true},
		{fmt.Errorf("wrapped: %w", refused), unavailable, true},
		{&net.OpError{Op: "proxyconnect", Err: io.EOF}, unavailable, true},
		{errors.New("net/http: TLS handshake timeout"), unavailable, true},
		{errors.New("http2: Transport received GOAWAY from server ErrCode:ENHANCE_YOUR_CALM"), unavailable, true},
		{reset, unavailable, false},
		{&net.OpError{Op: "write", Err: syscall.EPIPE}, unavailable, false},
		{&net.DNSError{Err: "no such host", IsNotFound: true}, unavailable, true},
		{&net.OpError{Op: "dial", Err: &net.DNSError{Err: "no such host", IsNotFound: true}}, unavailable, true},
		{io.EOF, unavailable, false},
		{fmt.Errorf("net/http: HTTP/1.x transport connection broken: %w", io.ErrUnexpectedEOF), unavailable, false},
		{io.ErrClosedPipe, unavailable, false},
		{net.ErrClosed, unavailable, false},
		{syscall.ECONNABORTED, unavailable, false},
		{timeoutError{}, unavailable, false},
		{errors.New("http: server closed idle connection"), unavailable, false},
		{errors.New("net/http: HTTP/1.x transport connection broken: http: persistConn.readLoop exiting"), unavailable, false},
		{errors.New(`http2: server sent GOAWAY and closed the connection; LastStreamID=1, ErrCode=NO_ERROR, debug=""`), unavailable, false},
		{errors.New("http2: client connection lost"), unavailable, false},

		{&net.OpError{Op: "dial", Err: &net.AddrError{Err: "invalid port"}}, unknown, false},
		{&net.OpError{Op: "dial", Err: net.UnknownNetworkError("x")}, unknown, false},
		{&net.OpError{Op: "remote error", Err: errors.New("tls: bad certificate")}, unknown, false},
		{&net.OpError{Op: "remote error", Err: errors.New("tls: internal error")}, unavailable, false},
		{&tls.CertificateVerificationError{Err: x509.UnknownAuthorityError{}}, unknown, false},
		{x509.HostnameError{Certificate: &x509.Certificate{}, Host: "x"}, unknown, false},
		{&net.OpError{Op: "dial", Err: x509.UnknownAuthorityError{}}, unknown, false},
		{http.ErrSchemeMismatch, unknown, false},
		{tls.RecordHeaderError{Msg: "no TLS"}, unknown, false},
		{errors.New(`unsupported protocol scheme "ftp"`), unknown, false},
		{errors.New("net/http: HTTP/1.x transport connection broken: malformed HTTP response \"x\""), unknown, false},
		{errors.New("the token server says no"), unknown, false},
		{&url.Error{Op: "Get", URL: "ftp://x", Err: errors.New("unsupported protocol scheme")}, unknown, false}, // a net.Error, and no timeout
		{grpcstatus.Error(codes.Unavailable, "an RPC for a token failed"), unknown, false},
		{http.ErrUseLastResponse, unknown, false},
	} {
		got := classify(tt.err)
		if code := grpcstatus.Code(got); code != tt.code || got.Error() != tt.err.Error() {
			t.Errorf("classify(%v) = %v with %v, want %v", tt.err, got, code, tt.code)
		}
		if unsent := fmt.Sprintf("%T", got) == fmt.Sprintf("%T", function.MarkUnsent(io.EOF)); unsent != tt.unsent {
			t.Errorf("classify(%v) is unsent: %v, want %v", tt.err, unsent, tt.unsent)
		}
	}
}

// Another attempt would fail in the same way, so no classifier can make these retryable.
func TestSomeFailuresAreFinal(t *testing.T) {
	for _, err := range []error{
		&tls.CertificateVerificationError{Err: errors.New("not today")},
		x509.UnknownAuthorityError{},
		x509.HostnameError{Certificate: &x509.Certificate{}, Host: "x"},
		x509.CertificateInvalidError{Cert: &x509.Certificate{}, Reason: x509.Expired},
		&net.OpError{Op: "dial", Err: &net.AddrError{Err: "invalid port"}},
		&net.OpError{Op: "dial", Err: net.UnknownNetworkError("x")},
		&net.OpError{Op: "dial", Err: &net.ParseError{Type: "IP address", Text: "x"}},
		&net.OpError{Op: "remote error", Err: errors.New("tls: bad certificate")},
		&net.OpError{Op: "local error", Err: errors.New("tls: bad record MAC")},
	} {
		if got, want := fmt.Sprintf("%T", classify(err)), fmt.Sprintf("%T", grpcretry.Permanent(err)); got != want {
			t.Errorf("classify(%T) is a %s, want a %s", err, got, want)
		}
	}
}

// The texts by which errors are recognized are those of net/http.
func TestTextsAreThoseOfNetHTTP(t *testing.T) {
	folder := filepath.Join(build.Default.GOROOT, "src", "net", "http")
	files, err := filepath.Glob(filepath.Join(folder, "*.go"))
	if err != nil || len(files) == 0 {
		t.Skip("the source of net/http is not here")
	}
	var source strings.Builder
	for _, file := range append(files, filepath.Join(folder, "internal", "http2", "transport.go")) {
		text, _ := os.ReadFile(file)
		source.Write(text)
	}
	for _, text := range append(append([]string{brokenPrefix}, unsentTexts...), brokenTexts...) {
		if !strings.Contains(source.String(), `"`+text) {
			t.Errorf("net/http has no error %q", text)
		}
	}
}

// An error that is not about one exchange alone proves nothing of the others.
func TestAnErrorAboutSeveralExchangesIsNotUnsent(t *testing.T) {
	for name, err := range map[string]error{
		"failover": fmt.Errorf("primary: %w; secondary: %w", io.EOF, refused),
		"joined":   errors.Join(refused, io.ErrUnexpectedEOF),
		"redirect": &url.Error{Op: "Get", URL: "http://elsewhere", Err: refused},
	} {
		t.Run(name, func(t *testing.T) {
			ran := 0
			transport := NewTransport(newRetrier(t, grpcretry.WithUnsentOnly(true)), roundTripper(func(*http.Request) (*http.Response, error) {
				ran++
				return nil, err
			}))
			_, got := transport.RoundTrip(newRequest(t, "POST", "http://test", strings.NewReader("once")))
			if !errors.Is(got, err) || ran != 1 {
				t.Errorf("the request ran %d times: %v, want once, with Base's error", ran, got)
			}
		})
	}
}

// The error of another Transport below speaks of all its attempts: the first of these was handled by the server.
func TestAnErrorFromATransportBelowIsUnsentIfAllItsAttemptsAre(t *testing.T) {
	for name, tt := range map[string]struct {
		first  error // nil for a response
		unsent bool
	}{"handled": {nil, false}, "refused": {refused, true}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				attempts := 0
				inner := NewTransport(newRetrier(t, steady, grpcretry.WithPatience(3*time.Second)),
					roundTripper(func(r *http.Request) (*http.Response, error) {
						if attempts++; attempts == 1 && tt.first == nil {
							return reply(r, 503, "down"), nil
						}
						return nil, refused
					}))
				var unsent []bool
				outer := NewTransport(newRetrier(t, grpcretry.WithPatience(0), grpcretry.WithUnsentOnly(true),
					grpcretry.WithObserver(func(_ context.Context, e grpcretry.Event) {
						if e.Kind == grpcretry.AttemptEnd {
							unsent = append(unsent, e.Attempt.Unsent)
						}
					})), roundTripper(func(r *http.Request) (*http.Response, error) {
					r = r.Clone(r.Context())
					r.URL.Host = "replica" // otherwise the inner Transport would leave the retries to the outer one
					return inner.RoundTrip(r)
				}))
				_, err := outer.RoundTrip(newRequest(t, "PUT", "http://test", strings.NewReader("once")))
				if err == nil || len(unsent) != 1 || unsent[0] != tt.unsent {
					t.Errorf("RoundTrip: %v; attempts unsent: %v, want [%v]", err, unsent, tt.unsent)
				}
			})
		})
	}
}
