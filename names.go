package grpcretry

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"unicode/utf8"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// This file holds the words that spans, metrics and logs share.

// ReasonName returns the short name of a reason for stopping ([Error.Reason], [Event.Reason]), as
// span attributes, metrics and logs use it. There are few such names, so they can serve as a
// metric's label; docs/observing.md in the repository lists them. Any error that is not one of
// this package's reasons is the cause of the caller's cancellation: "deadline_exceeded" if it is
// [context.DeadlineExceeded], otherwise "cancelled".
func ReasonName(reason error) string {
	for _, r := range reasons {
		if reason == r.err { //nolint:errorlint // a caller's cause that wraps one of ours is not ours
			return r.name
		}
	}
	if errors.Is(reason, context.DeadlineExceeded) {
		return "deadline_exceeded"
	}
	return "cancelled"
}

type namedReason struct {
	err  error
	name string
}

var reasons = [...]namedReason{
	{ErrAttemptsExhausted, "exhausted"},
	{ErrRetriedUpstream, "retried_upstream"},
	{ErrBudgetExhausted, "budget"},
	{ErrDeadline, "deadline"},
	{ErrMaxElapsed, "max_elapsed"},
	{ErrPushback, "pushback"},
	{ErrNotRetryable, "not_retryable"},
	{errMayHaveRun, "may_have_run"},
	{ErrCommitted, "committed"},
	{errConnClosed, "conn_closed"},
	{ErrNotConnected, "not_connected"},
	{errLeftToGRPC, "left_to_grpc"},
}

// The values of telemetry.AttrDecision.
const (
	decisionSuccess = "success"
	decisionRetry   = "retry"
	decisionStop    = "stop"
	decisionLost    = "lost" // in a hedged call, if another attempt was decisive
)

func decisionName(retry bool) string {
	if retry {
		return decisionRetry
	}
	return decisionStop
}

// The values of telemetry.AttrOutcome for calls that succeeded.
const (
	outcomeFirstTry  = "first_try"
	outcomeRecovered = "recovered"
	outcomeHedgeWon  = "hedge_won"
)

// outcomeOf returns the outcome of a call whose attempt with the given number succeeded.
func outcomeOf(number int, hedge bool) string {
	switch {
	case hedge:
		return outcomeHedgeWon
	case number > 1:
		return outcomeRecovered
	default:
		return outcomeFirstTry
	}
}

// codeName returns a status code as gRPC spells it on the wire and in A66: UNAVAILABLE.
func codeName(c codes.Code) string {
	if c < codes.Code(len(codeNames)) { // int(c) may be negative on 32 bits
		return codeNames[c]
	}
	return fmt.Sprintf("CODE(%d)", uint32(c))
}

// knownCodeName returns the codeName of a code that gRPC defines, otherwise "OTHER". So codes that
// a server invents do not create new metric series.
func knownCodeName(c codes.Code) string {
	if c < codes.Code(len(codeNames)) { // int(c) may be negative on 32 bits
		return codeNames[c]
	}
	return "OTHER"
}

var codeNames = [...]string{
	"OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
	"PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE",
	"UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
}

// maxMessage bounds a status message in logs and span events, in bytes, because a server may send
// a megabyte.
const maxMessage = 256

// messageOf returns the message of err's status, cut if it is long.
func messageOf(err error) string { return cut(status.Convert(err).Message(), maxMessage) }

// printable returns s with a character in place of what is not UTF-8. A span with other bytes could not
// be exported, and neither could those in the same batch.
func printable(s string) string { return strings.ToValidUTF8(s, "\uFFFD") }

// cut cuts s to at most n bytes, between two characters, and marks the cut.
func cut(s string, n int) string {
	const mark = "…"
	if len(s) <= n {
		return s
	}
	end := n - len(mark)
	for i := end; i > end-utf8.UTFMax; i-- {
		if utf8.RuneStart(s[i]) {
			return s[:i] + mark
		}
	}
	return s[:end] + mark // not UTF-8
}
