package httpretry

import (
	"math"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/grpcretry/grpcretry"
)

// now is a time for tables.
var now = time.Date(1999, 12, 31, 23, 59, 57, 500_000_000, time.UTC)

func TestRetryAfter(t *testing.T) {
	for _, tt := range []struct {
		name   string
		values []string
		want   time.Duration
	}{
		{"none", nil, 0},
		{"empty", []string{""}, 0},
		{"seconds", []string{"120"}, 120 * second},
		{"zero", []string{"0"}, 0},
		{"leading zeros", []string{"007"}, 7 * second},
		{"negative", []string{"-1"}, 0},
		{"plus", []string{"+1"}, 0},
		{"fraction", []string{"1.5"}, 0},
		{"blank inside", []string{"1 2"}, 0},
		{"unit", []string{"5s"}, 0},
		{"other digits", []string{"٣"}, 0},
		{"garbage", []string{"soon"}, 0},
		{"the longest", []string{"9223372036"}, 9223372036 * second},
		{"too long", []string{"9223372037"}, math.MaxInt64},
		{"beyond int64", []string{"9223372036854775808"}, math.MaxInt64},
		{"beyond everything", []string{strings.Repeat("9", 100_000)}, math.MaxInt64},
		{"date", []string{"Fri, 31 Dec 1999 23:59:59 GMT"}, 1500 * time.Millisecond},
		{"date of RFC 850", []string{"Friday, 31-Dec-99 23:59:59 GMT"}, 1500 * time.Millisecond},
		{"date of C", []string{"Fri Dec 31 23:59:59 1999"}, 1500 * time.Millisecond},
		{"past date", []string{"Fri, 31 Dec 1999 23:59:57 GMT"}, 0},
		{"date with an offset", []string{"Fri, 31 Dec 1999 23:59:59 +0100"}, 0},
		{"no such date", []string{"Fri, 32 Dec 1999 23:59:59 GMT"}, 0},
		{"the last date", []string{"Fri, 31 Dec 9999 23:59:59 GMT"}, math.MaxInt64},
		{"several", []string{"2", "3", "1"}, 3 * second},
		{"several, one bad", []string{"bad", "3", "-5"}, 3 * second},
		{"a list", []string{"2, 3"}, 0},
	} {
		if got := retryAfter(tt.values, now); got != tt.want {
			t.Errorf("%s: retryAfter(%.40q) = %v, want %v", tt.name, tt.values, got, tt.want)
		}
	}
}

// No value makes a negative wait. A value with anything but digits asks for a date, or for nothing.
func FuzzRetryAfter(f *testing.F) {
	for _, seed := range []string{"", "0", "120", "-1", "1.5", "99999999999999999999", "Fri, 31 Dec 1999 23:59:59 GMT",
		"Friday, 31-Dec-99 23:59:59 GMT", "Fri Dec 31 23:59:59 1999", "Mon, 01 Jan 0001 00:00:00 GMT"} {
		f.Add(seed, "5")
	}
	f.Fuzz(func(t *testing.T, one, other string) {
		got := retryAfter([]string{one}, now)
		_, dateErr := http.ParseTime(one)
		digits := strings.Trim(one, "0123456789") == ""
		if got < 0 || got > 0 && !digits && dateErr != nil {
			t.Errorf("retryAfter(%q) = %v", one, got)
		}
		both, reversed := retryAfter([]string{one, other}, now), retryAfter([]string{other, one}, now)
		if both != reversed || both != max(got, retryAfter([]string{other}, now)) {
			t.Errorf("retryAfter(%q, %q) = %v and %v", one, other, both, reversed)
		}
	})
}

// The wait is between what the server asked for and 20% more, in both forms and for each status that
// is retried.
func TestRetryAfterIsObeyed(t *testing.T) {
	for _, code := range []int{429, 502, 503, 504} {
		for name, value := range map[string]func() string{
			"seconds": func() string { return "100" },
			"date":    func() string { return time.Now().Add(100 * second).UTC().Format(http.TimeFormat) },
		} {
			t.Run(name, func(t *testing.T) {
				limited := func(w http.ResponseWriter, r *http.Request) { answer(code, "Retry-After", value())(w, r) }
				inBubble(t, []http.HandlerFunc{limited, says("hello")}, nil, func(t *testing.T, client *http.Client, server *script) {
					wantResponse(t, client, newRequest(t, "GET", "http://test", nil), 200, "hello")
					if at := server.seen(); len(at) != 2 || at[1] < 100*second || at[1] > 120*second {
						t.Errorf("%d: requests at %v, want the second between 1m40s and 2m", code, at)
					}
				})
			})
		}
	}
}

// Absurd values end the call or, if they are not valid, count as absent.
func TestAbsurdRetryAfter(t *testing.T) {
	for value, retried := range map[string]bool{
		"99999999999999999999": false, "301": false, "Fri, 31 Dec 9999 23:59:59 GMT": false,
		"0": true, "-1": true, "1e3": true, "Mon, 01 Jan 0001 00:00:00 GMT": true,
	} {
		inBubble(t, []http.HandlerFunc{answer(503, "Retry-After", value), says("hello")}, []grpcretry.Option{steady},
			func(t *testing.T, client *http.Client, server *script) {
				if !retried {
					wantResponse(t, client, newRequest(t, "GET", "http://test", nil), 503, "Service Unavailable")
					server.wantTimes(t, 0)
					return
				}
				wantResponse(t, client, newRequest(t, "GET", "http://test", nil), 200, "hello")
				server.wantTimes(t, 0, second)
			})
	}
}

// Even without a limit, the longest wait is not an overflow.
func TestLongestRetryAfter(t *testing.T) {
	inBubble(t, []http.HandlerFunc{answer(503, "Retry-After", "99999999999999999999")},
		[]grpcretry.Option{grpcretry.WithMaxServerDelay(-1), grpcretry.WithMaxElapsed(24 * time.Hour)},
		func(t *testing.T, client *http.Client, _ *script) {
			wantResponse(t, client, newRequest(t, "GET", "http://test", nil), 503, "Service Unavailable")
		})
}
