package serviceconfig

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
)

var (
	thorough = flag.Bool("thorough", false, "draw more in randomized tests, as make random does")
	count    = flag.Int("configs.count", 3000, "TestRandomConfigs draws so many service configs, or 30,000 with -thorough")
)

// Random service configs, most of them with a fault or two, are read as grpc-go reads them.
func TestRandomConfigs(t *testing.T) {
	n := *count
	if *thorough {
		n = 30_000
	}
	var accepted, rejected int
	for seed := range n {
		text := newGenerator(uint64(seed)).config()
		if wrong := disagreement(text); wrong != "" {
			t.Fatalf("seed %d: %s\n%s", seed, text, wrong)
		}
		if _, err := Parse(text); err == nil {
			accepted++
		} else {
			rejected++
		}
	}
	if accepted < n/5 || rejected < n/5 {
		t.Errorf("%d configs accepted and %d rejected, want at least %d of each", accepted, rejected, n/5)
	}
}

// A generator draws service configs. One value in faults is odd, and so is one key.
type generator struct {
	*rand.Rand
	faults int
}

func newGenerator(seed uint64) *generator {
	r := rand.New(rand.NewPCG(seed, 16))
	return &generator{r, []int{20, 60, 1000}[r.IntN(3)]}
}

func (g *generator) config() string {
	text := g.object(
		field{"methodConfig", g.some(6), func() string { return g.array(3, g.method) }},
		field{"retryThrottling", g.some(2), func() string {
			return g.object(field{"maxTokens", true, g.tokens}, field{"tokenRatio", true, g.tokens})
		}},
		field{"loadBalancingConfig", !g.some(6), func() string {
			return g.pick(`[{"round_robin": {}}]`, `[{"none": 1}]`, `[]`, `null`, `{}`, `7`)
		}},
		field{"loadBalancingPolicy", !g.some(8), g.text},
		field{"healthCheckConfig", !g.some(8), func() string { return g.object(field{"serviceName", true, g.text}) }},
		field{"unknown", !g.some(8), g.odd},
	)
	if g.fault() {
		text = g.broken(text)
	}
	return text
}

func (g *generator) method() string {
	retry := g.some(2)
	return g.object(
		field{"name", g.some(10), func() string { return g.array(3, g.name) }},
		field{"waitForReady", !g.some(4), func() string { return g.orOdd("true", "false") }},
		field{"timeout", !g.some(4), g.duration},
		field{"maxRequestMessageBytes", !g.some(8), g.number},
		field{"maxResponseMessageBytes", !g.some(8), g.number},
		field{"retryPolicy", retry, g.retry},
		field{"hedgingPolicy", !retry || g.fault(), g.hedging},
	)
}

func (g *generator) name() string {
	// Many services, so that most names appear once.
	return g.object(
		field{"service", g.some(20), func() string { return g.orOdd(fmt.Sprintf(`"s%d"`, g.IntN(200)), `"a/b"`) }},
		field{"method", g.some(1), func() string { return g.orOdd(`"M"`, `"N"`, `""`) }},
	)
}

func (g *generator) retry() string {
	return g.object(
		field{"maxAttempts", true, g.attempts},
		field{"initialBackoff", true, g.duration},
		field{"maxBackoff", true, g.duration},
		field{"backoffMultiplier", true, func() string { return g.orOdd("2", "1.6", "1", "0.5", "1e300", "5e-324") }},
		field{"retryableStatusCodes", true, func() string { return g.array(3, g.code) }},
	)
}

func (g *generator) hedging() string {
	return g.object(
		field{"maxAttempts", true, g.attempts},
		field{"hedgingDelay", g.some(1), g.duration},
		field{"nonFatalStatusCodes", g.some(1), func() string { return g.array(3, g.code) }},
	)
}

func (g *generator) attempts() string { return g.orOdd("2", "3", "4", "5", "6", "100") }

func (g *generator) tokens() string { return g.orOdd("10", "0.1", "0.001", "1000", "0.12345", "7e-1") }

func (g *generator) number() string { return g.orOdd("0", "1024", "-1", "9223372036854775807") }

func (g *generator) text() string { return g.orOdd(`"round_robin"`, `""`, `"none"`) }

