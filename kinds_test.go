package grpcretry

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// Whoever adds a budget or a backoff finds the places that know all kinds by this test.
func TestNewKindsAreKnown(t *testing.T) {
	source := ""
	files, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		source += string(text)
	}
	for _, tt := range []struct {
		method, place string
		others        []string // kinds that need not be known there
	}{
		{`Withdraw\(.*\) bool`, "rankOfBudget", []string{"unlimited", "allBudgets", "perTarget"}}, // they hold no tokens
		{`Delay\(.*\) time.Duration`, "isOurs", nil},
	} {
		_, body, _ := strings.Cut(source, "\nfunc "+tt.place+"(")
		body, _, _ = strings.Cut(body, "\n}\n")
		kinds := regexp.MustCompile(`\nfunc \((?:\w+ )?\*?(\w+)\) `+tt.method).FindAllStringSubmatch(source, -1)
		if len(kinds) < 3 {
			t.Errorf("%d types have %s, want at least 3", len(kinds), tt.method)
		}
		for _, kind := range kinds {
			if name := kind[1]; !slices.Contains(tt.others, name) && !regexp.MustCompile(`\b`+name+`\b`).MatchString(body) {
				t.Errorf("%s does not know %s", tt.place, name)
			}
		}
	}
}
