package grpcretry_test

import (
	"encoding/binary"
	"fmt"
	"math"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"google.golang.org/grpc/codes"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/debug"
)

// FuzzOptions draws options with any values. New rejects those outside the documented ranges, and names each
// with its value; of the others, the last of a kind is in effect, every setting is in its range, and the
// policy can be printed and shown on the debug page. Update agrees with New.
func FuzzOptions(f *testing.F) {
	f.Add([]byte{})
	for kind := range byte(len(optionKinds)) {
		f.Add([]byte{kind})                                             // zeros
		f.Add([]byte{kind, 1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3, 4})      // small numbers
		f.Add([]byte{kind, 255, 254, 253, 252, 251, 250, 249, 248, 25}) // extremes
		f.Add([]byte{17, 0, kind, 9, 9, 9, 9, 9, 9, 9, 9})              // of a method
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		if len(data) > 400 {
			return
		}
		d := &optionDraw{rest: data, want: map[string]any{}}
		var opts []grpcretry.Option
		for len(d.rest) > 0 {
			opts = append(opts, d.option())
		}
		r, err := grpcretry.New(opts...)
		d.checkError(t, "New", err)
		fresh, freshErr := grpcretry.New()
		if freshErr != nil {
			t.Fatal(freshErr)
		}
		d.checkError(t, "Update", fresh.Update(opts...))
		if err != nil {
			return
		}
		for _, method := range append([]string{"/s/m", "/s/other", "/other/m", ""}, d.patterns...) {
			p := r.Policy(method)
			d.checkRanges(t, method, p)
			if text := fmt.Sprintf("%v %+v", p, p); !utf8.ValidString(text) || strings.Contains(text, "PANIC") {
				t.Errorf("%q is printed as %q", method, text)
			}
		}
		p := r.Policy("/other/m")
		got := map[string]any{"AttemptTimeout": p.AttemptTimeout, "MaxElapsed": p.MaxElapsed, "UnsentOnly": p.UnsentOnly}
		for name, want := range d.want {
			if got[name] != want {
				t.Errorf("%s is %v, want the last value, %v", name, got[name], want)
			}
		}
		checkPage(t, r)
	})
}

// checkPage shows the Retrier's policies on the debug page.
func checkPage(t *testing.T, r *grpcretry.Retrier) {
	page := debug.Handler(r)
	defer page.Close()
	for _, query := range []string{"", "?format=json"} {
		w := httptest.NewRecorder()
		page.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/"+query, nil))
		if body := w.Body.String(); w.Code != http.StatusOK || strings.Contains(body, "PANIC") {
			t.Errorf("the page%s is %d: %s", query, w.Code, body)
		}
	}
	for _, warning := range r.Warnings() {
		if warning == "" || !utf8.ValidString(warning) {
			t.Errorf("warning %q", warning)
		}
	}
}

// An optionDraw draws options from bytes.
type optionDraw struct {
	rest     []byte
	patterns []string       // of WithMethod
	bad      []string       // words that the error must contain
	want     map[string]any // by field, for all methods
	narrow   bool           // while an option of a method is drawn
}

func (d *optionDraw) next() byte {
	if len(d.rest) == 0 {
		return 0
	}
	b := d.rest[0]
	d.rest = d.rest[1:]
	return b
}

// number returns a small number, an extreme one, or any.
func (d *optionDraw) number() int64 {
	extremes := []int64{math.MaxInt64, math.MinInt64, -1, 1, 1e6, 1e9, math.MaxInt32, math.MinInt32, math.MaxInt64 - 1, 1e18}
	switch b := d.next(); {
	case b < 128:
		return int64(b) - 8
	case b < 240:
		return int64(b-128) * 1e7
	case int(b-240) < len(extremes):
		return extremes[b-240]
	default:
		var bytes [8]byte
		d.rest = d.rest[copy(bytes[:], d.rest):]
		return int64(binary.LittleEndian.Uint64(bytes[:]))
	}
}

func (d *optionDraw) duration() time.Duration { return time.Duration(d.number()) }

// float returns numbers of all sizes, and those that are none.
func (d *optionDraw) float() float64 {
	special := []float64{math.NaN(), math.Inf(1), math.Inf(-1), math.MaxFloat64, math.SmallestNonzeroFloat64, 0.999, 1, 0.0009}
	if b := d.next(); b >= 240 {
		return special[int(b)%len(special)]
	}
	return float64(d.number()) / 16
}

