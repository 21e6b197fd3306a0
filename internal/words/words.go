// Package words has the words that errors, spans, metrics and logs share, and keeps them short and printable.
package words

import (
	"fmt"
	"strings"
	"time"
	"unicode/utf8"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// Code returns a status code as gRPC spells it on the wire and in A66: UNAVAILABLE.
func Code(c codes.Code) string {
	if c < codes.Code(len(names)) { // int(c) may be negative on 32 bits
		return names[c]
	}
	return fmt.Sprintf("CODE(%d)", uint32(c))
}

// KnownCode returns the [Code] of a code that gRPC defines, otherwise "OTHER". So codes that
// a server invents do not create new metric series.
func KnownCode(c codes.Code) string {
	if c < codes.Code(len(names)) { // int(c) may be negative on 32 bits
		return names[c]
	}
	return "OTHER"
}

var names = [...]string{
	"OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
	"PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE",
	"UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
}

// MaxMessage bounds a status message in logs and span events, in bytes, because a server may send
// a megabyte.
const MaxMessage = 256

// Message returns the message of err's status, cut if it is longer than [MaxMessage].
func Message(err error) string { return Truncate(status.Convert(err).Message(), MaxMessage) }

// Printable returns s with a character in place of what is not UTF-8. A span with other bytes could not
// be exported, and neither could those in the same batch.
func Printable(s string) string { return strings.ToValidUTF8(s, "\uFFFD") }

// Truncate cuts s to at most n bytes, between two characters, and marks the cut. n is at least the length of the mark, 3.
func Truncate(s string, n int) string {
	const mark = "…"
	if len(s) <= n {
		return s
	}
	end := n - len(mark)
	for i := end; i >= max(0, end-utf8.UTFMax+1); i-- {
		if utf8.RuneStart(s[i]) {
			return s[:i] + mark
		}
	}
	return s[:end] + mark // not UTF-8
}

// Rounded drops digits of a duration that are of no use to a reader.
func Rounded(d time.Duration) time.Duration {
	if d > time.Second {
		return d.Round(time.Millisecond)
	}
	return d.Round(time.Microsecond)
}
