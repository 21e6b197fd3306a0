package httpretry

import (
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"syscall"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/internal/errtype"
	"github.com/grpcretry/grpcretry/internal/function"
)

// A StatusError is the failure of an attempt whose response has a status of 400 or above.
// [errors.As] finds it in the Err of a [grpcretry.Attempt], for classifiers and observers. RoundTrip
// returns such a response rather than an error, unless the request's context ends in the wait after it.
type StatusError struct {
	StatusCode int         // such as 503
	Status     string      // such as "503 Service Unavailable"
	Header     http.Header // of the response; not a copy

	status *status.Status
}

// Error returns the status.
func (e *StatusError) Error() string { return "http: status " + e.Status }

// GRPCStatus returns the status that [status.Code] finds: the code is what the package's documentation
// says, and a Retry-After is among the details as a google.rpc.RetryInfo.
func (e *StatusError) GRPCStatus() *status.Status {
	if e.status == nil { // not made by a Transport
		return status.New(codeOf(e.StatusCode), e.Error())
	}
	return e.status
}

// newStatusError returns the failure that a response means, nil if it is a success.
func newStatusError(response *http.Response) error {
	if response.StatusCode < 400 {
		return nil
	}
	e := &StatusError{StatusCode: response.StatusCode, Status: response.Status, Header: response.Header}
	if e.Status == "" {
		e.Status = fmt.Sprint(e.StatusCode, " ", http.StatusText(e.StatusCode))
	}
	e.status = status.New(codeOf(e.StatusCode), e.Error())
	if delay := retryAfter(response.Header["Retry-After"], time.Now()); delay > 0 {
		detailed, err := e.status.WithDetails(&errdetails.RetryInfo{RetryDelay: durationpb.New(delay)})
		if err == nil {
			e.status = detailed
		}
	}
	return e
}

// codeOf returns the code for a status of 400 or above. For those that are not retried by default, the
// code shows the budget whether the server works and the request is at fault.
func codeOf(statusCode int) codes.Code {
	switch statusCode {
	case http.StatusTooManyRequests:
		return codes.ResourceExhausted
	case http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return codes.Unavailable
	case http.StatusUnauthorized:
		return codes.Unauthenticated
	case http.StatusForbidden:
		return codes.PermissionDenied
	case http.StatusNotFound, http.StatusGone:
		return codes.NotFound
	case http.StatusRequestTimeout:
		return codes.DeadlineExceeded
	case http.StatusConflict:
		return codes.Aborted
	case http.StatusPreconditionFailed:
		return codes.FailedPrecondition
	case http.StatusRequestedRangeNotSatisfiable:
		return codes.OutOfRange
	case http.StatusNotImplemented:
		return codes.Unimplemented
	}
	if statusCode < 500 {
		return codes.InvalidArgument
	}
	return codes.Internal
}

// A failure is the failure of an attempt without a response.
type failure struct {
	err  error      // as Base returned it
	code codes.Code // codes.OK for none, which is UNKNOWN
}

func (f *failure) Error() string { return f.err.Error() }

func (f *failure) Unwrap() error { return f.err }

// GRPCStatus returns the status that the engine sees. A status that Base's error has comes from
// somewhere else, such as an RPC for a token.
func (f *failure) GRPCStatus() *status.Status {
	return status.New(cmp.Or(f.code, codes.Unknown), f.err.Error())
}

// classify returns what an error of Base means for retries. Everything that is not known to be a
// broken connection is UNKNOWN, such as an unsupported scheme, an invalid header or a malformed
// response, and an error whose methods panic.
func classify(err error) (means error) {
	defer func() {
		if recover() != nil {
			means = &failure{err: err}
		}
	}()
	if neverSucceeds(err) {
		return grpcretry.Permanent(&failure{err: err})
	}
	if code, reset := resetCode(err); reset {
		return classifyReset(err, code)
	}
	f := &failure{err: err, code: codes.Unavailable}
	switch {
	case isUnsent(err):
		return markUnsent(f)
	case !isBroken(err):
		f.code = codes.OK
	}
	return f
}

// markUnsent marks a failure, unless more requests may have been sent than the one that its error is about: that of another
// Transport below, which speaks of its attempts by itself; of an http.Client, which follows redirects; or several errors.
func markUnsent(f *failure) error {
	if isType[*grpcretry.Error](f.err) || isType[*url.Error](f.err) || isType[severalErrors](f.err) {
		return f
	}
	return function.MarkUnsent(f)
}