func (g *generator) code() string {
	return g.orOdd(`"UNAVAILABLE"`, `"INTERNAL"`, "14", "8", "1", `"unavailable"`, `"Cancelled"`)
}

func (g *generator) duration() string {
	if g.fault() {
		return g.pick(`"0s"`, `"-1s"`, `"-0.5s"`, `"+1s"`, `"--1s"`, `"1.+5s"`, `"1.-5s"`, `"s"`, `".s"`, `"-s"`, `"1"`, `"1m"`, `"1ms"`,
			`"1.2.3s"`, `"1.1234567890s"`, `"315576000000s"`, `"315576000001s"`, `"9223372036.9s"`, `" 1s"`, `"1e3s"`, `"1_0s"`, `"\u0031s"`)
	}
	return g.orOdd(`"0.1s"`, `"1s"`, `"2.5s"`, `".5s"`, `"5.s"`, `"0.000000001s"`, `"9223372036.854775806s"`)
}

// orOdd returns one of the values, or with a fault one that may be of another type or out of range.
func (g *generator) orOdd(values ...string) string {
	if g.fault() {
		return g.odd()
	}
	return g.pick(values...)
}

func (g *generator) odd() string {
	return g.pick("null", "true", `""`, `"x"`, `"1"`, "0", "1", "2", "-1", "16", "17", "2.0", "2e0", "1.5", "0.0009", "1001", "1e308",
		"1e309", "1e-400",
		"9223372036854775808", "{}", "[]", "[14]", `{"service": "x"}`, `"OK"`, `"CANCELED"`, `"\u0055NKNOWN"`, "\"\xff\"", `"1s"`)
}

func (g *generator) pick(values ...string) string { return values[g.IntN(len(values))] }

// some is true in n of n+1 cases.
func (g *generator) some(n int) bool { return g.IntN(n+1) < n }

func (g *generator) fault() bool { return g.IntN(g.faults) == 0 }

type field struct {
	key     string
	present bool
	value   func() string
}

// object draws an object with the fields that are present, in any order. With a fault, a field is
// missing, repeated, or spelled in another case.
func (g *generator) object(fields ...field) string {
	if g.IntN(10*g.faults) == 0 {
		return g.odd()
	}
	var all []string
	for _, f := range fields {
		if f.present != (g.fault() && g.some(1)) {
			all = append(all, g.key(f.key)+": "+f.value())
		}
		if g.fault() && g.some(1) {
			all = append(all, g.key(f.key)+": "+f.value())
		}
	}
	g.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	return "{" + strings.Join(all, ", ") + "}"
}

func (g *generator) key(name string) string {
	if g.fault() {
		name = g.pick(strings.ToUpper(name), strings.ToLower(name), name+"s", strings.Replace(name, "s", "ſ", 1), "")
	}
	return `"` + name + `"`
}

// array draws an array with 1 … n elements, or with a fault none.
func (g *generator) array(n int, element func() string) string {
	count := 1 + g.IntN(n)
	if g.fault() {
		count = 0
	}
	all := make([]string, count)
	for i := range all {
		all[i] = element()
	}
	return "[" + strings.Join(all, ", ") + "]"
}

// broken loses or changes a byte, or appends something.
func (g *generator) broken(text string) string {
	i := g.IntN(len(text))
	return g.pick(text[:i]+text[i+1:], text[:i]+g.pick("{", "}", "[", "]", ",", ":", `"`, "0", "\\", "\n", " ")+text[i+1:], text[:i],
		text+g.pick(" ", "\n", "x", "{}", ","))
}

// FuzzParse feeds the reader any text: it does not panic, its errors and notes begin with a place in
// the text, and it agrees with grpc-go but for the listed differences.
func FuzzParse(f *testing.F) {
	for _, tt := range accepted {
		f.Add(tt.text)
	}
	for _, tt := range rejected {
		f.Add(tt.text)
	}
	for _, tt := range durations {
		f.Add(retryWith("maxBackoff", `"`+tt.text+`"`))
	}
	for _, d := range differences {
		f.Add(d.text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if wrong := disagreement(text); wrong != "" {
			t.Error(wrong)
		}
	})
}
