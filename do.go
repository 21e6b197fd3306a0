package grpcretry

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry/internal/errtype"
	"github.com/grpcretry/grpcretry/internal/function"
	"github.com/grpcretry/grpcretry/internal/layers"
)

// Do calls f, and retries it under the policy for name, by the same rules and with the same budgets,
// events, spans, metrics and log lines as for RPCs. It is for everything that calls out
// and is not an RPC, such as a query; for HTTP, package httpretry calls it.
//
// The name begins with a slash and a word, as in "/sql/orders.read"; the rest is up to the program. [WithMethod] sets
// policies for names that begin with its pattern: an option for "/sql/" applies to "/sql/orders.read",
// and one for "/http/" to "/http/api.example.com/GET", unless a longer pattern sets it, too. A name
// without a second slash, "/sql", counts as "/sql/" here. What a service config says of all methods, see
// [WithServiceConfig], applies to functions, too.
//
// The name up to its second slash, "/sql", is the target: it has a budget of its own, unless [WithBudget]
// says otherwise, and takes the place of an RPC's target in events, metrics and log lines. Names should
// come from the program, not from its input, because each makes a row in the metrics, and each target
// a budget, which is kept for at least a minute after its last call, see [PerTarget].
//
// f is called once per attempt, on the caller's goroutine, with the attempt's context, see
// [AttemptFromContext]. A nil error is a success. An error that is, or wraps, a gRPC status is retried if
// its code is, like an RPC's. Any other error is retried, whatever [WithCodes] says: [Permanent] marks
// those that are never retried, and [WithRetryIf] or [WithClassifier] can tell. A RetryInfo in the
// status's details is obeyed like a server's, and so is the pushback in the [*Error] of an RPC that f has
// made. If the attempt timeout has ended the attempt's context, an error of the context counts as the
// timeout, and so does any error that is not a gRPC status, because it may well hide the former. Do waits
// for f to return, even if its context has ended, so f should obey the context. It calls f once even if
// ctx has ended before.
//
// Calls that f makes, by Do or as RPCs, are calls in their own right: they have attempts and a budget of
// their own, and their attempts multiply with those of this call unless [WithMaxAttempts] limits one of
// the two. Limit this call's: an RPC that passes through returns gRPC's own error, which does not tell a
// pushback. The [*Error] of such a call has a status, UNKNOWN if its function's error had none, so by
// default this call does not retry it.
//
// Do returns nil after a success. If the first failure is not retryable, Do returns f's error as it
// is; otherwise, the error is an [*Error]. A panic in f reaches Do's caller.
//
// Functions are not hedged, because they could not run twice at the same time. Do returns an
// error, without calling f, if [WithHedging] is among opts or is set for a pattern that applies to the
// name; hedging that is set for all methods does not apply, which is logged once. It also returns an
// error if the name or an option is invalid. These errors say what is wrong, have no gRPC status, and are
// not retried by a Do around this one. [WithBufferLimit] has no meaning here.
func (r *Retrier) Do(ctx context.Context, name string, f func(context.Context) error, opts ...CallOption) error {
	return r.do(ctx, &function.Call{Name: name, Target: functionTarget(name)}, f, opts)
}

func init() {
	function.Do = func(ctx context.Context, retrier any, c *function.Call) error {
		return retrier.(*Retrier).do(ctx, c, c.Run, nil)
	}
}

// do makes the calls of Do and of package httpretry. The function is a parameter, so that it can stay on
// the caller's stack.
func (r *Retrier) do(ctx context.Context, of *function.Call, f func(context.Context) error, opts []CallOption) error {
	var c call // stays on the stack
	c.retrier, c.ctx, c.method, c.functionTarget, c.discard, c.isLast = r, ctx, of.Name, of.Target, of.Discard, of.IsLast
	if err := c.prepareFunction(f, of.UnsentOnly, opts); err != nil {
		return err
	}
	if c.mode == modePassThrough {
		return passing{&c}.through(f)
	}
	if c.isContested() {
		u := &contested{call: c}
		u.contest.join(&u.call)
		return u.call.makeAttempts(ending{}, u.first.in, func(a *attempt) ending {
			return u.contest.race(a, func(a *attempt) error { return f(a) })
		})
	}
	return c.makeAttempts(ending{}, c.newFirst, func(a *attempt) ending { return ending{attempt: a, err: f(a)} })
}