type severalErrors interface {
	error
	Unwrap() []error
}

// neverSucceeds reports whether another attempt would fail in the same way, although the error looks
// like that of a connection.
func neverSucceeds(err error) bool {
	if isType[*tls.CertificateVerificationError](err) || isType[x509.UnknownAuthorityError](err) ||
		isType[x509.HostnameError](err) || isType[x509.CertificateInvalidError](err) {
		return true
	}
	if isType[*net.AddrError](err) || isType[net.UnknownNetworkError](err) || isType[*net.ParseError](err) {
		return true
	}
	op, ok := errtype.As[*net.OpError](err)
	if !ok || op.Op != "remote error" && op.Op != "local error" {
		return false
	}
	// The other side has refused the TLS handshake, unless the fault is its own.
	return op.Err == nil || op.Err.Error() != "tls: internal error"
}

func isType[E error](err error) bool {
	_, ok := errtype.As[E](err)
	return ok
}

// isUnsent reports whether the request that err is about was certainly not sent, or whether the server
// certainly did not act on it. net/http itself sends some requests again on another connection, but only
// those that may be sent twice.
func isUnsent(err error) bool {
	if op, ok := errtype.As[*net.OpError](err); ok {
		switch op.Op {
		case "dial", "proxyconnect", "socks connect":
			return true
		}
	}
	if isType[*net.DNSError](err) {
		return true
	}
	text := err.Error()
	for _, prefix := range unsentTexts {
		if strings.HasPrefix(text, prefix) {
			return true
		}
	}
	return false
}

// isBroken reports whether a connection broke, or timed out, before the response was there.
func isBroken(err error) bool {
	if isType[*net.OpError](err) || isType[syscall.Errno](err) || isTimeout(err) {
		return true
	}
	for _, end := range []error{io.EOF, io.ErrUnexpectedEOF, io.ErrClosedPipe, net.ErrClosed} {
		if errors.Is(err, end) {
			return true
		}
	}
	text := err.Error()
	for _, part := range brokenTexts {
		if strings.HasPrefix(strings.TrimPrefix(text, brokenPrefix), part) {
			return true
		}
	}
	return false
}

func isTimeout(err error) bool {
	timeout, ok := errtype.As[net.Error](err)
	return ok && timeout.Timeout()
}

// Some errors of net/http can be recognized by nothing but their texts. A test compares these with the
// source of net/http.
var (
	// The request was not sent or, by the GOAWAY, the server has not acted on it (RFC 9113, section 6.8).
	unsentTexts = []string{
		"net/http: TLS handshake timeout",
		"http2: Transport received GOAWAY from server ErrCode:",
		"http2: Transport received Server's graceful shutdown GOAWAY",
		"http2: client conn not usable",
	}
	// The connection was closed before the response.
	brokenTexts = []string{
		"http: server closed idle connection",
		"http: persistConn.readLoop exiting",
		"http2: server sent GOAWAY and closed the connection",
		"http2: client connection lost",
		"http2: client conn is closed",
		"http2: client conn could not be established",
		"http2: client connection force closed via ClientConn.Close", // another stream's write has failed
	}
	brokenPrefix = "net/http: HTTP/1.x transport connection broken: "
)

// A streamReset has the form of the error with which net/http, and x/net/http2, report the reset of a
// stream; both let errors.As convert it.
type streamReset struct {
	StreamID uint32
	Code     uint32
	Cause    error
}

func (streamReset) Error() string { return "stream reset" }

// resetCode returns the code of an HTTP/2 stream's reset.
func resetCode(err error) (code uint32, ok bool) {
	reset, ok := errtype.As[streamReset](err)
	return reset.Code, ok
}

// Error codes of HTTP/2 (RFC 9113, section 7).
const (
	resetNoError         = 0x0
	resetInternalError   = 0x2
	resetRefusedStream   = 0x7
	resetCancel          = 0x8
	resetEnhanceYourCalm = 0xb
)

// classifyReset returns what the reset of a stream means. A server that breaks off a response with
// HTTP/1.1 closes the connection; with HTTP/2, it resets the stream.
func classifyReset(err error, code uint32) error {
	switch code {
	case resetRefusedStream:
		return markUnsent(&failure{err: err, code: codes.Unavailable})
	case resetNoError, resetInternalError, resetCancel:
		return &failure{err: err, code: codes.Unavailable}
	case resetEnhanceYourCalm:
		return &failure{err: err, code: codes.ResourceExhausted}
	default:
		return &failure{err: err}
	}
}
