package grpcretry

import (
	"context"
	"maps"
	"strconv"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
)

// A headerOption sends the server what it must know about an attempt: the number of previous attempts
// (gRFC A6 #exposed-retry-metadata), and whether a service further up retries the work, see layers.go.
// It is part of the attempt's options rather than of the context's metadata, because that would also
// reach the calls that an interceptor below makes on other ClientConns, which are calls in their own
// right. The only option that adds metadata is the one for credentials. It is a pointer, so that
// interceptors that look for a grpc.PerRPCCredsCallOption do not mistake it for credentials.
//
// gRPC obeys the last such option. The caller's credentials are therefore part of this one; an
// option that an interceptor below adds replaces it, and the server then sees nothing of it.
type headerOption struct {
	grpc.PerRPCCredsCallOption
}

// An attemptHeader is the content of a headerOption.
type attemptHeader struct {
	previous int  // attempts before this one
	retried  bool // a service further up retries the work
}

// option returns the option for an attempt. callers are the call's own credentials, nil if there are
// none.
func (h attemptHeader) option(callers credentials.PerRPCCredentials) *headerOption {
	switch {
	case callers != nil || h.previous >= len(sharedHeaders):
		return h.newOption(callers)
	case h.retried:
		return sharedHeaders[h.previous].retried
	default:
		return sharedHeaders[h.previous].plain
	}
}

func (h attemptHeader) newOption(callers credentials.PerRPCCredentials) *headerOption {
	header := map[string]string{}
	if h.previous > 0 {
		header[previousAttemptsKey] = strconv.Itoa(h.previous)
	}
	if h.retried {
		header[retriedUpstreamKey] = "1"
	}
	return &headerOption{grpc.PerRPCCredsCallOption{Creds: &headerCreds{header, callers}}}
}

// sharedHeaders are the options for calls without credentials, which all calls share, by the number of
// previous attempts.
var sharedHeaders = func() (shared [8]struct{ plain, retried *headerOption }) {
	for n := range shared {
		shared[n].plain = attemptHeader{previous: n}.newOption(nil)
		shared[n].retried = attemptHeader{previous: n, retried: true}.newOption(nil)
	}
	return shared
}()

type headerCreds struct {
	header  map[string]string // never changed
	callers credentials.PerRPCCredentials
}

func (c *headerCreds) GetRequestMetadata(ctx context.Context, uri ...string) (map[string]string, error) {
	if c.callers == nil {
		return c.header, nil
	}
	md, err := c.callers.GetRequestMetadata(ctx, uri...)
	if err != nil {
		return nil, err
	}
	md = maps.Clone(md)
	if md == nil {
		return c.header, nil
	}
	maps.Copy(md, c.header)
	return md, nil
}

func (c *headerCreds) RequireTransportSecurity() bool {
	return c.callers != nil && c.callers.RequireTransportSecurity()
}

// withoutPreviousAttempts returns a context without a number of previous attempts in the caller's
// metadata: a server could not interpret repeated values.
func withoutPreviousAttempts(ctx context.Context) context.Context {
	md, _ := metadata.FromOutgoingContext(ctx) // a copy
	if md[previousAttemptsKey] == nil {
		return ctx
	}
	delete(md, previousAttemptsKey)
	return metadata.NewOutgoingContext(ctx, md)
}

// withPreviousAttempts returns an attempt's response headers as the application sees them: with the
// number of previous attempts (gRFC A6 #exposed-retry-metadata).
func (a *attempt) withPreviousAttempts(header metadata.MD) metadata.MD {
	if a.number < 2 || header == nil {
		return header
	}
	header = maps.Clone(header)
	header[previousAttemptsKey] = []string{strconv.Itoa(int(a.number) - 1)}
	return header
}

// headers returns the stream's headers as the application sees them.
func (at *streamAttempt) headers() (metadata.MD, error) {
	header, err := at.stream.Header()
	return at.withPreviousAttempts(header), err
}
