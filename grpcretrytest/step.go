package grpcretrytest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
)

// A Step says what a [Server] does with one attempt. [Fail], [OK], [Hang] and [Cut] create steps; their
// methods return changed copies, so a Step may be kept and used any number of times. [Server.On] and
// [Server.Next] reject a Step that makes no sense.
type Step struct {
	kind     stepKind
	code     codes.Code
	message  string
	info     *time.Duration // in a RetryInfo
	header   metadata.MD
	trailer  metadata.MD
	delay    time.Duration
	sent     int // messages that the handler sends before the step happens
	received int // messages that the handler receives before that
	times    int // how many attempts the step is for, beyond the first
	err      error
}

type stepKind int

const (
	answers stepKind = iota
	fails
	hangs
	cuts
)

var stepNames = [...]string{"OK", "Fail", "Hang", "Cut"}

// Fail returns a Step that ends the attempt with a status. The handler does not run, unless the Step has
// [Step.AfterSending] or [Step.AfterReceiving], and the method is a stream. The code is one that gRPC defines, and not OK.
//
// Without these, a stream may end before the client has sent its request. The client's stats handlers are
// then told of no error now and then, so for tests of spans use AfterReceiving(1).
func Fail(code codes.Code, message string) Step {
	s := Step{kind: fails, code: code, message: message}
	switch {
	case code == codes.OK:
		return s.invalid("the code is OK")
	case code > codes.Unauthenticated:
		return s.invalid("gRPC has no code %d", code)
	}
	return s
}

// OK returns a Step that lets the handler answer. It is for attempts between others, and with
// [Step.After] for slow ones.
func OK() Step { return Step{kind: answers} }

// Hang returns a Step that does nothing until the client goes away. A call without a deadline and without
// an attempt timeout then waits forever.
func Hang() Step { return Step{kind: hangs} }

// Cut returns a Step that closes the connection, so that every other call on it fails as well. Messages
// that were sent before arrive if the client receives them within 20 ms or, in a bubble, before it waits for something else.
func Cut() Step { return Step{kind: cuts} }

// After delays the step, and the handler, by d after the attempt's arrival. d is at least 0, the default.
func (s Step) After(d time.Duration) Step {
	if d < 0 {
		return s.invalid("After(%v) is negative", d)
	}
	s.delay = d
	return s
}

// AfterSending lets the handler of a server or bidirectional stream run until it has sent n messages. If the
// handler ends before that, its own end counts. n is at least 0, the default: the handler does not run. The handler
// of an [OK] runs to its end, so OK cannot have AfterSending or [Step.AfterReceiving].
func (s Step) AfterSending(n int) Step {
	switch {
	case s.kind == answers:
		return s.invalid("AfterSending is for Fail, Hang and Cut")
	case n < 0:
		return s.invalid("AfterSending(%d) is negative", n)
	}
	s.sent = n
	return s
}

// AfterReceiving lets the handler of a stream run until it has received n messages, and it sends nothing
// from then on. If the handler ends before that, its own end counts. n is at least 0, the default: the
// handler does not run. With AfterSending as well, both numbers must be reached.
func (s Step) AfterReceiving(n int) Step {
	switch {
	case s.kind == answers:
		return s.invalid("AfterReceiving is for Fail, Hang and Cut")
	case n < 0:
		return s.invalid("AfterReceiving(%d) is negative", n)
	}
	s.received = n
	return s
}

// Pushback asks the client to wait for d before a retry, as [grpcretry.SetPushback] does. d is a whole
// number of milliseconds, from 0 to 2147483647.
func (s Step) Pushback(d time.Duration) Step {
	if d < 0 || d%time.Millisecond != 0 || d > math.MaxInt32*time.Millisecond {
		return s.invalid("Pushback(%v), want whole milliseconds, from 0 to 2147483647", d)
	}
	return s.PushbackValue(strconv.FormatInt(d.Milliseconds(), 10))
}

// NoRetry forbids a retry, as [grpcretry.SetNoRetry] does.
func (s Step) NoRetry() Step { return s.PushbackValue("-1") }

// PushbackValue sends the given values of grpc-retry-pushback-ms as they are, malformed ones too, of printable ASCII: metadata has
// no others. There is at least one. Later uses of it, of Pushback or NoRetry replace it.
func (s Step) PushbackValue(values ...string) Step {
	if s.kind == hangs || s.kind == cuts {
		return s.invalid("no trailer reaches the client, so no pushback does")
	}
	if len(values) == 0 {
		return s.invalid("PushbackValue(), want at least one value")
	}
	for _, value := range values {
		if !printable(value) {
			return s.invalid("PushbackValue(%q): it is not printable ASCII", value)
		}
	}
	s.trailer = maps.Clone(s.trailer)
	if s.trailer == nil {
		s.trailer = metadata.MD{}
	}
	s.trailer[pushbackKey] = slices.Clone(values)
	return s
}

const pushbackKey = "grpc-retry-pushback-ms"

// RetryInfo adds a google.rpc.RetryInfo with the delay d to the status of [Fail].
func (s Step) RetryInfo(d time.Duration) Step {
	if s.kind != fails {
		return s.invalid("RetryInfo is for Fail")
	}
	s.info = &d
	return s
}

