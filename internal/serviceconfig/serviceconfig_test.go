package serviceconfig

import (
	"math"
	"reflect"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"
)

const (
	retryFields = `"maxAttempts": 2, "initialBackoff": "2s", "maxBackoff": "10s", "backoffMultiplier": 2, ` +
		`"retryableStatusCodes": ["UNAVAILABLE"]`
	hedgingFields = `"maxAttempts": 3, "hedgingDelay": "0.5s", "nonFatalStatusCodes": ["UNAVAILABLE"]`
)

func aRetry() *Retry {
	return &Retry{2, 2 * time.Second, 10 * time.Second, 2, []codes.Code{codes.Unavailable}}
}

func aHedging() *Hedging { return &Hedging{3, 500 * time.Millisecond, []codes.Code{codes.Unavailable}} }

// ofFoo returns a config with one entry, for service foo.
func ofFoo(fields string) string {
	if fields != "" {
		fields = ", " + fields
	}
	return `{"methodConfig": [{"name": [{"service": "foo"}]` + fields + `}]}`
}

// with returns the fields with another value for one of them, or without it.
func with(fields, name, value string) string {
	var kept []string
	for f := range strings.SplitSeq(fields, ", ") {
		if !strings.HasPrefix(f, `"`+name+`"`) {
			kept = append(kept, f)
		}
	}
	if value != "" {
		kept = append(kept, `"`+name+`": `+value)
	}
	return strings.Join(kept, ", ")
}

func retryWith(name, value string) string {
	return ofFoo(`"retryPolicy": {` + with(retryFields, name, value) + `}`)
}

func hedgingWith(name, value string) string {
	return ofFoo(`"hedgingPolicy": {` + with(hedgingFields, name, value) + `}`)
}

func throttledBy(fields string) string {
	return `{"methodConfig": [], "retryThrottling": {` + fields + `}}`
}

// of returns the entry of foo with a changed retryPolicy.
func of(change func(*Retry)) []Method {
	r := aRetry()
	change(r)
	return []Method{{Names: []string{"/foo/"}, Retry: r}}
}

