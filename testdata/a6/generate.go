// Generate writes backoff.json and throttle.json from what gRFC A6 says, in
// exact arithmetic and without the library, so that it can be an oracle for it.
// pushback.json has no arithmetic in it and is written by hand.
//
//	go run testdata/a6/generate.go -dir testdata/a6
package main

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"log"
	"math/big"
	"os"
	"path/filepath"
	"strings"
)

func main() {
	dir := flag.String("dir", ".", "folder to write into")
	flag.Parse()
	if err := os.MkdirAll(*dir, 0o755); err != nil {
		log.Fatal(err)
	}
	write(filepath.Join(*dir, "backoff.json"), lines(backoffs()))
	write(filepath.Join(*dir, "throttle.json"), lines(throttles()))
}

// A backoff is one policy with the bounds of its waits.
type backoff struct {
	Name   string  `json:"name"`
	Policy policy  `json:"policy"`
	Bounds []bound `json:"bounds"`
}

// A policy is written as in a service config.
type policy struct {
	InitialBackoff    string      `json:"initialBackoff"`
	MaxBackoff        string      `json:"maxBackoff"`
	BackoffMultiplier json.Number `json:"backoffMultiplier"`
}

// A bound is what the wait before the n-th retry may be.
type bound struct {
	N       int   `json:"n"`
	LowerNS int64 `json:"lower_ns"`
	UpperNS int64 `json:"upper_ns"`
}

func backoffs() []backoff {
	return []backoff{
		bounds("the example of A6", "0.1s", "1s", "2"),
		bounds("gRPC's connection backoff", "1s", "120s", "1.6"),
		bounds("this library's default", "0.1s", "5s", "2"),
		bounds("this library's default after RESOURCE_EXHAUSTED", "1s", "20s", "2"),
		bounds("a multiplier of 1 does not grow", "0.25s", "5s", "1"),
		bounds("initial and maximum the same", "2s", "2s", "3"),
		bounds("a multiplier that no float64 holds exactly", "0.05s", "30s", "1.1"),
		bounds("a day, reached by tens", "0.001s", "86400s", "10"),
		bounds("a multiplier below 1 shrinks", "1s", "1s", "0.5"),
	}
}

// bounds takes n from 1 to 12 and then a few large ones; a shrinking wait, which
// has no end to arrive at, only the first.
func bounds(name, initial, maximum, multiplier string) backoff {
	b := backoff{Name: name, Policy: policy{initial, maximum, json.Number(multiplier)}}
	wait, limit, factor := nanoseconds(initial), nanoseconds(maximum), rational(multiplier)
	last := 1_000_000
	if factor.Cmp(big.NewRat(1, 1)) < 0 {
		last = 12
	}
	for n := 1; n <= last; n++ {
		if n > 1 && wait != limit { // at the limit it stays: only a factor above 1 leads there
			wait = new(big.Rat).Mul(wait, factor)
		}
		if wait.Cmp(limit) > 0 {
			wait = limit
		}
		switch {
		case n <= 12, n == 20, n == 50, n == 100, n == 1000, n == last:
			b.Bounds = append(b.Bounds, jitter(n, wait))
		}
	}
	return b
}

// jitter is plus or minus 0.2, outwards to whole nanoseconds.
func jitter(n int, wait *big.Rat) bound {
	return bound{n, floor(new(big.Rat).Mul(wait, big.NewRat(8, 10))), ceil(new(big.Rat).Mul(wait, big.NewRat(12, 10)))}
}

// A throttle is a row of results and what they do to the tokens.
type throttle struct {
	Name       string      `json:"name"`
	MaxTokens  json.Number `json:"max_tokens"`
	TokenRatio json.Number `json:"token_ratio"`
	Steps      []step      `json:"steps"`
}

type step struct {
	Result       string      `json:"result"`
	TokensAfter  json.Number `json:"tokens_after"`
	AllowedAfter bool        `json:"allowed_after"`
}