// Permanent marks an error that is never retried, whatever its code and whatever the policy's classifier says;
// a nil err stays nil. It is for functions passed to [Retrier.Do], and for interceptors chained below
// this library's. The mark stays on the error that the caller gets, so an outer Do does not retry it
// either. Unwrap returns err.
func Permanent(err error) error {
	if err == nil {
		return nil
	}
	return &permanentError{err}
}

type permanentError struct{ error }

func (e *permanentError) Unwrap() error { return e.error }

// hasStatus reports whether an error is, or wraps, one that has a gRPC status.
func hasStatus(err error) bool {
	told, has := errtype.As[interface {
		error
		GRPCStatus() *status.Status
	}](err)
	return has && told.GRPCStatus() != nil
}

func isPermanent(err error) bool {
	_, permanent := errtype.As[*permanentError](err)
	return permanent
}

// isUnsent reports whether the mark holds for all that err stands for. An Error of another call below may
// have the mark in its last attempt only, and one of several joined errors says nothing about the others.
func isUnsent(err error) bool {
	switch e := err.(type) { //nolint:errorlint // this is the search through what err wraps
	case *function.UnsentError:
		return true
	case *Error:
		return e != nil && e.made == len(e.Attempts) && allAre(e.Attempts, func(a Attempt) bool { return isUnsent(a.Err) })
	case interface{ Unwrap() error }:
		return isUnsent(e.Unwrap())
	case interface{ Unwrap() []error }:
		return allAre(e.Unwrap(), isUnsent)
	default:
		return false
	}
}

// allAre reports whether the list has elements, and all of them have a property.
func allAre[T any](list []T, property func(T) bool) bool {
	return len(list) > 0 && !slices.ContainsFunc(list, func(one T) bool { return !property(one) })
}

// functionTarget returns a function's name up to the second slash.
func functionTarget(name string) string {
	if len(name) > 1 {
		if second := strings.IndexByte(name[1:], '/'); second > 0 {
			return name[:second+1]
		}
	}
	return name
}

// prepareFunction checks what Do was given, and resolves the call's policy. unsentOnly is that of [function.Call].
func (c *call) prepareFunction(f func(context.Context) error, unsentOnly bool, opts []CallOption) error {
	own, err := ownOptions(opts)
	if err = cmp.Or(c.retrier.check(), c.checkFunction(f), err); err != nil {
		return notDone(c.method, err)
	}
	c.static, c.worksFor = true, layers.Of(c.ctx)
	policies := c.retrier.settings.current()
	c.policy = policies.withOwn(policies.of(c.method), own)
	if c.policy.Hedging != nil {
		switch scope := c.policy.hedgingScope; {
		case scope == scopeCall:
			return notDone(c.method, errors.New("the call has WithHedging, but a function cannot be hedged"))
		case isPattern(scope):
			return notDone(c.method, fmt.Errorf("WithMethod %s has WithHedging, but a function cannot be hedged", scope))
		case c.policy.mayHedge():
			c.retrier.report.notHedged(&c.facts, "a function cannot be hedged")
		}
	}
	c.mode = c.policy.modeOf(nil)
	if unsentOnly && !c.policy.UnsentOnly {
		c.mode = modePassThrough
	}
	if c.mode == modePassThrough {
		c.retrier.report.callPassed(&c.facts)
	}
	return nil
}

// notDone returns the error of a call whose function was not called.
func notDone(name string, err error) error {
	reason := strings.TrimPrefix(err.Error(), "grpcretry: ")
	return Permanent(fmt.Errorf("grpcretry: Do %q: %s", name, reason))
}

func (f *facts) checkFunction(run func(context.Context) error) error {
	switch {
	case len(f.method) < 2 || f.method[0] != '/' || f.method[1] == '/':
		return errors.New(`invalid name, want a word with a leading slash, such as "/sql/read"`)
	case f.ctx == nil:
		return errors.New("the context is nil")
	case run == nil:
		return errors.New("the function is nil")
	default:
		return nil
	}
}

// ownOptions returns a call's options, or the first error in them.
func ownOptions(opts []CallOption) ([]*policyOption, error) {
	own := make([]*policyOption, len(opts))
	for i, o := range opts {
		if o == nil {
			return nil, fmt.Errorf("option number %d is nil", i+1)
		}
		own[i] = o.callOption()
	}
	return own, firstError(own)
}