// accepted has the texts that are read, with their entries. A missing path is that of the
// first entry.
var accepted = []struct {
	name, text string
	want       []Method
}{
	{"an empty object", `{}`, nil},
	{"null", `null`, nil},
	{"space around it", " \n{} \t\n", nil},
	{"unknown keys", `{"methodConf": 7, "methodConfig": [{"nam": 7}]}`, nil},
	{"methodConfig null", `{"methodConfig": null}`, nil},
	{"an entry that is null", `{"methodConfig": [null]}`, nil},

	{"a known balancer", `{"loadBalancingConfig": [{"round_robin": {}}]}`, nil},
	{"a balancer that is not linked", `{"loadBalancingConfig": [{"not_linked": {}}]}`, nil},
	{"no balancer", `{"loadBalancingConfig": []}`, nil},
	{"loadBalancingConfig null", `{"loadBalancingConfig": null}`, nil},
	{"loadBalancingPolicy", `{"loadBalancingPolicy": "round_robin"}`, nil},
	{"an unknown loadBalancingPolicy", `{"loadBalancingPolicy": "not_linked"}`, nil},
	{"healthCheckConfig", `{"healthCheckConfig": {"serviceName": "x"}}`, nil},

	{"waitForReady", ofFoo(`"waitForReady": true`), []Method{{Names: []string{"/foo/"}}}},
	{"waitForReady off", ofFoo(`"waitForReady": false`), []Method{{Names: []string{"/foo/"}}}},
	{"timeout", ofFoo(`"timeout": "1s"`), []Method{{Names: []string{"/foo/"}}}},
	{"timeout null", ofFoo(`"timeout": null`), []Method{{Names: []string{"/foo/"}}}},
	{"message sizes", ofFoo(`"maxRequestMessageBytes": 1024, "maxResponseMessageBytes": 2048`), []Method{{Names: []string{"/foo/"}}}},
	{"message sizes null", ofFoo(`"maxRequestMessageBytes": null, "maxResponseMessageBytes": null`), []Method{{Names: []string{"/foo/"}}}},

	{"a method", `{"methodConfig": [{"name": [{"service": "foo", "method": "Bar"}]}]}`, []Method{{Names: []string{"/foo/Bar"}}}},
	{"a method that is null", `{"methodConfig": [{"name": [{"service": "foo", "method": null}]}]}`, []Method{{Names: []string{"/foo/"}}}},
	{"a method that is empty", `{"methodConfig": [{"name": [{"service": "foo", "method": ""}]}]}`, []Method{{Names: []string{"/foo/"}}}},
	{"the default", `{"methodConfig": [{"name": [{}]}]}`, []Method{{Names: []string{""}}}},
	{"the default as a null service", `{"methodConfig": [{"name": [{"service": null}]}]}`, []Method{{Names: []string{""}}}},
	{"the default as an empty service", `{"methodConfig": [{"name": [{"service": ""}]}]}`, []Method{{Names: []string{""}}}},
	{"the default as a null name", `{"methodConfig": [{"name": [null]}]}`, []Method{{Names: []string{""}}}},
	{"several names", `{"methodConfig": [{"name": [{"service": "foo"}, {"service": "foo", "method": "A"}, {"service": "bar"}]}]}`,
		[]Method{{Names: []string{"/foo/", "/foo/A", "/bar/"}}}},
	{"several entries", `{"methodConfig": [{"name": [{"service": "a"}]}, {"name": [{"service": "b"}], "retryPolicy": {` + retryFields + `}}]}`,
		[]Method{{Names: []string{"/a/"}}, {Path: "methodConfig[1]", Names: []string{"/b/"}, Retry: aRetry()}}},
	{"no names", `{"methodConfig": [{"name": [], "retryPolicy": {` + retryFields + `}}]}`, nil},
	{"an invalid policy without a name", `{"methodConfig": [{"retryPolicy": {"maxAttempts": -1}}]}`, nil},
	{"an invalid policy with a null name", `{"methodConfig": [{"name": null, "retryPolicy": {}, "hedgingPolicy": {}}]}`, nil},
	{"a policy after a skipped entry", `{"methodConfig": [{}, {"name": [{"service": "foo"}], "retryPolicy": {` + retryFields + `}}]}`,
		[]Method{{Path: "methodConfig[1]", Names: []string{"/foo/"}, Retry: aRetry()}}},

	{"a retryPolicy", ofFoo(`"retryPolicy": {` + retryFields + `}`), []Method{{Names: []string{"/foo/"}, Retry: aRetry()}}},
	{"a retryPolicy that is null", ofFoo(`"retryPolicy": null`), []Method{{Names: []string{"/foo/"}}}},
	{"keys in any case", `{"METHODCONFIG": [{"Name": [{"SERVICE": "foo", "Method": "Bar"}], "retrypolicy": {` +
		strings.Replace(retryFields, "maxBackoff", "maxbackoff", 1) + `}}]}`,
		[]Method{{Names: []string{"/foo/Bar"}, Retry: aRetry()}}},
	{"5 attempts", retryWith("maxAttempts", "5"), of(func(r *Retry) { r.MaxAttempts = 5 })},
	{"6 attempts count as 5", retryWith("maxAttempts", "6"), of(func(r *Retry) { r.MaxAttempts = 5 })},
	{"a backoff in nanoseconds", retryWith("initialBackoff", `"0.000000001s"`), of(func(r *Retry) { r.InitialBackoff = 1 })},
	{"a backoff without a whole part", retryWith("initialBackoff", `".050s"`), of(func(r *Retry) {
		r.InitialBackoff = 50 * time.Millisecond
	})},
	{"a backoff without a fraction", retryWith("initialBackoff", `"3.s"`), of(func(r *Retry) { r.InitialBackoff = 3 * time.Second })},
	{"a backoff too long for Go", retryWith("maxBackoff", `"315576000000s"`), of(func(r *Retry) { r.MaxBackoff = math.MaxInt64 })},
	{"an initialBackoff above maxBackoff", retryWith("initialBackoff", `"11s"`), of(func(r *Retry) { r.InitialBackoff = 11 * time.Second })},
	{"a multiplier of 1", retryWith("backoffMultiplier", "1"), of(func(r *Retry) { r.BackoffMultiplier = 1 })},
	{"a multiplier below 1", retryWith("backoffMultiplier", "0.5"), of(func(r *Retry) { r.BackoffMultiplier = 0.5 })},
	{"a multiplier with an exponent", retryWith("backoffMultiplier", "15e-1"), of(func(r *Retry) { r.BackoffMultiplier = 1.5 })},
	{"codes as numbers", retryWith("retryableStatusCodes", "[14, 8, 16]"),
		of(func(r *Retry) {
			r.Codes = []codes.Code{codes.Unavailable, codes.ResourceExhausted, codes.Unauthenticated}
		})},
	{"codes in any case", retryWith("retryableStatusCodes", `["unavailable", "Resource_Exhausted", "CANCELLED"]`),
		of(func(r *Retry) {
			r.Codes = []codes.Code{codes.Unavailable, codes.ResourceExhausted, codes.Canceled}
		})},
	{"repeated codes", retryWith("retryableStatusCodes", `["UNAVAILABLE", 14, "INTERNAL", "unavailable"]`),
		of(func(r *Retry) { r.Codes = []codes.Code{codes.Unavailable, codes.Internal} })},
	{"OK among the codes", retryWith("retryableStatusCodes", `["OK", 14, 0, null]`), of(func(*Retry) {})},
	{"OK alone", retryWith("retryableStatusCodes", `["OK"]`), of(func(r *Retry) { r.Codes = []codes.Code{} })},

	{"a repeated key adds", `{"methodConfig": [{"name": [{"service": "foo"}], "retryPolicy": {` + retryFields +
		`}, "retryPolicy": {"maxAttempts": 4}}]}`,
		of(func(r *Retry) { r.MaxAttempts = 4 })},
	{"a repeated key with null", ofFoo(`"retryPolicy": {` + retryFields + `, "maxAttempts": null}`), of(func(*Retry) {})},

	{"a repeated list with null", retryWith("retryableStatusCodes", `[14, 13], "retryableStatusCodes": [null, null, 8]`),
		of(func(r *Retry) { r.Codes = []codes.Code{codes.Unavailable, codes.Internal, codes.ResourceExhausted} })},

	{"a hedgingPolicy", ofFoo(`"hedgingPolicy": {` + hedgingFields + `}`), []Method{{Names: []string{"/foo/"}, Hedging: aHedging()}}},
	{"a hedgingPolicy with attempts alone", ofFoo(`"hedgingPolicy": {"maxAttempts": 2}`),
		[]Method{{Names: []string{"/foo/"}, Hedging: &Hedging{2, 0, []codes.Code{}}}}},
	{"a hedgingPolicy with nulls", ofFoo(`"hedgingPolicy": {"maxAttempts": 9, "hedgingDelay": null, "nonFatalStatusCodes": null}`),
		[]Method{{Names: []string{"/foo/"}, Hedging: &Hedging{5, 0, []codes.Code{}}}}},
	{"a hedgingPolicy that is null, and a retryPolicy", ofFoo(`"hedgingPolicy": null, "retryPolicy": {` + retryFields + `}`),
		[]Method{{Names: []string{"/foo/"}, Retry: aRetry()}}},
	{"a hedgingDelay of 0", hedgingWith("hedgingDelay", `"0s"`),
		[]Method{{Names: []string{"/foo/"}, Hedging: &Hedging{3, 0, aHedging().NonFatalCodes}}}},
}