// expect notes that an option is invalid unless valid is true, in which case it sets the field.
func (d *optionDraw) expect(valid bool, option, field string, value any, words ...any) {
	if !valid {
		for _, word := range append(words, option) {
			d.bad = append(d.bad, fmt.Sprint(word))
		}
	} else if field != "" && !d.narrow {
		d.want[field] = value
	}
}

// optionKinds draw one option each.
var optionKinds = []func(*optionDraw) grpcretry.CallOption{
	func(d *optionDraw) grpcretry.CallOption {
		n := int(d.number())
		d.expect(n >= 1, "WithMaxAttempts", "", n, n)
		return grpcretry.WithMaxAttempts(n)
	},
	func(d *optionDraw) grpcretry.CallOption {
		v := d.duration()
		d.expect(v >= 0, "WithAttemptTimeout", "AttemptTimeout", v, v)
		return grpcretry.WithAttemptTimeout(v)
	},
	func(d *optionDraw) grpcretry.CallOption {
		v := d.duration()
		d.expect(v >= 0, "WithMaxElapsed", "MaxElapsed", v, v)
		return grpcretry.WithMaxElapsed(v)
	},
	func(d *optionDraw) grpcretry.CallOption { return grpcretry.WithMaxServerDelay(d.duration()) },
	func(d *optionDraw) grpcretry.CallOption {
		v := d.duration()
		d.expect(v >= 0, "WithPatience", "", v, v)
		return grpcretry.WithPatience(v)
	},
	func(d *optionDraw) grpcretry.CallOption {
		n := int(d.number())
		d.expect(n >= 0, "WithBufferLimit", "", n, n)
		return grpcretry.WithBufferLimit(n)
	},
	func(d *optionDraw) grpcretry.CallOption { return grpcretry.WithBackoff(d.exponential("WithBackoff")) },
	func(d *optionDraw) grpcretry.CallOption {
		return grpcretry.WithOverloadBackoff(d.exponential("WithOverloadBackoff"))
	},
	func(d *optionDraw) grpcretry.CallOption {
		b := grpcretry.Decorrelated{Base: d.duration(), Max: d.duration()}
		d.expect(isSpan(b.Base, b.Max), "WithBackoff", "", b)
		return grpcretry.WithBackoff(b)
	},
	func(d *optionDraw) grpcretry.CallOption {
		v := d.duration()
		d.expect(v >= 0, "WithBackoff", "", v, v)
		return grpcretry.WithBackoff(grpcretry.Constant(v))
	},
	func(d *optionDraw) grpcretry.CallOption {
		list := d.codes()
		d.expect(len(list) > 0 && areFailures(list), "WithCodes", "", list)
		return grpcretry.WithCodes(list...)
	},
	func(d *optionDraw) grpcretry.CallOption {
		b := grpcretry.RatioBudget{Ratio: d.float(), Reserve: d.float(), MinPerSecond: d.float(), Window: d.duration()}
		window := b.Window
		if window == 0 {
			window = 10 * time.Second
		}
		valid := window >= time.Millisecond && !math.IsInf(b.MinPerSecond*window.Seconds(), 0)
		for _, x := range []float64{b.Ratio, b.Reserve, b.MinPerSecond} {
			valid = valid && x >= 0 && !math.IsInf(x, 0)
		}
		d.expect(valid, "WithRatioBudget", "", b)
		return grpcretry.WithRatioBudget(b)
	},
	func(d *optionDraw) grpcretry.CallOption {
		on := d.next()&1 != 0
		d.expect(true, "", "UnsentOnly", on)
		return grpcretry.WithUnsentOnly(on)
	},
	func(*optionDraw) grpcretry.CallOption { return grpcretry.Disable() },
	(*optionDraw).hedging,
	(*optionDraw).policy,
}

// option draws an option for all methods or, in one of several cases, for some.
func (d *optionDraw) option() grpcretry.Option {
	if kind := int(d.next()) % (len(optionKinds) + 3); kind < len(optionKinds) {
		return optionKinds[kind](d)
	}
	pattern := []string{"/s/m", "/s/", "/other2/m", "", "s/m", "//", "/s//", "/s/m/", "/\xff/m"}[int(d.next())%9]
	d.patterns = append(d.patterns, pattern)
	words := strings.Split(pattern, "/")
	valid := len(words) > 2 && words[0] == "" && !slices.Contains(words[1:len(words)-1], "") && utf8.ValidString(pattern)
	d.expect(valid, "WithMethod", "", pattern, fmt.Sprintf("%q", pattern))
	d.narrow = true
	defer func() { d.narrow = false }()
	return grpcretry.WithMethod(pattern, optionKinds[int(d.next())%len(optionKinds)](d))
}

