package httpretry

import (
	"context"
	"math"
	"math/big"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"testing/synctest"
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

// retryAfterSeeds are values in and around the two forms. Virtual time starts in the year 2000.
var retryAfterSeeds = []string{"", "0", "120", "007", "-1", "+1", "1.5", " 5", "5\t", "5s", "1e3", "٣", "9223372036", "9223372037",
	"99999999999999999999",
	"Fri, 31 Dec 1999 23:59:59 GMT", "Friday, 31-Dec-99 23:59:59 GMT", "Fri Dec 31 23:59:59 1999", "Mon, 01 Jan 0001 00:00:00 GMT",
	"Sat, 01 Jan 2000 00:01:00 GMT", "Saturday, 01-Jan-00 00:01:00 GMT", "Sat Jan  1 00:01:00 2000", "Fri, 31 Dec 9999 23:59:59 GMT"}

// FuzzRetryAfter compares the reader with another one, which uses large integers.
func FuzzRetryAfter(f *testing.F) {
	for _, seed := range retryAfterSeeds {
		f.Add(seed, "5")
	}
	f.Fuzz(func(t *testing.T, one, other string) {
		first, second := askedFor(one, now), askedFor(other, now)
		for _, tt := range []struct {
			values []string
			want   time.Duration
		}{
			{[]string{one}, first}, {[]string{one, other}, max(first, second)}, {[]string{other, one}, max(first, second)},
			{[]string{one, one}, first},
		} {
			if got := retryAfter(tt.values, now); got != tt.want {
				t.Errorf("retryAfter(%q) = %d, want %d", tt.values, got, tt.want)
			}
		}
	})
}

// askedFor returns the wait that one value of Retry-After asks for by RFC 9110, section 10.2.3; 0 for
// none.
func askedFor(value string, now time.Time) time.Duration {
	nanos := new(big.Int)
	if regexp.MustCompile(`^[0-9]+$`).MatchString(value) {
		nanos.SetString(value, 10)
		nanos.Mul(nanos, big.NewInt(int64(second)))
	}
	for _, form := range []string{http.TimeFormat, time.RFC850, time.ANSIC} {
		if date, err := time.Parse(form, value); err == nil {
			nanos.SetInt64(date.Unix() - now.Unix())
			nanos.Mul(nanos, big.NewInt(int64(second)))
			nanos.Add(nanos, big.NewInt(int64(date.Nanosecond()-now.Nanosecond())))
			break
		}
	}
	switch {
	case nanos.Sign() <= 0:
		return 0
	case !nanos.IsInt64():
		return math.MaxInt64
	default:
		return time.Duration(nanos.Int64())
	}
}

// FuzzRetryAfterInTransport has a server respond with any status and Retry-After, and checks when the
// next attempt is made: not before the server allows it, at most 20% later, and only within
// MaxServerDelay and the deadline.
func FuzzRetryAfterInTransport(f *testing.F) {
	for i, seed := range retryAfterSeeds {
		f.Add(uint16(503), seed, "", int64(0), int64(0))
		f.Add(uint16(429+i%80), seed, "7", int64(10*second), int64(time.Minute))
	}
	f.Add(uint16(429), "60", "59", int64(-1), int64(time.Minute))
	f.Add(uint16(502), "10", "10", int64(10*second), int64(11*second))
	f.Fuzz(func(t *testing.T, status uint16, one, other string, longest, deadline int64) {
		c := &limitedCall{status: 400 + int(status)%200, values: []string{one, other}, longest: time.Duration(longest),
			deadline: time.Duration(deadline)}
		if other == "" {
			c.values = c.values[:1]
		}
		synctest.Test(t, c.run)
	})
}

// A limitedCall is a request to which a server responds with Retry-After, and then with success.
type limitedCall struct {
	status            int
	values            []string
	longest, deadline time.Duration // MaxServerDelay, and the context's deadline if that is above 0
	start             time.Time
	at                []time.Duration // attempts
}

// twoCenturies is the MaxElapsed of such calls, because virtual time ends in 2262.
const twoCenturies = 200 * 365 * 24 * time.Hour

func (c *limitedCall) RoundTrip(r *http.Request) (*http.Response, error) {
	c.at = append(c.at, time.Since(c.start))
	if len(c.at) > 1 {
		return reply(r, 200, "hello"), nil
	}
	response := reply(r, c.status, "")
	response.Header["Retry-After"] = c.values
	return response, nil
}

func (c *limitedCall) run(t *testing.T) {
	c.start = time.Now()
	ctx, cancel := context.WithCancel(t.Context())
	if c.deadline > 0 {
		ctx, cancel = context.WithTimeout(t.Context(), c.deadline)
	}
	defer cancel()
	transport := NewTransport(newRetrier(t, steady, grpcretry.WithBudget(grpcretry.Unlimited), grpcretry.WithMaxServerDelay(c.longest),
		grpcretry.WithMaxElapsed(twoCenturies)), c)
	response, err := transport.RoundTrip(newRequest(t, "GET", "http://test", nil).WithContext(ctx))
	if err != nil {
		t.Fatal(err)
	}
	response.Body.Close()
	if len(c.at) == 1 {
		c.at = append(c.at, -1) // never
		if waited := time.Since(c.start); waited != 0 {
			t.Errorf("waited %v for nothing", waited)
		}
	}
	if from, to, mayEnd := c.allowed(); (c.at[1] < from || c.at[1] > to) && !(mayEnd && c.at[1] == -1) {
		t.Errorf("%d with Retry-After %q, limits of %v and %v: second attempt after %v, want %v to %v, or none: %v",
			c.status, c.values, c.longest, c.deadline, c.at[1], from, to, mayEnd)
	}
}

// allowed returns when a second attempt may be made, and whether the call may end without one.
func (c *limitedCall) allowed() (from, to time.Duration, mayEnd bool) {
	var asked time.Duration
	for _, value := range c.values {
		asked = max(asked, askedFor(value, c.start))
	}
	longest, left := c.longest, c.deadline
	if longest == 0 {
		longest = 5 * time.Minute
	}
	if left <= 0 || left > twoCenturies {
		left = twoCenturies
	}
	from, to = asked, asked+asked/5+1
	if asked == 0 {
		from, to = second, second // the backoff
	} else if to < asked {
		to = math.MaxInt64
	}
	switch {
	case !isRetryable(c.status), longest >= 0 && asked > longest, from >= left:
		return -1, -1, true
	default:
		return from, min(to, left-1), to >= left
	}
}

// isRetryable reports whether a response with a status is retried by default.
func isRetryable(status int) bool {
	return status == 429 || 502 <= status && status <= 504
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