func TestParse(t *testing.T) {
	for _, tt := range accepted {
		t.Run(tt.name, func(t *testing.T) {
			for i := range tt.want {
				if tt.want[i].Path == "" {
					tt.want[i].Path = "methodConfig[0]"
				}
			}
			got, err := Parse(tt.text)
			if err != nil {
				t.Fatalf("Parse(%s): %v", tt.text, err)
			}
			if !reflect.DeepEqual(got.Methods, tt.want) || got.Throttling != nil {
				t.Errorf("Parse(%s) = %+v, want %+v", tt.text, got, tt.want)
			}
			if wrong := disagreement(tt.text); wrong != "" {
				t.Errorf("%s: %s", tt.text, wrong)
			}
		})
	}
}

// rejected has the texts that are an error, with the beginning of that error.
var rejected = []struct{ name, text, want string }{
	{"nothing", "", "the service config is empty, want a JSON object"},
	{"spaces", "  \n", "line 1, column 3: not JSON: unexpected end of JSON input"},
	{"an array", `[]`, "the service config: [], want an object"},
	{"a string", `"x"`, `the service config: "x", want an object`},
	{"half of an object", "{\n\"methodConfig\": [", "line 2, column 17: not JSON: unexpected end of JSON input"},
	{"something after it", "{}\n x", "line 2, column 2: not JSON: invalid character 'x' after top-level value"},
	{"another object after it", "{} {}", "line 1, column 4: not JSON: invalid character '{' after top-level value"},
	{"a word that is not JSON", ofFoo(`"waitForReady": fall`), "line 1, column 69: not JSON: invalid character 'l' in literal false"},

	{"a number as loadBalancingPolicy", `{"loadBalancingPolicy": 1}`, "loadBalancingPolicy: 1, want a string"},
	{"a number as service to check", `{"healthCheckConfig": {"serviceName": 1}}`, "healthCheckConfig.serviceName: 1, want a string"},
	{"a text as healthCheckConfig", `{"healthCheckConfig": "x"}`, `healthCheckConfig: "x", want an object`},
	{"an object as methodConfig", `{"methodConfig": {}}`, "methodConfig: {}, want an array"},
	{"a number as an entry", `{"methodConfig": [{}, 7]}`, "methodConfig[1]: 7, want an object"},
	{"a text as name", `{"methodConfig": [{"name": "foo"}]}`, `methodConfig[0].name: "foo", want an array`},
	{"a text within name", `{"methodConfig": [{"name": [{}, "foo"]}]}`, `methodConfig[0].name[1]: "foo", want an object`},
	{"a number as service", `{"methodConfig": [{"name": [{"service": 7}]}]}`, "methodConfig[0].name[0].service: 7, want a string"},
	{"a text as waitForReady", ofFoo(`"waitForReady": "true"`), `methodConfig[0].waitForReady: "true", want true or false`},
	{"another unit", ofFoo(`"timeout": "3c"`), `methodConfig[0].timeout: "3c", want a duration in seconds, such as "0.1s"`},
	{"another unit in a skipped entry", `{"methodConfig": [{"timeout": "3c"}]}`, `methodConfig[0].timeout: "3c", want a duration`},
	{"another unit, then none", ofFoo(`"timeout": "3c", "timeout": null`), `methodConfig[0].timeout: "3c", want a duration`},
	{"a number as timeout", ofFoo(`"timeout": 3`), "methodConfig[0].timeout: 3, want a string"},
	{"a text as message size", ofFoo(`"maxRequestMessageBytes": "1024"`),
		`methodConfig[0].maxRequestMessageBytes: "1024", want a whole number, in digits`},
	{"a fraction as message size", ofFoo(`"maxResponseMessageBytes": 1.5`),
		"methodConfig[0].maxResponseMessageBytes: 1.5, want a whole number, in digits"},
	{"a message size beyond 64 bits", ofFoo(`"maxResponseMessageBytes": 9223372036854775808`),
		"methodConfig[0].maxResponseMessageBytes: 9223372036854775808, out of range"},

	{"a method without a service", `{"methodConfig": [{"name": [{"method": "Bar"}]}]}`,
		`methodConfig[0].name[0].service: missing or empty, although there is a method, "Bar"`},
	{"a method with an empty service", `{"methodConfig": [{"name": [{}, {"service": "", "method": "Bar"}]}]}`,
		"methodConfig[0].name[1].service: missing or empty"},
	{"a service twice", `{"methodConfig": [{"name": [{"service": "foo"}, {"service": "foo"}]}]}`,
		`methodConfig[0].name[1]: the name "/foo/" appears twice, first in methodConfig[0].name[0]`},
	{"a method twice", `{"methodConfig": [{"name": [{}, {"service": "a", "method": "b"}]}, {"name": [{"service": "a", "method": "b"}]}]}`,
		`methodConfig[1].name[0]: the name "/a/b" appears twice, first in methodConfig[0].name[1]`},
	{"the default twice", `{"methodConfig": [{"name": [{}]}, {"name": [{"service": null}]}]}`,
		`methodConfig[1].name[0]: the name "" appears twice, first in methodConfig[0].name[0]`},

	{"a text as retryPolicy", ofFoo(`"retryPolicy": "x"`), `methodConfig[0].retryPolicy: "x", want an object`},
	{"an empty retryPolicy", ofFoo(`"retryPolicy": {}`),
		"methodConfig[0].retryPolicy.maxAttempts: missing, want a whole number of at least 2"},
	{"a wrong retryPolicy for no name", `{"methodConfig": [{"name": [], "retryPolicy": {}}]}`,
		"methodConfig[0].retryPolicy.maxAttempts: missing"},
	{"negative maxAttempts", retryWith("maxAttempts", "-1"), "methodConfig[0].retryPolicy.maxAttempts: -1, want a whole number of at least 2"},
	{"one attempt", retryWith("maxAttempts", "1"), "methodConfig[0].retryPolicy.maxAttempts: 1, want"},
	{"no maxAttempts", retryWith("maxAttempts", ""), "methodConfig[0].retryPolicy.maxAttempts: missing, want"},
	{"maxAttempts null", retryWith("maxAttempts", "null"), "methodConfig[0].retryPolicy.maxAttempts: missing, want"},
	{"maxAttempts with a point", retryWith("maxAttempts", "2.0"),
		"methodConfig[0].retryPolicy.maxAttempts: 2.0, want a whole number, in digits"},
	{"maxAttempts as a text", retryWith("maxAttempts", `"4"`), `methodConfig[0].retryPolicy.maxAttempts: "4", want a whole number, in digits`},
	{"maxAttempts beyond 64 bits", retryWith("maxAttempts", "99999999999999999999"),
		"methodConfig[0].retryPolicy.maxAttempts: 99999999999999999999, out of range"},
	{"no initialBackoff", retryWith("initialBackoff", ""),
		`methodConfig[0].retryPolicy.initialBackoff: missing, want a duration above 0, such as "0.1s"`},
	{"zero initialBackoff", retryWith("initialBackoff", `"0s"`), "methodConfig[0].retryPolicy.initialBackoff: 0s, want a duration above 0"},
	{"negative initialBackoff", retryWith("initialBackoff", `"-1s"`),
		"methodConfig[0].retryPolicy.initialBackoff: -1s, want a duration above 0"},
	{"initialBackoff null", retryWith("initialBackoff", "null"),
		"methodConfig[0].retryPolicy.initialBackoff: null, want a duration in seconds"},
	{"initialBackoff in ms", retryWith("initialBackoff", `"100ms"`),
		`methodConfig[0].retryPolicy.initialBackoff: "100ms", want a duration in seconds`},
	{"no maxBackoff", retryWith("maxBackoff", ""), "methodConfig[0].retryPolicy.maxBackoff: missing, want"},
	{"zero maxBackoff", retryWith("maxBackoff", `"0s"`), "methodConfig[0].retryPolicy.maxBackoff: 0s, want"},
	{"maxBackoff beyond 10,000 years", retryWith("maxBackoff", `"315576000001s"`),
		`methodConfig[0].retryPolicy.maxBackoff: "315576000001s", want`},
	{"no backoffMultiplier", retryWith("backoffMultiplier", ""),
		"methodConfig[0].retryPolicy.backoffMultiplier: missing, want a number above 0"},
	{"zero backoffMultiplier", retryWith("backoffMultiplier", "0"), "methodConfig[0].retryPolicy.backoffMultiplier: 0, want a number above 0"},
	{"negative backoffMultiplier", retryWith("backoffMultiplier", "-2"), "methodConfig[0].retryPolicy.backoffMultiplier: -2, want"},
	{"backoffMultiplier too small for a float", retryWith("backoffMultiplier", "1e-400"),
		"methodConfig[0].retryPolicy.backoffMultiplier: 0, want"},
	{"backoffMultiplier too large", retryWith("backoffMultiplier", "1e400"),
		"methodConfig[0].retryPolicy.backoffMultiplier: 1e400, out of range"},
	{"backoffMultiplier as a text", retryWith("backoffMultiplier", `"2"`),
		`methodConfig[0].retryPolicy.backoffMultiplier: "2", want a number`},
	{"no codes", retryWith("retryableStatusCodes", ""),
		"methodConfig[0].retryPolicy.retryableStatusCodes: missing or empty, want at least one status code"},
	{"codes null", retryWith("retryableStatusCodes", "null"), "methodConfig[0].retryPolicy.retryableStatusCodes: missing or empty"},
	{"empty codes", retryWith("retryableStatusCodes", "[]"), "methodConfig[0].retryPolicy.retryableStatusCodes: missing or empty"},
	{"codes as a text", retryWith("retryableStatusCodes", `"INTERNAL"`),
		`methodConfig[0].retryPolicy.retryableStatusCodes: "INTERNAL", want an array`},
	{"an unknown code", retryWith("retryableStatusCodes", `["UNAVAIL"]`),
		`methodConfig[0].retryPolicy.retryableStatusCodes[0]: "UNAVAIL" is not a status code`},
	{"CANCELED with one L", retryWith("retryableStatusCodes", `[14, "CANCELED"]`),
		`methodConfig[0].retryPolicy.retryableStatusCodes[1]: "CANCELED" is not`},
	{"an unknown number", retryWith("retryableStatusCodes", "[17]"),
		"methodConfig[0].retryPolicy.retryableStatusCodes[0]: 17 is not a status code"},
	{"a number in quotes", retryWith("retryableStatusCodes", `["14"]`), `methodConfig[0].retryPolicy.retryableStatusCodes[0]: "14" is not`},
	{"a fraction", retryWith("retryableStatusCodes", "[14.0]"), "methodConfig[0].retryPolicy.retryableStatusCodes[0]: 14.0 is not"},
	{"a code with an escape", retryWith("retryableStatusCodes", `["\u0055NKNOWN"]`),
		`methodConfig[0].retryPolicy.retryableStatusCodes[0]: "\u0055NKNOWN" is not`},
	{"a code whose upper case is a name only in Unicode", retryWith("retryableStatusCodes", `["aborteſ"]`),
		"methodConfig[0].retryPolicy.retryableStatusCodes[0]: "},
	{"a long code", retryWith("retryableStatusCodes", `["`+strings.Repeat("long ", 20)+`"]`),
		`methodConfig[0].retryPolicy.retryableStatusCodes[0]: "long long long long long long long long long long long long` +
			`... is not a status code`},
	{"a list within the codes", retryWith("retryableStatusCodes", "[[14]]"),
		"methodConfig[0].retryPolicy.retryableStatusCodes[0]: [14] is not"},
	{"the second of two entries", `{"methodConfig": [{"name": [{}]}, {"name": [{"service": "a"}], "retryPolicy": {"maxAttempts": 0}}]}`,
		"methodConfig[1].retryPolicy.maxAttempts: 0, want"},

	{"an empty hedgingPolicy", ofFoo(`"hedgingPolicy": {}`),
		"methodConfig[0].hedgingPolicy.maxAttempts: missing, want a whole number of at least 2"},
	{"one hedged attempt", hedgingWith("maxAttempts", "1"), "methodConfig[0].hedgingPolicy.maxAttempts: 1, want"},
	{"hedged attempts as a fraction", hedgingWith("maxAttempts", "2.5"),
		"methodConfig[0].hedgingPolicy.maxAttempts: 2.5, want a whole number"},
	{"a negative hedgingDelay", hedgingWith("hedgingDelay", `"-0.001s"`),
		"methodConfig[0].hedgingPolicy.hedgingDelay: -1ms, want a duration of at least 0"},
	{"a hedgingDelay in ms", hedgingWith("hedgingDelay", `"5ms"`),
		`methodConfig[0].hedgingPolicy.hedgingDelay: "5ms", want a duration in seconds`},
	{"an unknown non-fatal code", hedgingWith("nonFatalStatusCodes", `["BUSY"]`),
		`methodConfig[0].hedgingPolicy.nonFatalStatusCodes[0]: "BUSY" is not a status code`},
	{"both policies", ofFoo(`"retryPolicy": {` + retryFields + `}, "hedgingPolicy": {` + hedgingFields + `}`),
		"methodConfig[0]: a retryPolicy and a hedgingPolicy, want at most one of them"},

	{"an empty retryThrottling", throttledBy(""), "retryThrottling.maxTokens: missing, want above 0 and at most 1000"},
	{"no maxTokens", throttledBy(`"tokenRatio": 0.1`), "retryThrottling.maxTokens: missing, want"},
	{"zero maxTokens", throttledBy(`"maxTokens": 0, "tokenRatio": 0.1`), "retryThrottling.maxTokens: 0, want above 0 and at most 1000"},
	{"negative maxTokens", throttledBy(`"maxTokens": -5, "tokenRatio": 0.1`), "retryThrottling.maxTokens: -5, want above 0 and at most 1000"},
	{"maxTokens above 1000", throttledBy(`"maxTokens": 1000.5, "tokenRatio": 0.1`),
		"retryThrottling.maxTokens: 1000.5, want above 0 and at most 1000"},
	{"maxTokens as a text", throttledBy(`"maxTokens": "10", "tokenRatio": 0.1`), `retryThrottling.maxTokens: "10", want a number`},
	{"maxTokens below 0.001", throttledBy(`"maxTokens": 0.0009, "tokenRatio": 0.1`), "retryThrottling.maxTokens: 0.0009, want at least 0.001"},
	{"no tokenRatio", throttledBy(`"maxTokens": 10`), "retryThrottling.tokenRatio: missing, want a number above 0"},
	{"zero tokenRatio", throttledBy(`"maxTokens": 10, "tokenRatio": 0`), "retryThrottling.tokenRatio: 0, want a number above 0"},
	{"negative tokenRatio", throttledBy(`"maxTokens": 10, "tokenRatio": -0.1`), "retryThrottling.tokenRatio: -0.1, want"},
	{"tokenRatio below 0.001", throttledBy(`"maxTokens": 10, "tokenRatio": 0.0009`),
		"retryThrottling.tokenRatio: 0.0009, want at least 0.001"},
	{"no methodConfig", `{"retryThrottling": {"maxTokens": 0, "tokenRatio": 1}}`, "retryThrottling.maxTokens: 0, want"},
}