func throttles() []throttle {
	return []throttle{
		throttled("the example of A6: at the threshold no retry, one success lifts it above", "10", "0.1", "ffff f s f"),
		throttled("tokens never fall below zero", "10", "0.1", "fffffffffff ss"),
		throttled("tokens never rise above the maximum", "10", "0.1", "s f ssssssssss s s"),
		throttled("a pushback that says stop, and a retryable code, are both failed; the rest is ignored", "10", "0.1", "iii fffff iii s i"),
		throttled("back from zero takes five successes for each failure", "4", "0.2", "ffff "+strings.Repeat("s", 11)),
		throttled("decimals beyond the third are ignored, not rounded", "10", "0.5466", "fff sss ff"),
		throttled("the same ratio written with three decimals", "10", "0.546", "fff sss ff"),
		throttled("a ratio whose thousandths float64 puts just below", "10", "1.001", "ffff sss"),
		throttled("another one", "10", "0.57", "ffff sss"),
		throttled("the smallest ratio", "2", "0.001", "f ss f s"),
		throttled("a ratio larger than the maximum fills up immediately", "3", "5", "fff s f s"),
		throttled("an odd maximum has its threshold between two tokens", "5", "0.5", "ff f s s f"),
		throttled("one token: the first failure stops retries", "1", "0.25", "f s s s s s"),
		throttled("the largest maximum", "1000", "0.1", strings.Repeat("f", 500)+"s"),
	}
}

// throttled counts in thousandths of a token, where all of A6 is whole numbers.
// In results f is failed, s is succeeded, i is ignored.
func throttled(name, maxTokens, tokenRatio, results string) throttle {
	t := throttle{Name: name, MaxTokens: json.Number(maxTokens), TokenRatio: json.Number(tokenRatio)}
	full, ratio := thousandths(maxTokens), thousandths(tokenRatio)
	tokens := full
	for _, r := range strings.ReplaceAll(results, " ", "") {
		s := step{}
		switch r {
		case 'f':
			s.Result, tokens = "failed", max(tokens-1000, 0)
		case 's':
			s.Result, tokens = "succeeded", min(tokens+ratio, full)
		case 'i':
			s.Result = "ignored"
		default:
			log.Fatalf("%s: no result is called %q", name, r)
		}
		s.TokensAfter = json.Number(new(big.Rat).SetFrac64(tokens, 1000).FloatString(3))
		s.AllowedAfter = 2*tokens > full
		t.Steps = append(t.Steps, s)
	}
	return t
}

func thousandths(decimal string) int64 {
	return floor(rational(decimal).Mul(rational(decimal), big.NewRat(1000, 1)))
}

func nanoseconds(duration string) *big.Rat {
	return new(big.Rat).Mul(rational(strings.TrimSuffix(duration, "s")), big.NewRat(1e9, 1))
}

func rational(decimal string) *big.Rat {
	r, ok := new(big.Rat).SetString(decimal)
	if !ok {
		log.Fatalf("%q is not a number", decimal)
	}
	return r
}

// floor and ceil take a number that is not negative.
func floor(r *big.Rat) int64 { return new(big.Int).Quo(r.Num(), r.Denom()).Int64() }

func ceil(r *big.Rat) int64 {
	quo, rem := new(big.Int).QuoRem(r.Num(), r.Denom(), new(big.Int))
	return quo.Int64() + int64(rem.Sign())
}

// lines is JSON with one element of an inner list on each line: long enough to
// hold a thought, short enough for a diff.
func lines[T any](vectors []T) []byte {
	var out bytes.Buffer
	out.WriteString("[\n")
	for i, v := range vectors {
		var compact bytes.Buffer
		enc := json.NewEncoder(&compact)
		enc.SetEscapeHTML(false)
		if err := enc.Encode(v); err != nil {
			log.Fatal(err)
		}
		line := strings.TrimSpace(compact.String())
		line = strings.NewReplacer(":[{", ":[\n    {", "},{", "},\n    {", "}]}", "}\n  ]}").Replace(line)
		line = strings.NewReplacer(`":`, `": `, `,"`, `, "`).Replace(line)
		fmt.Fprintf(&out, "  %s%s\n", line, map[bool]string{true: ",", false: ""}[i < len(vectors)-1])
	}
	out.WriteString("]\n")
	return out.Bytes()
}

func write(name string, content []byte) {
	if !json.Valid(content) {
		log.Fatalf("%s would not be JSON", name)
	}
	if err := os.WriteFile(name, content, 0o644); err != nil {
		log.Fatal(err)
	}
}
