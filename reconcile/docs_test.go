package reconcile_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// The Go code of the page is in a test file, which is compiled and run.
func TestPageHasTestedCode(t *testing.T) {
	const page, source = "../docs/reconcile.md", "example_test.go"
	tested := flat(t, source, true)
	blocks := regexp.MustCompile("(?s)```go\n(.*?)```").FindAllStringSubmatch(flat(t, page, false), -1)
	if len(blocks) == 0 {
		t.Errorf("%s has no Go code", page)
	}
	for _, block := range blocks {
		if code := indentation.ReplaceAllString(block[1], ""); !strings.Contains(tested, code) {
			t.Errorf("this code of %s is not in %s:\n%s", page, source, block[1])
		}
	}
}

var indentation = regexp.MustCompile(`(?m)^[\t ]+`)

// flat returns a file's text, without indentation if that is asked for.
func flat(t *testing.T, file string, unindent bool) string {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if unindent {
		return indentation.ReplaceAllString(string(text), "")
	}
	return string(text)
}

// The page's tables have every metric, attribute and reason, by the constant's value.
func TestPageHasNames(t *testing.T) {
	page := flat(t, "../docs/reconcile.md", false)
	file, err := parser.ParseFile(token.NewFileSet(), "names.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	constants := 0
	ast.Inspect(file, func(n ast.Node) bool {
		spec, ok := n.(*ast.ValueSpec)
		if !ok {
			return true
		}
		constants++
		value, err := strconv.Unquote(spec.Values[0].(*ast.BasicLit).Value)
		if err != nil {
			t.Fatal(err)
		}
		if row := "| `" + value + "` |"; !strings.Contains(page, row) {
			t.Errorf("docs/reconcile.md has no row %s for %s", row, spec.Names[0].Name)
		}
		return true
	})
	if constants < 10 {
		t.Errorf("found %d constants, want more", constants)
	}
}