func TestParseRejects(t *testing.T) {
	for _, tt := range rejected {
		t.Run(tt.name, func(t *testing.T) {
			c, err := Parse(tt.text)
			if err == nil || c != nil || !strings.HasPrefix(err.Error(), tt.want) {
				t.Errorf("Parse(%s) = %+v, %v; want nil and the error %s", tt.text, c, err, tt.want)
			}
			if wrong := disagreement(tt.text); wrong != "" {
				t.Errorf("%s: %s", tt.text, wrong)
			}
		})
	}
}

func TestThrottling(t *testing.T) {
	for text, want := range map[string]*Throttling{
		`{"methodConfig": [], "retryThrottling": null}`:          nil,
		throttledBy(`"maxTokens": 10, "tokenRatio": 0.1`):        {10, 0.1},
		throttledBy(`"maxTokens": 1000, "tokenRatio": 1000`):     {1000, 1000},
		throttledBy(`"maxTokens": 0.5, "tokenRatio": 1e300`):     {0.5, 1e300},
		throttledBy(`"maxTokens": 0.001, "tokenRatio": 0.001`):   {0.001, 0.001},
		throttledBy(`"maxTokens": 10, "tokenRatio": 0.5466`):     {10, 0.5466},
		`{"retryThrottling": {"maxTokens": 7, "tokenRatio": 1}}`: {7, 1},
	} {
		c, err := Parse(text)
		if err != nil || !reflect.DeepEqual(c.Throttling, want) {
			t.Errorf("Parse(%s) = %+v, %v; want throttling %+v", text, c, err, want)
		}
		if wrong := disagreement(text); wrong != "" {
			t.Errorf("%s: %s", text, wrong)
		}
	}
}

