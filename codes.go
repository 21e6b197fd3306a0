package grpcretry

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
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

// retryable reports whether the policy considers f retryable: the classifier decides first, then
// the code set. It is never called for OK, nor for the end of the caller's own context.
func (p *policy) retryable(ctx context.Context, f *failure, code codes.Code) bool {
	if f.Refused {
		return true
	}
	if code == codes.OK || f.Last || isPermanent(f.Attempt.Err) { // some errors say OK
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
	case f.TimedOut, f.Ordinary:
		return true
	case code == codes.ResourceExhausted && isSizeError(f.Attempt.Err):
		return false
	case code == codes.Unavailable && isDropped(f):
		return false
	default:
		return p.codes.has(code)
	}
}

// dropTexts are the messages of grpc-go's load-balancing policies for an RPC that they drop on
// purpose: xDS drop_overloads and grpclb. breakerText has the beginning and a later part of the
// message of xDS circuit breakers. Dropped RPCs are final (gRFC A6 #when-retries-are-valid). gRPC
// has no other mark for them that reaches an interceptor, so drops with other messages are not
// recognized.
var (
	dropTexts   = []string{"RPC is dropped", "request dropped by grpclb"}
	breakerText = [2]string{"max requests ", " exceeded on service "}
)

// isDropped reports whether the load balancer dropped the RPC on purpose. Such an RPC has reached
// no server, so it has no peer.
func isDropped(f *failure) bool {
	if f.Attempt.Peer != nil {
		return false
	}
	message := status.Convert(f.Attempt.Err).Message()
	return slices.Contains(dropTexts, message) ||
		strings.HasPrefix(message, breakerText[0]) && strings.Contains(message, breakerText[1])
}

// sizePhrases are the phrases, in lower case, by which gRPC implementations report a message over
// a size limit with RESOURCE_EXHAUSTED. Such a failure is not retried, because the message will
// be just as large next time. gRPC has no other mark for it: the specification reuses the code.
var sizePhrases = []string{
	"received message larger than max",    // grpc-go and gRPC core receiving, grpc-js
	"send message larger than max",        // grpc-go sending
	"sent message larger than max",        // gRPC core sending
	"after decompression larger than max", // grpc-go receiving compressed messages
	"grpc: message too large",             // grpc-go over 4 GiB
	"grpc message exceeds maximum size",   // grpc-java
	"maximum configured message size",     // grpc-dotnet, both directions
	"message with a size larger than",     // grpc-js sending
	"decompresses to a size larger than",  // grpc-js receiving compressed messages
	"larger than configured max",          // connect-go receiving
	"exceeds sendmaxbytes",                // connect-go sending
	"message length too large",            // tonic, both directions
	"configured maximum payload size",     // grpc-swift
}

// isSizeError reports whether a RESOURCE_EXHAUSTED is about a message over a size limit.
func isSizeError(err error) bool {
	message := strings.ToLower(status.Convert(err).Message())
	return slices.ContainsFunc(sizePhrases, func(phrase string) bool {
		return strings.Contains(message, phrase)
	})
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

func (s codeSet) has(c codes.Code) bool { return c <= maxCode && s&(1<<c) != 0 }

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
