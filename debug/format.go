package debug

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

// This file writes numbers for people.

// length writes a length of time with three digits: 1.23 ms, 340 ms, 5 s, 2 min 5 s.
func length(d time.Duration) string {
	switch {
	case d == 0:
		return "0 ms"
	case d < 999_500*time.Nanosecond:
		return digits(float64(d)/1e3) + " µs"
	case d < 999_500*time.Microsecond:
		return digits(float64(d)/1e6) + " ms"
	case d < 59_950*time.Millisecond:
		return digits(d.Seconds()) + " s"
	case d < time.Hour:
		return two(d.Round(time.Second), time.Minute, "min", time.Second, "s")
	case d < 24*time.Hour:
		return two(d.Round(time.Minute), time.Hour, "h", time.Minute, "min")
	default:
		return two(d.Round(time.Hour), 24*time.Hour, "days", time.Hour, "h")
	}
}

// digits writes three digits of x, fewer if they are zeros.
func digits(x float64) string {
	s := fmt.Sprintf("%.3g", x)
	if strings.Contains(s, "e") {
		return fmt.Sprintf("%.0f", x)
	}
	return s
}

func two(d, large time.Duration, largeName string, small time.Duration, smallName string) string {
	s := fmt.Sprintf("%d %s", d/large, largeName)
	if d/large == 1 {
		s = "1 " + strings.TrimSuffix(largeName, "s")
	}
	if rest := d % large / small; rest > 0 {
		s += fmt.Sprintf(" %d %s", rest, smallName)
	}
	return s
}

// lengthMs is length for milliseconds.
func lengthMs(ms float64) string {
	return length(time.Duration(min(ms*float64(time.Millisecond), math.MaxInt64/2)))
}

// amount writes a number of bytes with three digits: 340 bytes, 1.5 KiB, 64 MiB.
func amount(bytes int64) string {
	switch x := float64(bytes); {
	case bytes < 1<<10:
		return plural(bytes, "byte", "bytes")
	case x < 999.5*(1<<10):
		return digits(x/(1<<10)) + " KiB"
	case x < 999.5*(1<<20):
		return digits(x/(1<<20)) + " MiB"
	default:
		return digits(x/(1<<30)) + " GiB"
	}
}

// count writes n with thousands separators.
func count(n int64) string {
	s := strconv.FormatInt(n, 10)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// plural writes a count and its noun.
func plural(n int64, one, more string) string {
	if n == 1 {
		return "1 " + one
	}
	return count(n) + " " + more
}

// percent writes a share of 0 … 1. Only nothing is written as 0, and only everything as 100.
func percent(share float64) string {
	p := 100 * share
	switch {
	case p <= 0:
		return "0 %"
	case p < 0.1:
		return "< 0.1 %"
	case p >= 100:
		return "100 %"
	case p > 99.9:
		return "> 99.9 %"
	case p < 9.95, p > 99:
		return fmt.Sprintf("%.1f %%", p)
	default:
		return fmt.Sprintf("%.0f %%", p)
	}
}

// balance writes the level of a budget, rounded down: less than 1 is no retry. Five fifths
// are a whole all the same, though floating point adds them up to a little less.
func balance(level float64) string {
	level += tiny
	if level > -10 && level < 10 {
		return strconv.FormatFloat(math.Floor(level*10)/10, 'f', -1, 64)
	}
	return count(int64(max(-maxShown, min(maxShown, level))))
}

const (
	maxShown = 1e15
	tiny     = 1e-9 // as much as a budget forgives
)

// size writes a setting exactly.
func size(bytes int) string {
	switch {
	case bytes >= 1<<20 && bytes%(1<<20) == 0:
		return fmt.Sprintf("%d MiB", bytes>>20)
	case bytes >= 1<<10 && bytes%(1<<10) == 0:
		return fmt.Sprintf("%d KiB", bytes>>10)
	default:
		return count(int64(bytes)) + " bytes"
	}
}