// Header adds response headers: keys and values in turn. They are sent before the status, or with the
// handler's own.
func (s Step) Header(kv ...string) Step {
	if err := checkPairs(kv); err != nil {
		return s.invalid("Header: %w", err)
	}
	s.header = metadata.Join(s.header, metadata.Pairs(kv...))
	return s
}

// Trailer adds response trailers: keys and values in turn.
func (s Step) Trailer(kv ...string) Step {
	if s.kind == hangs || s.kind == cuts {
		return s.invalid("no trailer reaches the client")
	}
	if err := checkPairs(kv); err != nil {
		return s.invalid("Trailer: %w", err)
	}
	s.trailer = metadata.Join(s.trailer, metadata.Pairs(kv...))
	return s
}

// checkPairs reports what gRPC would reject, or leave out.
func checkPairs(kv []string) error {
	if len(kv)%2 != 0 {
		return fmt.Errorf("a key without a value: %q", kv)
	}
	for i := 0; i < len(kv); i += 2 {
		key, value := strings.ToLower(kv[i]), kv[i+1]
		switch {
		case !validKey.MatchString(key):
			return fmt.Errorf("%q is not a key of metadata", key)
		case slices.Contains(reserved, key):
			return fmt.Errorf("%q is gRPC's own", key)
		case !strings.HasSuffix(key, "-bin") && !printable(value):
			return fmt.Errorf("%q is not a value of metadata, except for a key that ends in -bin", value)
		}
	}
	return nil
}

var (
	validKey = regexp.MustCompile(`^[0-9a-z_.-]+$`)
	reserved = []string{"content-type", "user-agent", "grpc-message-type", "grpc-encoding", "grpc-message", "grpc-status",
		"grpc-timeout", "te"}
)

// printable reports whether a value has printable ASCII only.
func printable(value string) bool {
	return !strings.ContainsFunc(value, func(r rune) bool { return r < ' ' || r > '~' })
}

// Times makes the step count for n attempts in a row, as if it were written n times. n is at least 1. A later Times or Always
// replaces it.
func (s Step) Times(n int) Step {
	if n < 1 {
		return s.invalid("Times(%d), want at least 1", n)
	}
	s.times = n - 1
	return s
}

// Always makes the step count for all attempts from here on. No step may follow; one that a later [Server.Next] adds is never used.
func (s Step) Always() Step { return s.Times(math.MaxInt) }

const always = math.MaxInt - 1 // the value of Step.times

// invalid returns the step with an error, for On and Next to report.
func (s Step) invalid(format string, args ...any) Step {
	if s.err == nil {
		s.err = fmt.Errorf(stepNames[s.kind]+": "+format, args...)
	}
	return s
}

// String returns the step as it is written in Go, roughly.
func (s Step) String() string {
	var b strings.Builder
	b.WriteString(stepNames[s.kind])
	if s.kind == fails {
		fmt.Fprintf(&b, "(%s, %q)", codeName(s.code), s.message)
	} else {
		b.WriteString("()")
	}
	say := func(given bool, format string, args ...any) {
		if given {
			fmt.Fprintf(&b, format, args...)
		}
	}
	say(s.delay > 0, ".After(%v)", s.delay)
	say(s.received > 0, ".AfterReceiving(%d)", s.received)
	say(s.sent > 0, ".AfterSending(%d)", s.sent)
	say(s.info != nil, ".RetryInfo(%v)", orZero(s.info))
	for _, key := range slices.Sorted(maps.Keys(s.header)) {
		say(true, ".Header(%s=%q)", key, s.header[key])
	}
	for _, key := range slices.Sorted(maps.Keys(s.trailer)) {
		say(true, ".Trailer(%s=%q)", key, s.trailer[key])
	}
	say(s.times == always, ".Always()")
	say(s.times > 0 && s.times < always, ".Times(%d)", s.times+1)
	return b.String()
}

func orZero(d *time.Duration) time.Duration {
	if d == nil {
		return 0
	}
	return *d
}

// fits reports whether the step can happen to a method's attempts.
func (s *Step) fits(m grpc.MethodInfo) error {
	switch {
	case s.sent > 0 && !m.IsServerStream:
		return fmt.Errorf("AfterSending(%d) is for server and bidirectional streams, and the method is neither", s.sent)
	case s.received > 0 && !m.IsClientStream && !m.IsServerStream:
		return fmt.Errorf("AfterReceiving(%d) is for streams, and the method is unary", s.received)
	default:
		return nil
	}
}

// status returns the error of a step that fails.
func (s *Step) status() error {
	st := status.New(s.code, s.message)
	if s.info != nil {
		if detailed, err := st.WithDetails(&errdetails.RetryInfo{RetryDelay: durationpb.New(*s.info)}); err == nil {
			st = detailed
		}
	}
	return st.Err()
}

// announce sends what precedes the end of the attempt.
func (s *Step) announce(ctx context.Context) error {
	var err error
	if len(s.header) > 0 && s.kind == answers {
		err = grpc.SetHeader(ctx, s.header)
	} else if len(s.header) > 0 {
		err = grpc.SendHeader(ctx, s.header)
	}
	return errors.Join(err, grpc.SetTrailer(ctx, s.trailer))
}

// pick returns the step for attempt n, counted from 1; ok is false after the last.
func pick(steps []Step, n int) (step Step, ok bool) {
	n-- // the number of attempts before this one
	for _, s := range steps {
		if n <= s.times {
			return s, true
		}
		n -= s.times + 1
	}
	return Step{}, false
}