func TestNotes(t *testing.T) {
	got, err := Parse(`{
		"version": 2,
		"methodConfig": [
			{"timeout": "1s"},
			{"name": []},
			{"name": [{}], "retryPolcy": {}, "retryPolicy": {"maxAttempts": 9, "initialBackoff": "2s", "maxBackoff": "1s", "backoffMultiplier": 2,
				"retryableStatusCodes": [14, "ok"], "perAttemptRecvTimeout": "1s"}},
			{"name": [{"service": "a"}], "hedgingPolicy": {"maxAttempts": 6, "nonFatalStatusCodes": [0]}, "hedgingpolicy": {"hedgingDelay": "1s"}}],
		"retryThrottling": {"maxTokens": 10.12345, "tokenRatio": 0.29}}`)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		`the service config: the key "version" is unknown, so it is ignored`,
		`methodConfig[2]: the key "retryPolcy" is unknown, so it is ignored`,
		`methodConfig[2].retryPolicy: the key "perAttemptRecvTimeout" is unknown, so it is ignored`,
		`methodConfig[3].hedgingPolicy: appears twice, and what follows adds to the first or replaces it`,
		`methodConfig[0].name: missing, so the entry applies to no method`,
		`methodConfig[1].name: empty, so the entry applies to no method`,
		`methodConfig[2].retryPolicy.maxAttempts: 9 counts as 5, the most that gRPC allows`,
		`methodConfig[2].retryPolicy.initialBackoff: 2s is above maxBackoff, 1s, which limits it`,
		`methodConfig[2].retryPolicy.retryableStatusCodes[1]: OK is ignored, because a call that succeeded is not retried`,
		`methodConfig[3].hedgingPolicy.maxAttempts: 6 counts as 5, the most that gRPC allows`,
		`methodConfig[3].hedgingPolicy.nonFatalStatusCodes[0]: OK is ignored, because a call that succeeded is not retried`,
		`retryThrottling.maxTokens: 10.12345 counts as 10.123, because decimals beyond the third are ignored`,
	}
	if !reflect.DeepEqual(got.Notes, want) {
		t.Errorf("notes:\n%s\nwant:\n%s", strings.Join(got.Notes, "\n"), strings.Join(want, "\n"))
	}
}

