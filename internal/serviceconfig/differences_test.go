package serviceconfig

import (
	"bytes"
	"fmt"
	"os"
	"reflect"
	"regexp"
	"strings"
	"testing"
)

// differences lists every way in which this package reads a service config differently from
// grpc-go. docs/service-config.md has the same table.
var differences = []struct {
	what, grpc, here, why string
	text                  string // an example
	grpcRejects           bool
	rejected, note        string // with which error or note it is read here
}{
	{
		"`hedgingPolicy`",
		"ignored, like any unknown key",
		"read, validated as A6 specifies, and rejected next to a `retryPolicy`",
		"grpc-go has no hedging",
		`{"methodConfig": [{"name": [{}], "hedgingPolicy": {"maxAttempts": 1}}]}`,
		false, "methodConfig[0].hedgingPolicy.maxAttempts: 1, want", "",
	},
	{
		"status codes in lower or mixed case",
		"rejected",
		"accepted",
		"A6 allows any case",
		`{"methodConfig": [{"name": [{}], ` +
			`"retryPolicy": {"maxAttempts": 2, "initialBackoff": "1s", "maxBackoff": "1s", ` +
			`"backoffMultiplier": 1, "retryableStatusCodes": ["Unavailable"]}}]}`,
		true, "", "",
	},
	{
		"`retryThrottling` without `methodConfig`",
		"accepted with any numbers",
		"validated",
		"A6 validates it always; a throttle of 0 or 5,000 tokens does not do what its author meant",
		`{"retryThrottling": {"maxTokens": 5000, "tokenRatio": 0.1}}`,
		false, "retryThrottling.maxTokens: 5000, want", "",
	},
	{
		"`maxTokens` or `tokenRatio` below 0.001",
		"accepted",
		"rejected",
		"A6 ignores decimals beyond the third, which leaves 0, and rejects 0",
		`{"methodConfig": [], "retryThrottling": {"maxTokens": 10, "tokenRatio": 0.0009}}`,
		false, "retryThrottling.tokenRatio: 0.0009, want at least 0.001", "",
	},
	{
		"further decimals of `maxTokens` and `tokenRatio`",
		"counted",
		"ignored beyond the third, with a note",
		"A6 for `tokenRatio`; `NewThrottle` counts thousandths of a token",
		`{"methodConfig": [], "retryThrottling": {"maxTokens": 10, "tokenRatio": 0.5466}}`,
		false, "", "retryThrottling.tokenRatio: 0.5466 counts as 0.546",
	},
	{
		"the contents of `loadBalancingConfig`",
		"rejected if no policy in the list is linked into the program, or if that policy rejects its part",
		"not looked at",
		"it is the channel's, and a program such as `herd` does not link the channel's policies",
		`{"loadBalancingConfig": [{"not_linked": {}}]}`,
		true, "", "",
	},
	{
		"OK among the status codes (`\"OK\"`, 0 or `null`)",
		"accepted, without effect",
		"dropped, with a note; if it was the only one, nothing is retried",
		"the same behaviour",
		`{"methodConfig": [{"name": [{}], ` +
			`"retryPolicy": {"maxAttempts": 2, "initialBackoff": "1s", "maxBackoff": "1s", ` +
			`"backoffMultiplier": 1, "retryableStatusCodes": ["OK"]}}]}`,
		false, "", "methodConfig[0].retryPolicy.retryableStatusCodes[0]: OK is ignored",
	},
	{
		"`maxAttempts` above 5",
		"counts as 5, or as the number in `grpc.WithMaxCallAttempts`",
		"counts as 5, with a note",
		"A6's limit; a dial option of gRPC is not visible here, and `WithMaxAttempts` has no such limit",
		`{"methodConfig": [{"name": [{}], ` +
			`"retryPolicy": {"maxAttempts": 6, "initialBackoff": "1s", "maxBackoff": "1s", "backoffMultiplier": 1, "retryableStatusCodes": [14]}}]}`,
		false, "", "methodConfig[0].retryPolicy.maxAttempts: 6 counts as 5",
	},
}

func TestDifferencesToGRPC(t *testing.T) {
	for _, d := range differences {
		t.Run(d.what, func(t *testing.T) {
			if _, err := grpcRead(d.text); (err != nil) != d.grpcRejects {
				t.Errorf("grpc-go reads %s with %v, want an error: %v", d.text, err, d.grpcRejects)
			}
			c, err := Parse(d.text)
			if d.rejected != "" {
				if err == nil || !strings.HasPrefix(err.Error(), d.rejected) {
					t.Errorf("Parse(%s) = %v, want %s…", d.text, err, d.rejected)
				}
				return
			}
			if err != nil || d.note == "" && len(c.Notes) != 0 || d.note != "" && (len(c.Notes) != 1 || !strings.HasPrefix(c.Notes[0], d.note)) {
				t.Errorf("Parse(%s) = %+v, %v; want the note %q alone", d.text, c, err, d.note)
			}
			if wrong := disagreement(d.text); wrong != "" {
				t.Errorf("disagreement does not know this difference: %s", wrong)
			}
		})
	}
}

