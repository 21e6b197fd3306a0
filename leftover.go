package grpcretry

import (
	"reflect"
	"strings"

	"google.golang.org/grpc"
)

// isLeftover reports whether a call option belongs to go-grpc-middleware's retry package, of any
// major version. Only its own interceptor obeys such an option, so that a call which still passes
// one after a migration is retried by other rules than its author thinks. The package is recognized by
// its path, because importing it would put it into every user's binary.
func isLeftover(opt grpc.CallOption) bool {
	t := reflect.TypeOf(opt)
	return t != nil && isMiddlewareRetry(t.PkgPath())
}

// isMiddlewareRetry reports whether a package path is that of go-grpc-middleware's retry package:
// ".../go-grpc-middleware/retry" in version 1, ".../go-grpc-middleware/v2/interceptors/retry" later.
func isMiddlewareRetry(path string) bool {
	return strings.HasSuffix(path, "/retry") && strings.HasPrefix(path, "github.com/grpc-ecosystem/go-grpc-middleware/")
}

// warnOfLeftover warns of a call option that is ignored here. One warning is enough, because the
// option's import finds the others.
func (r *Retrier) warnOfLeftover(method string) {
	if once := &r.settings.warnings.leftover; once.Load() || once.Swap(true) {
		return
	}
	r.settings.warnings.found("a call of " + method + " has an option of go-grpc-middleware's retry package, which is ignored here. " +
		"If an interceptor of that package is chained after grpcretry's, it obeys the option, and its attempts multiply with those made here")
	r.warn()
}