// A config with nothing unusual, or with values at a limit, has no notes.
func TestNoNotes(t *testing.T) {
	for _, text := range []string{
		retryWith("maxAttempts", "5"),
		retryWith("initialBackoff", `"10s"`),
		throttledBy(`"maxTokens": 1000, "tokenRatio": 1e300`),
		throttledBy(`"maxTokens": 4.35, "tokenRatio": 1.001`), // floats just below, at least when multiplied by 1000
		fullConfig,
	} {
		if c, err := Parse(text); err != nil || len(c.Notes) != 0 {
			t.Errorf("Parse(%s) = %+v, %v; want no notes", text, c, err)
		}
	}
}

// fullConfig has every field.
const fullConfig = `{"loadBalancingConfig": [{"round_robin": {}}], "healthCheckConfig": {"serviceName": ""}, ` +
	`"methodConfig": [{"name": [{"service": "a", "method": "b"}],
		"waitForReady": true, "timeout": "1s", "maxRequestMessageBytes": 1, "maxResponseMessageBytes": 1, "retryPolicy": {` + retryFields + `}},
		{"name": [{}], "hedgingPolicy": {` + hedgingFields + `}}], "retryThrottling": {"maxTokens": 10, "tokenRatio": 0.1}}`

// durations has the grammar and the limits of a google.protobuf.Duration as grpc-go reads it.
var durations = []struct {
	text string
	want time.Duration
	ok   bool
}{
	{"1s", time.Second, true},
	{"0s", 0, true},
	{"-0s", 0, true},
	{"-100.700s", -100*time.Second - 700*time.Millisecond, true},
	{".050s", 50 * time.Millisecond, true},
	{"-.001s", -time.Millisecond, true},
	{"-0.200s", -200 * time.Millisecond, true},
	{"5.s", 5 * time.Second, true},
	{"007s", 7 * time.Second, true},
	{"0.000000001s", 1, true},
	{"9223372036s", 9223372036 * time.Second, true},
	{"9223372036.854775806s", math.MaxInt64 - 1, true},
	{"9223372036.854775807s", math.MaxInt64, true},
	{"9223372036.854775808s", math.MaxInt64, true},
	{"9223372037s", math.MaxInt64, true},
	{"315576000000s", math.MaxInt64, true},
	{"315576000000.999999999s", math.MaxInt64, true},
	{"-9223372036s", -9223372036 * time.Second, true},
	{"-9223372036.854775807s", math.MinInt64 + 1, true},
	{"-9223372036.854775808s", math.MinInt64, true},
	{"-9223372036.854775809s", math.MinInt64, true},
	{"-9223372037s", math.MinInt64, true},
	{"-315576000000s", math.MinInt64, true},
	{"+1s", time.Second, true}, // a sign within the number
	{"--1s", time.Second, true},
	{"-+1s", -time.Second, true},
	{"1.+5s", time.Second + 50*time.Millisecond, true}, // it counts as a digit
	{"1.-5s", time.Second - 50*time.Millisecond, true},
	{"--9223372036854775808s", math.MinInt64, true}, // its negative is itself
	{"--999999999999s", math.MaxInt64, true},        // not out of range
	{"-1.-5s", -time.Second + 50*time.Millisecond, true},

	{text: ""}, {text: "s"}, {text: ".s"}, {text: "-s"}, {text: "-.s"}, {text: "+s"}, {text: "1.-s"},
	{text: "1"}, {text: "5m"}, {text: "1S"}, {text: "1s "}, {text: " 1s"}, {text: "1 s"}, {text: "1ss"},
	{text: "100ms"}, {text: "1m1s"}, {text: "1e3s"}, {text: "1_0s"}, {text: "0x1s"}, {text: "infs"}, {text: "1,5s"},
	{text: "5.3.2s"}, {text: "x.3s"}, {text: "3.xs"}, {text: "3.1234567890s"},
	{text: "315576000001s"}, {text: "-315576000001s"}, {text: "9223372036854775808s"}, {text: "١s"},
}

