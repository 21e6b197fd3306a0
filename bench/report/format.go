package main

import (
	"fmt"
	"math"
	"strconv"
	"strings"
)

// format writes a value of a unit as people read it: 12.3 µs, 4.1 KiB, 17.
func format(v float64, unit string) string {
	what, _, _ := strings.Cut(unit, "/")
	switch {
	case unit == "added-allocs/op":
		v = math.Round(10*v) / 10
		if v == 0 {
			return "0"
		}
		return signed(v, "allocs/op")
	case strings.HasPrefix(unit, "added-"):
		return signed(v, strings.TrimPrefix(unit, "added-"))
	case what == "sec":
		return scaled(v, []scale{{1, "s"}, {1e-3, "ms"}, {1e-6, "µs"}, {1e-9, "ns"}})
	case what == "B" || strings.HasSuffix(what, "-B"):
		return scaled(v, []scale{{1 << 20, "MiB"}, {1 << 10, "KiB"}, {1, "B"}})
	case unit == "%over":
		return strings.Replace(fmt.Sprintf("%+.1f%%", v), "-", "−", 1)
	case what == "cpu-ms":
		return scaled(v/1000, []scale{{1, "s"}, {1e-3, "ms"}})
	default:
		return grouped(v)
	}
}

type scale struct {
	size float64
	name string
}

// scaled takes the first scale in which v is at least 1, else the last.
func scaled(v float64, scales []scale) string {
	for _, s := range scales {
		if math.Abs(v) >= s.size*0.9995 {
			return figures(v/s.size) + " " + s.name
		}
	}
	last := scales[len(scales)-1]
	return figures(v/last.size) + " " + last.name
}

// figures keeps three of them.
func figures(v float64) string {
	digits := 2
	for limit := 9.995; digits > 0 && math.Abs(v) >= limit; limit *= 10 {
		digits--
	}
	s := strconv.FormatFloat(v, 'f', digits, 64)
	if strings.Contains(s, ".") {
		s = strings.TrimRight(strings.TrimRight(s, "0"), ".")
	}
	return s
}

// grouped writes large numbers as 31,818 and small ones with three figures.
func grouped(v float64) string {
	if math.Abs(v) < 1000 {
		return figures(v)
	}
	s := strconv.FormatFloat(v, 'f', 0, 64)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// ratio is of an alternative to ours: 2.1×.
func ratio(r float64) string {
	switch {
	case r >= 100:
		return fmt.Sprintf("%.0f×", r)
	case r >= 10:
		return fmt.Sprintf("%.1f×", r)
	default:
		return fmt.Sprintf("%.2f×", r)
	}
}

func signed(v float64, unit string) string {
	if v < 0 {
		return "−" + format(-v, unit)
	}
	return "+" + format(v, unit)
}
