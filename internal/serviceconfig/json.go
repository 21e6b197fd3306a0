package serviceconfig

import (
	"encoding/json"
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
)

// The types below have the shape of a service config. encoding/json decodes them with the same
// rules as in grpc-go: it ignores the case of keys, skips unknown ones, and a repeated key adds to
// what is there. Fields that this package does not use are present so that a value of the wrong
// type is rejected, as in grpc-go.

type serviceConfig struct {
	LoadBalancingPolicy *string
	LoadBalancingConfig *json.RawMessage
	MethodConfig        *[]methodConfig
	RetryThrottling     *retryThrottling
	HealthCheckConfig   *struct{ ServiceName string }
}

type methodConfig struct {
	Name                    *[]methodName
	WaitForReady            *bool
	Timeout                 *duration
	MaxRequestMessageBytes  *int64
	MaxResponseMessageBytes *int64
	RetryPolicy             *retryPolicy
	HedgingPolicy           *hedgingPolicy
}

type methodName struct{ Service, Method string }

type retryPolicy struct {
	MaxAttempts                optional[int]
	InitialBackoff, MaxBackoff optional[duration]
	BackoffMultiplier          optional[float64]
	RetryableStatusCodes       []statusCode
}

type hedgingPolicy struct {
	MaxAttempts         optional[int]
	HedgingDelay        *duration
	NonFatalStatusCodes []statusCode
}

type retryThrottling struct{ MaxTokens, TokenRatio optional[float64] }

// An optional distinguishes a missing value from zero. Unlike a pointer, it keeps its value if
// the key is repeated with null, as the plain fields in grpc-go do.
type optional[T any] struct {
	value T
	set   bool
}

func (o *optional[T]) UnmarshalJSON(raw []byte) error {
	if err := json.Unmarshal(raw, &o.value); err != nil {
		return err
	}
	o.set = o.set || string(raw) != "null"
	return nil
}

// A duration is a google.protobuf.Duration, such as "1.5s".
type duration time.Duration

func (d duration) String() string { return time.Duration(d).String() }

func (d *duration) UnmarshalJSON(raw []byte) error {
	var text string
	if err := json.Unmarshal(raw, &text); err != nil {
		return err
	}
	parsed, ok := parseDuration(text)
	if !ok {
		return fmt.Errorf(`%s, want a duration in seconds, such as "0.1s"`, raw)
	}
	*d = duration(parsed)
	return nil
}

// maxSeconds is the largest number of seconds in a google.protobuf.Duration: 10,000 years.
const maxSeconds = 315_576_000_000

// parseDuration reads decimal seconds followed by an s. The digits on either side of the point may
// be missing, but not all of them, and at most nine may follow it. A duration that is too long for
// Go counts as the longest one. The signs that [strconv.ParseInt] accepts within the number are
// grpc-go's.
func parseDuration(text string) (time.Duration, bool) {
	number, hasUnit := strings.CutSuffix(text, "s")
	number, negative := strings.CutPrefix(number, "-")
	whole, fraction, _ := strings.Cut(number, ".")
	if !hasUnit || whole+fraction == "" || len(fraction) > 9 {
		return 0, false
	}
	seconds, err1 := parseDigits(whole)
	nanos, err2 := parseDigits(fraction)
	if err1 != nil || err2 != nil || seconds > maxSeconds {
		return 0, false
	}
	for range 9 - len(fraction) {
		nanos *= 10
	}
	if negative {
		seconds, nanos = -seconds, -nanos
	}
	return clamp(seconds, nanos), true
}

// parseDigits reads a whole number; no digits are 0.
func parseDigits(digits string) (int64, error) {
	if digits == "" {
		return 0, nil
	}
	return strconv.ParseInt(digits, 10, 64)
}

// clamp adds seconds and nanoseconds, less than a second of them, and returns the nearest Duration.
func clamp(seconds, nanos int64) time.Duration {
	const limit = math.MaxInt64 / int64(time.Second)
	s, n := seconds*int64(time.Second), nanos
	switch {
	case seconds > limit || seconds >= 0 && n > math.MaxInt64-s:
		return math.MaxInt64
	case seconds < -limit || seconds <= 0 && n < math.MinInt64-s:
		return math.MinInt64
	default:
		return time.Duration(s + n)
	}
}

// A statusCode is the name of a status code, in any case (A6 #integration-with-service-config), or
// its number. null leaves it as it is: OK, in a new list.
type statusCode codes.Code

func (c *statusCode) UnmarshalJSON(raw []byte) error {
	var code codes.Code
	switch {
	case string(raw) == "null":
		return nil
	case code.UnmarshalJSON(raw) == nil || code.UnmarshalJSON(upper(raw)) == nil:
		*c = statusCode(code)
		return nil
	default:
		return fmt.Errorf("%s is not a status code", shortened(raw))
	}
}

// upper returns the text with the letters a … z in upper case, and no others.
func upper(text []byte) []byte {
	out := make([]byte, len(text))
	for i, b := range text {
		if 'a' <= b && b <= 'z' {
			b -= 'a' - 'A'
		}
		out[i] = b
	}
	return out
}