func TestDurations(t *testing.T) {
	for _, tt := range durations {
		got, ok := parseDuration(tt.text)
		if got != tt.want || ok != tt.ok {
			t.Errorf("parseDuration(%q) = %d, %v; want %d, %v", tt.text, got, ok, tt.want, tt.ok)
		}
		theirs, err := grpcTimeout(ofFoo(`"timeout": "`+tt.text+`"`), "/foo/")
		if theirs != tt.want || (err == nil) != tt.ok {
			t.Errorf("grpc-go reads %q as %d, %v; want %d, %v", tt.text, theirs, err, tt.want, tt.ok)
		}
	}
}

// The entry that applies to a method is the one that grpc-go applies: each has a timeout of its own.
func TestOf(t *testing.T) {
	const text = `{"methodConfig": [
		{"name": [{}], "timeout": "1s"},
		{"name": [{"service": "a"}, {"service": "b", "method": "M"}], "timeout": "2s"},
		{"name": [{"service": "a", "method": "M"}], "timeout": "3s"},
		{"timeout": "4s"},
		{"name": [{"service": "p.c"}, {"service": "x/y"}, {"service": "x", "method": "y/z"}], "timeout": "5s"}]}`
	config, err := Parse(text)
	if err != nil {
		t.Fatal(err)
	}
	withoutDefault, err := Parse(strings.Replace(text, "[{}]", "[]", 1))
	if err != nil {
		t.Fatal(err)
	}
	cc := channelWith(t, text)
	for method, want := range map[string]string{
		"/a/M": "methodConfig[2]", "/a/N": "methodConfig[1]", "/a/": "methodConfig[1]", "/b/M": "methodConfig[1]",
		"/p.c/M": "methodConfig[4]", "/x/y/z": "methodConfig[4]", "/x/y/w": "methodConfig[4]",
		"/b/N": "methodConfig[0]", "/c/M": "methodConfig[0]", "/A/M": "methodConfig[0]", "/a/M/": "methodConfig[0]",
		"": "methodConfig[0]", "/": "methodConfig[0]", "a/M": "methodConfig[0]", "/a": "methodConfig[0]",
	} {
		got := config.Of(method)
		if got == nil || got.Path != want {
			t.Errorf("Of(%q) = %+v, want %s", method, got, want)
		}
		if strings.Contains(method, "/") { // others crash grpc-go
			seconds := time.Duration(strings.Index("01234", want[len("methodConfig["):len(want)-1])+1) * time.Second
			if d := cc.GetMethodConfig(method).Timeout; d == nil || *d != seconds {
				t.Errorf("grpc-go's timeout for %q is %v, want %v, that of %s", method, d, seconds, want)
			}
		}
		got = withoutDefault.Of(method)
		if want == "methodConfig[0]" && got != nil || want != "methodConfig[0]" && (got == nil || got.Path != want) {
			t.Errorf("Of(%q) = %+v without a default, want %s unless that is the default", method, got, want)
		}
	}
}

// channelWith returns a channel that has applied the service config.
func channelWith(t *testing.T, text string) *grpc.ClientConn {
	t.Helper()
	r := manual.NewBuilderWithScheme("of")
	r.InitialState(resolver.State{Endpoints: []resolver.Endpoint{{Addresses: []resolver.Address{{Addr: "127.0.0.1:1"}}}}})
	cc, err := grpc.NewClient("of:///", grpc.WithResolvers(r), grpc.WithDefaultServiceConfig(text),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cc.Close() })
	cc.Connect()
	for cc.GetMethodConfig("/none/none").Timeout == nil {
		if !cc.WaitForStateChange(t.Context(), cc.GetState()) {
			t.Fatal("the channel did not apply the service config")
		}
	}
	return cc
}
