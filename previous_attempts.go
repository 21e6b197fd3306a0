package grpcretry

import (
	"context"
	"maps"
	"strconv"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/metadata"
)

// A previousAttempts option sends the server the number of previous attempts (gRFC A6
// #exposed-retry-metadata). It is part of the attempt's options rather than of the context's
// metadata, because that would also reach the calls that an interceptor below makes on other
// ClientConns, which are calls in their own right. The only option that adds metadata is the one for
// credentials. It is a pointer, so that interceptors that look for a grpc.PerRPCCredsCallOption do
// not mistake it for credentials.
//
// gRPC obeys the last such option. The caller's credentials are therefore part of this one; an
// option that an interceptor below adds replaces it, and the server then does not see the number.
type previousAttempts struct {
	grpc.PerRPCCredsCallOption
}

// previousAttemptsOption returns the option for an attempt that follows n others. callers are the
// call's own credentials, nil if there are none.
func previousAttemptsOption(n int, callers credentials.PerRPCCredentials) *previousAttempts {
	if callers == nil && n < len(previousAttemptsOptions) {
		return previousAttemptsOptions[n]
	}
	return newPreviousAttempts(n, callers)
}

func newPreviousAttempts(n int, callers credentials.PerRPCCredentials) *previousAttempts {
	header := map[string]string{previousAttemptsKey: strconv.Itoa(n)}
	return &previousAttempts{grpc.PerRPCCredsCallOption{Creds: &previousAttemptsCreds{header, callers}}}
}

// previousAttemptsOptions are the options for calls without credentials, which all calls share.
var previousAttemptsOptions = func() (options [8]*previousAttempts) {
	for n := range options {
		options[n] = newPreviousAttempts(n, nil)
	}
	return options
}()

type previousAttemptsCreds struct {
	header  map[string]string // never changed
	callers credentials.PerRPCCredentials
}

func (c *previousAttemptsCreds) GetRequestMetadata(ctx context.Context, uri ...string) (map[string]string, error) {
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

func (c *previousAttemptsCreds) RequireTransportSecurity() bool {
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
