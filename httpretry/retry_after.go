package httpretry

import (
	"math"
	"net/http"
	"time"
)

// retryAfter returns the wait that the values of Retry-After ask for; 0 if they ask for none. A value
// is a number of seconds or a date (RFC 9110, section 10.2.3), which is compared with this machine's
// clock. Values that are neither are ignored. Of several, which the RFC does not allow, the longest
// wait counts.
func retryAfter(values []string, now time.Time) time.Duration {
	var longest time.Duration
	for _, value := range values {
		delay, ok := seconds(value)
		if !ok {
			delay = until(value, now)
		}
		longest = max(longest, delay)
	}
	return longest
}

// seconds reads a number of seconds, in decimal digits only. A number that is too large for a Duration
// becomes the largest one, which is longer than any server may ask for.
func seconds(value string) (d time.Duration, ok bool) {
	if value == "" {
		return 0, false
	}
	const most = math.MaxInt64 / int64(time.Second)
	n := int64(0)
	for i := range len(value) {
		if value[i] < '0' || value[i] > '9' {
			return 0, false
		}
		n = min(10*n+int64(value[i]-'0'), most+1) // most is so small that this cannot overflow
	}
	if n > most {
		return math.MaxInt64, true
	}
	return time.Duration(n) * time.Second, true
}

// until returns the time from now until a date; 0 if it is past, or not a date.
func until(value string, now time.Time) time.Duration {
	date, err := http.ParseTime(value)
	if err != nil {
		return 0
	}
	return max(0, date.Sub(now))
}