func (d *optionDraw) exponential(option string) grpcretry.Exponential {
	b := grpcretry.Exponential{Base: d.duration(), Max: d.duration(), Multiplier: d.float(), Jitter: grpcretry.Jitter(d.number())}
	grows := b.Multiplier == 0 || b.Multiplier >= 1 && !math.IsInf(b.Multiplier, 0)
	d.expect(isSpan(b.Base, b.Max) && grows && b.Jitter >= 0 && b.Jitter <= 3, option, "", b, "Exponential")
	return b
}

// isSpan reports whether the bounds of a backoff are valid.
func isSpan(base, most time.Duration) bool {
	if base == 0 {
		base = 100 * time.Millisecond
	}
	if most == 0 {
		most = 5 * time.Second
	}
	return 0 < base && base <= most
}

func (d *optionDraw) codes() []codes.Code {
	list := make([]codes.Code, int(d.next())%4)
	for i := range list {
		list[i] = codes.Code(d.number())
	}
	return list
}

func areFailures(list []codes.Code) bool {
	return !slices.ContainsFunc(list, func(c codes.Code) bool { return c == codes.OK || c > codes.Unauthenticated })
}

// hedging is for all methods, too, where it must be declared safe.
func (d *optionDraw) hedging() grpcretry.CallOption {
	h := grpcretry.Hedging{Delay: grpcretry.HedgeAfter(0), AllMethodsAreSafe: true}
	valid := true
	if d.next()&1 == 0 {
		delay := d.duration()
		h.Delay = grpcretry.HedgeAfter(delay)
		valid = valid && delay >= 0
	} else {
		q, atLeast, atMost := d.float(), d.duration(), d.duration()
		h.Delay = grpcretry.HedgeAtQuantile(q, atLeast, atMost)
		valid = valid && q > 0 && q < 1 && atLeast >= 0 && atMost >= 0 && (atMost == 0 || atMost >= atLeast)
	}
	d.expect(valid, "WithHedging", "", h)
	return grpcretry.WithHedging(h)
}

func (d *optionDraw) policy() grpcretry.CallOption {
	p := grpcretry.Policy{MaxAttempts: int(d.number()), AttemptTimeout: d.duration(), BufferLimit: int(d.number()), Patience: d.duration()}
	d.expect(p.MaxAttempts >= 0 && p.AttemptTimeout >= 0 && p.BufferLimit >= -1, "WithPolicy", "", p)
	if p.AttemptTimeout > 0 {
		d.expect(true, "", "AttemptTimeout", p.AttemptTimeout)
	}
	return grpcretry.WithPolicy(p)
}

// checkError compares the error of New or Update with the invalid options.
func (d *optionDraw) checkError(t *testing.T, function string, err error) {
	t.Helper()
	if (err != nil) != (len(d.bad) > 0) {
		t.Fatalf("%s returns %v, want an error that contains %q", function, err, d.bad)
	}
	for _, word := range d.bad {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("%s returns %q, want it to contain %q", function, err, word)
		}
	}
}

// checkRanges checks that every setting is in its documented range.
func (d *optionDraw) checkRanges(t *testing.T, method string, p grpcretry.Policy) {
	t.Helper()
	if p.MaxAttempts < 1 || p.AttemptTimeout < 0 || p.MaxElapsed < 0 || p.MaxServerDelay == 0 || p.Patience == 0 ||
		p.BufferLimit < -1 || p.BufferLimit == 0 || len(p.Codes) == 0 || !areFailures(p.Codes) || p.Backoff == nil || p.OverloadBackoff == nil ||
		p.Budget == nil {
		t.Errorf("%q has %+v", method, p)
	}
	if h := p.Hedging; h != nil && (h.Delay == nil || h.Budget == nil) {
		t.Errorf("%q is hedged by %+v", method, *h)
	}
	for _, retry := range []int{1, 2, 3, 1000, math.MaxInt} {
		for _, b := range []grpcretry.Backoff{p.Backoff, p.OverloadBackoff} {
			if wait := b.Delay(retry, time.Second, 0.999); wait < 0 {
				t.Errorf("%q: %+v waits %v before retry %d", method, b, wait, retry)
			}
		}
	}
	if balance := p.Budget.Balance(time.Now()); !(balance >= 0) {
		t.Errorf("%q has a budget of %v", method, balance)
	}
}
