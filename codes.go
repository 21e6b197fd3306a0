package grpcretry

import (
	"context"
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry/internal/messages"
)

// Classification is a classifier's decision about a failed attempt, see [WithClassifier].
type Classification int

// The decisions of a classifier.
const (
	// Default leaves the decision to the policy's status codes.
	Default Classification = iota
	// Retry makes the failure retryable, whatever its status code. The number of attempts, the
	// deadline, pushback and the budget still limit the retry.
	Retry
	// Stop makes the failure final, whatever its status code.
	Stop
)

// retryable reports whether the policy considers f retryable: if the failure itself does not settle it, the classifier decides
// first, then the code set. It is never called for a failure that the end of the caller's own context explains.
func (p *policy) retryable(ctx context.Context, f *failure, code codes.Code) bool {
	if f.Refused {
		return true
	}
	if code == codes.OK || isPermanent(f.Attempt.Err) { // some errors say OK
		return false
	}
	if p.Classifier != nil && !f.Committed { // a committed call is not retried in any case
		switch p.Classifier(ctx, f.Attempt) {
		case Retry:
			return true
		case Stop:
			return false
		}
	}
	switch {
	case f.TimedOut, f.Function && !hasStatus(f.Attempt.Err):
		return true
	case code == codes.ResourceExhausted && messages.IsSize(status.Convert(f.Attempt.Err).Message()):
		return false
	case code == codes.Unavailable && f.Attempt.Peer == nil && messages.IsDrop(status.Convert(f.Attempt.Err).Message()):
		return false // such an RPC has reached no server, so it has no peer
	default:
		return p.codes.has(code)
	}
}

// A codeSet holds status codes, one bit each. gRPC defines 17 of them.
type codeSet uint32

const maxCode = codes.Unauthenticated

func newCodeSet(list []codes.Code) codeSet {
	var s codeSet
	for _, c := range list {
		s |= 1 << c
	}
	return s
}

func (s codeSet) has(c codes.Code) bool { return s&(1<<c) != 0 }

// checkCodes rejects lists that can only be a mistake: empty ones, and those with OK or with a
// number that is not a status code.
func checkCodes(list []codes.Code) error {
	if len(list) == 0 {
		return fmt.Errorf("no codes, want at least one (Disable turns retries off)")
	}
	for _, c := range list {
		if c == codes.OK {
			return fmt.Errorf("code OK is not a failure")
		}
		if c > maxCode {
			return fmt.Errorf("code %d is not a gRPC status code", uint32(c))
		}
	}
	return nil
}