func TestDifferencesAreDocumented(t *testing.T) {
	page, err := os.ReadFile("../../docs/service-config.md")
	if err != nil {
		t.Fatal(err)
	}
	rest, found := strings.CutPrefix(string(page[max(0, bytes.Index(page, []byte("| what |"))):]),
		"| what | grpc-go | here | why |\n|---|---|---|---|\n")
	for _, d := range differences {
		row := fmt.Sprintf("| %s | %s | %s | %s |\n", d.what, d.grpc, d.here, d.why)
		next, ok := strings.CutPrefix(rest, row)
		if !ok || !found {
			t.Fatalf("docs/service-config.md lacks, in this place, the row\n%s", row)
		}
		rest = next
	}
	if strings.HasPrefix(rest, "|") {
		t.Errorf("docs/service-config.md has a row that is not in differences: %.100s", rest)
	}
}

// The example at the top of the page has nothing to note, and every part of it is read.
func TestDocumentedExample(t *testing.T) {
	page, err := os.ReadFile("../../docs/service-config.md")
	if err != nil {
		t.Fatal(err)
	}
	_, example, _ := strings.Cut(string(page), "```json\n")
	example, _, _ = strings.Cut(example, "```")
	c, err := Parse(example)
	if err != nil || len(c.Notes) != 0 || len(c.Methods) != 2 || c.Methods[0].Retry == nil || c.Methods[1].Hedging == nil ||
		c.Throttling == nil {
		t.Errorf("Parse(%s) = %+v, %v; want two policies, throttling, and no notes", example, c, err)
	}
}

// An error begins with a place in the text, and so does a note.
var (
	somewhere = `the service config|(loadBalancingPolicy|methodConfig|retryThrottling|` +
		`healthCheckConfig|loadBalancingConfig)(\.[a-zA-Z]+|\[\d+\])*`
	errorHas = regexp.MustCompile(`^(line \d+, column \d+: not JSON|the service config is empty|` + somewhere + `): `)
	noteHas  = regexp.MustCompile(`^(` + somewhere + `): `)
)

// disagreement returns what differs between the two readings of a text other than by the list of
// differences, and "" if nothing does.
func disagreement(text string) string {
	ours, err := Parse(text)
	if err != nil {
		if !errorHas.MatchString(err.Error()) && text != "" {
			return fmt.Sprintf("the error does not begin with a place: %v", err)
		}
		if got, grpcErr := grpcRead(text); grpcErr == nil && !rejectedForAReason(text, err) {
			return fmt.Sprintf("rejected with %v, but grpc-go reads %s", err, show(got))
		}
		return ""
	}
	for _, n := range ours.Notes {
		if !noteHas.MatchString(n) {
			return fmt.Sprintf("the note does not begin with a place: %s", n)
		}
	}
	theirs, grpcErr := grpcRead(text)
	if grpcErr != nil {
		theirs, err = grpcRead(withUpperCaseCodes(withoutBalancing(text)))
	}
	if err != nil {
		return fmt.Sprintf("read as %s, but grpc-go rejects it: %v", show(read(ours)), grpcErr)
	}
	if got := read(ours); !reflect.DeepEqual(got, theirs) {
		return fmt.Sprintf("read as %s, but by grpc-go as %s", show(got), show(theirs))
	}
	return ""
}

// rejectedForAReason tells whether an error comes from a difference on the list, for a text that
// grpc-go accepts.
func rejectedForAReason(text string, err error) bool {
	switch path := err.Error(); {
	case strings.Contains(path, "hedgingPolicy"):
		return disagreement(withoutHedging(text)) == ""
	case !strings.HasPrefix(path, "retryThrottling."):
		return false
	case strings.Contains(path, "want at least 0.001"):
		return true
	default: // grpc-go would agree if there were a methodConfig
		_, err := grpcRead(edit(text, func(key, value string) string { return member(key, value) }, `"methodConfig": []`))
		return err != nil
	}
}

func withoutBalancing(text string) string { return without(text, "loadBalancingConfig") }

func withoutHedging(text string) string {
	return edit(text, func(key, value string) string {
		if !strings.EqualFold(key, "methodConfig") || value[0] != '[' {
			return member(key, value)
		}
		var entries []string
		for e := range elements(value) {
			entries = append(entries, without(e, "hedgingPolicy"))
		}
		return member(key, "["+strings.Join(entries, ",")+"]")
	})
}

// inAnyCase finds the names of status codes within an array. It also finds keys, whose case does
// not matter.
var inAnyCase = regexp.MustCompile(`(?i)[\[,]\s*"[a-z_]+"`)

func withUpperCaseCodes(text string) string {
	return inAnyCase.ReplaceAllStringFunc(text, strings.ToUpper)
}

func show(r reading) string {
	var b strings.Builder
	for name, p := range r.policies {
		fmt.Fprintf(&b, "%q: %+v, ", name, p)
	}
	fmt.Fprintf(&b, "throttling %+v", r.throttling)
	return b.String()
}
