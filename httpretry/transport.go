package httpretry

import (
	"net/http"
	"strings"
	"sync"
	"unicode/utf8"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/internal/function"
)

// A Transport is an [http.RoundTripper] that retries requests under the policies of a
// [grpcretry.Retrier], see the package's documentation. It is safe for concurrent use. The zero
// Transport is ready for use. The fields must not change while it is in use.
type Transport struct {
	// Retrier has the policies, the budgets and everything that observes calls. It may serve RPCs
	// and functions at the same time. If it is nil, the Transport uses one with default settings,
	// which all such Transports share.
	Retrier *grpcretry.Retrier
	// Base makes the attempts. If it is nil, the Transport uses [http.DefaultTransport].
	Base http.RoundTripper
}

// NewTransport returns a Transport with these fields, either of which may be nil.
func NewTransport(r *grpcretry.Retrier, base http.RoundTripper) *Transport {
	return &Transport{Retrier: r, Base: base}
}

// RoundTrip makes attempts at a request until the policy for its name ends the call. It returns
// the last attempt's response, whatever its status, exactly as Base returned it, with a nil error; but with
// a body that was read before if the call has ended in a wait, and with one that wraps Base's if there is an
// attempt timeout.
//
// If the last attempt got no response, its response could not be kept in a wait in which the call has
// ended, or the request's context has ended during a wait, [errors.As] finds a [*grpcretry.Error], whose Last
// unwraps to Base's error. A first error that is not retryable is returned exactly as Base returned it.
func (t *Transport) RoundTrip(req *http.Request) (*http.Response, error) {
	name, host := names(req)
	idempotent := isIdempotent(req)
	if host == "" || !idempotent && !t.retrier().Policy(name).UnsentOnly || isNested(req, name) {
		return t.base().RoundTrip(req)
	}
	c := &call{base: t.base(), request: req}
	defer c.end()
	of := &function.Call{
		Name: name, Target: host, Run: c.attempt, Discard: c.discard,
		UnsentOnly: !idempotent, // the policy may have changed meanwhile
	}
	if req.Body != nil || req.Cancel != nil { //nolint:staticcheck // deprecated, but http.Client still sets it
		of.IsLast = c.isLast
	}
	return c.result(function.Do(req.Context(), t.retrier(), of))
}

// CloseIdleConnections calls the method of that name of Base, if it has one. It is for
// [http.Client.CloseIdleConnections].
func (t *Transport) CloseIdleConnections() {
	if base, ok := t.base().(interface{ CloseIdleConnections() }); ok {
		base.CloseIdleConnections()
	}
}

func (t *Transport) base() http.RoundTripper {
	if t.Base == nil {
		return http.DefaultTransport
	}
	return t.Base
}

func (t *Transport) retrier() *grpcretry.Retrier {
	if t.Retrier == nil {
		return defaultRetrier()
	}
	return t.Retrier
}

var defaultRetrier = sync.OnceValue(func() *grpcretry.Retrier {
	r, err := grpcretry.New()
	if err != nil {
		panic(err) //nolint:forbidigo // New has no options here that it could reject
	}
	return r
})

// isIdempotent reports whether a request may be sent twice (RFC 9110, section 9.2.2). As for net/http,
// the presence of a key's header is enough.
func isIdempotent(req *http.Request) bool {
	switch methodOf(req) {
	case http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodTrace, http.MethodPut, http.MethodDelete:
		return true
	}
	_, key := req.Header["Idempotency-Key"]
	_, xKey := req.Header["X-Idempotency-Key"]
	return key || xKey
}

// names returns the name of a request's policy and the host that it is sent to; the host is empty if
// there is none.
func names(req *http.Request) (name, host string) {
	if req.URL == nil || !utf8.ValidString(req.URL.Host) || !utf8.ValidString(req.Method) { // Base reports it
		return "", ""
	}
	host = strings.TrimSuffix(strings.ToLower(req.URL.Host), ":")
	switch req.URL.Scheme {
	case "http":
		host = strings.TrimSuffix(host, ":80")
	case "https":
		host = strings.TrimSuffix(host, ":443")
	}
	if host == "" {
		return "", ""
	}
	return "/http/" + host + "/" + methodOf(req), host
}

func methodOf(req *http.Request) string {
	if req.Method == "" {
		return http.MethodGet
	}
	return req.Method
}

// isNested reports whether the request is an attempt of another Transport, which retries it.
func isNested(req *http.Request, name string) bool {
	outer, ok := grpcretry.AttemptFromContext(req.Context())
	return ok && outer.Method == name
}
