package grpcretry

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Classification is the answer of a classifier, see [WithClassifier].
type Classification int

// The answers of a classifier.
const (
	// Default leaves the decision to the status codes of the policy.
	Default Classification = iota
	// Retry makes the failure retryable, whatever its status code. Attempts,
	// deadline, pushback and budget limit it as they limit every retry.
	Retry
	// Stop makes the failure final.
	Stop
)

// retryable says whether the policy allows to try again after f: the classifier
// first, then the code set. It is never asked about OK, nor about the end of the
// caller's own context.
func (p *policy) retryable(ctx context.Context, f *failure, code codes.Code) bool {
	if p.Classifier != nil && !f.Committed { // else it has nothing to decide
		switch p.Classifier(ctx, f.Attempt) {
		case Retry:
			return true
		case Stop:
			return false
		}
	}
	if f.TimedOut {
		return true
	}
	switch {
	case code == codes.ResourceExhausted && isSizeError(f.Attempt.Err):
		return false
	case code == codes.Unavailable && isDropped(f):
		return false
	default:
		return p.codes.has(code)
	}
}

// dropTexts are the messages of grpc-go's load-balancing policies for an RPC that they drop on
// purpose: xDS drop_overloads, grpclb, and xDS circuit breakers, whose message starts and goes on
// like this. Dropped RPCs are final (gRFC A6 #when-retries-are-valid); gRPC has no other mark for
// them that reaches an interceptor, so policies with other texts are not recognized.
var (
	dropTexts   = []string{"RPC is dropped", "request dropped by grpclb"}
	breakerText = [2]string{"max requests ", " exceeded on service "}
)

// isDropped reports whether the balancer dropped the RPC: then it reached no server, and has no
// peer.
func isDropped(f *failure) bool {
	if f.Attempt.Peer != nil {
		return false
	}
	message := status.Convert(f.Attempt.Err).Message()
	return slices.Contains(dropTexts, message) ||
		strings.HasPrefix(message, breakerText[0]) && strings.Contains(message, breakerText[1])
}

// sizePhrases are what gRPC implementations say, with RESOURCE_EXHAUSTED, of a
// message over a size limit, in lower case. Such a message is as large the next
// time. gRPC has no other mark for it: the specification reuses the code.
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

// checkCodes refuses what can only be a mistake: nothing to retry, OK, and numbers
// that are no status code.
func checkCodes(list []codes.Code) error {
	if len(list) == 0 {
		return fmt.Errorf("no codes, want at least one (Disable turns retries off)")
	}
	for _, c := range list {
		if c == codes.OK {
			return fmt.Errorf("code OK is no failure")
		}
		if c > maxCode {
			return fmt.Errorf("code %d is not a gRPC status code", uint32(c))
		}
	}
	return nil
}
