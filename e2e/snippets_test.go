//go:build e2e

package e2e

import (
	"fmt"
	"go/ast"
	"go/doc/comment"
	"go/parser"
	"go/token"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// A snippet is a block of Go code on a page.
type snippet struct {
	place string // page and line
	code  string
}

// packages are those that snippets may use, by the names that they use.
var packages = map[string]string{
	"attemptspan":   "github.com/grpcretry/grpcretry/attemptspan",
	"balancer":      "github.com/grpcretry/grpcretry/balancer",
	"codes":         "google.golang.org/grpc/codes",
	"context":       "context",
	"debug":         "github.com/grpcretry/grpcretry/debug",
	"descriptorpb":  "google.golang.org/protobuf/types/descriptorpb",
	"errors":        "errors",
	"grpc":          "google.golang.org/grpc",
	"grpcretry":     "github.com/grpcretry/grpcretry",
	"grpcretrytest": "github.com/grpcretry/grpcretry/grpcretrytest",
	"http":          "net/http",
	"httpretry":     "github.com/grpcretry/grpcretry/httpretry",
	"log":           "log",
	"otelgrpc":      "go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc",
	"otelhttp":      "go.opentelemetry.io/contrib/instrumentation/net/http/otelhttp",
	"slog":          "log/slog",
	"status":        "google.golang.org/grpc/status",
	"synctest":      "testing/synctest",
	"testing":       "testing",
	"time":          "time",
	"tracesdk":      "go.opentelemetry.io/otel/sdk/trace",
}

// The Go code of the README, of the package's documentation and of the pages in docs builds,
// passes vet and runs. What it dials is a real server; see testdata/snippets. Whole files are only built and vetted.
func TestSnippets(t *testing.T) {
	snippets := docSnippets(t, "../doc.go")
	pages, err := filepath.Glob("../docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	// The module reconcile checks the page whose code uses it, because that needs Kubernetes' packages.
	pages = slices.DeleteFunc(pages, func(page string) bool { return page == "../docs/reconcile.md" })
	for _, page := range append([]string{"../README.md"}, pages...) {
		snippets = append(snippets, pageSnippets(t, page)...)
	}
	if len(snippets) < 8 {
		t.Fatalf("found %d snippets, want more: %v", len(snippets), snippets)
	}
	folder := snippetModule(t, snippets)
	for _, command := range [][]string{{"vet", "./..."}, {"run", "."}} {
		if out, err := goCommand(t, folder, command...); err != nil {
			t.Fatalf("go %v: %v\n%s", command, err, out)
		}
	}
}

// A snippet that cannot work is found out.
func TestBadSnippets(t *testing.T) {
	for _, tt := range []struct{ name, code, want string }{
		{"dials without credentials", "cc, err := grpc.NewClient(target, grpcretry.DialOptions()...)", "no transport security set"},
		{"an option that New rejects", "grpcretry.WithMaxAttempts(0)", "want at least 1"},
		{"a name that does not exist", "grpcretry.NoSuchOption()", "undefined: grpcretry.NoSuchOption"},
		{"a file without its imports", "package shop\n\nvar options = grpcretry.DialOptions()\n", "undefined: grpcretry"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			folder := snippetModule(t, []snippet{{"page.md:1", tt.code}})
			out, err := goCommand(t, folder, "vet", "./...")
			if err == nil {
				out, err = goCommand(t, folder, "run", ".")
			}
			if err == nil || !strings.Contains(out, tt.want) {
				t.Errorf("go vet or run = %v\n%s\nwant %q", err, out, tt.want)
			}
		})
	}
}

// goCommand runs go vet or go run in a module.
func goCommand(t *testing.T, folder string, args ...string) (output string, err error) {
	t.Helper()
	command := exec.CommandContext(t.Context(), "go", args...)
	command.Dir = folder
	command.Env = append(os.Environ(), "GOWORK=off", "GOFLAGS=-buildvcs=false")
	out, err := command.CombinedOutput()
	return string(out), err
}

// pageSnippets returns the blocks of a page that begin with ```go.
func pageSnippets(t *testing.T, page string) []snippet {
	t.Helper()
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	var found []snippet
	inside, number := false, 0
	for line := range strings.Lines(string(text)) {
		number++
		switch {
		case strings.HasPrefix(line, "```go"):
			inside = true
			found = append(found, snippet{place: fmt.Sprintf("%s:%d", page, number)})
		case strings.HasPrefix(line, "```"):
			inside = false
		case inside:
			found[len(found)-1].code += line
		}
	}
	return found
}

// docSnippets returns the blocks of code in a package comment.
func docSnippets(t *testing.T, file string) []snippet {
	t.Helper()
	parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.ParseComments|parser.PackageClauseOnly)
	if err != nil {
		t.Fatal(err)
	}
	var docs comment.Parser
	var found []snippet
	for _, block := range docs.Parse(parsed.Doc.Text()).Content {
		if code, ok := block.(*comment.Code); ok {
			found = append(found, snippet{fmt.Sprintf("%s, block %d", file, len(found)+1), code.Text})
		}
	}
	return found
}

// snippetModule makes a module with the fixture, a function for each snippet and this module's
// dependencies, and returns its folder.
func snippetModule(t *testing.T, snippets []snippet) string {
	t.Helper()
	root, err := filepath.Abs("..")
	if err != nil {
		t.Fatal(err)
	}
	program, err := snippetProgram(snippets)
	if err != nil {
		t.Fatal(err)
	}
	read := func(name string) string {
		text, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		return string(text)
	}
	folder := t.TempDir()
	for name, text := range map[string]string{
		"snippets.go": program,
		"fixture.go":  read("testdata/snippets/fixture.go"),
		"go.mod":      strings.ReplaceAll(read("go.mod"), "=> ../", "=> "+filepath.ToSlash(root)+"/"),
		"go.sum":      read("go.sum"),
	} {
		if err := os.WriteFile(filepath.Join(folder, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for i, s := range snippets {
		if !s.isFile() {
			continue
		}
		file := filepath.Join(folder, fmt.Sprintf("file%d", i), "snippet.go")
		if err := os.Mkdir(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte("//line "+s.place+"\n"+s.code), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return folder
}

// snippetProgram returns a file with the list of snippets as functions.
func snippetProgram(snippets []snippet) (string, error) {
	var functions, imports, all strings.Builder
	for _, s := range snippets {
		if s.isFile() {
			continue
		}
		body, err := s.body()
		if err != nil {
			return "", fmt.Errorf("%s: %w", s.place, err)
		}
		fmt.Fprintf(&functions, "{%q, func() error {\n%s}},\n", s.place, body)
		all.WriteString(s.code)
	}
	for _, name := range slices.Sorted(maps.Keys(packages)) {
		if regexp.MustCompile(`\b` + name + `\.`).MatchString(all.String()) {
			fmt.Fprintf(&imports, "%s %q\n", name, packages[name])
		}
	}
	return fmt.Sprintf("package main\n\nimport (\n%s)\n\nvar snippets = []snippet{\n%s}\n", &imports, &functions), nil
}

// isFile reports whether the snippet is a Go file of its own, which a reader copies as it is.
func (s snippet) isFile() bool { return strings.HasPrefix(s.code, "package ") }

// body returns the body of a function that runs the snippet and tries its value, if it is an
// expression, or else the variables that it declares. Of a snippet that only imports a package,
// the path is compared with the one that the other snippets use.
func (s snippet) body() (string, error) {
	if path, ok := strings.CutPrefix(strings.TrimSpace(s.code), "import "); ok {
		if path = strings.Trim(path, `"`); !slices.Contains(slices.Collect(maps.Values(packages)), path) {
			return "", fmt.Errorf("imports %s, which no snippet uses", path)
		}
		return "return nil\n", nil
	}
	isTest := strings.HasPrefix(s.code, "synctest.Test(") // an expression without a value
	if _, err := parser.ParseExpr(s.code); err == nil && !isTest {
		return "return try(" + strings.TrimSpace(s.code) + ")\n", nil
	}
	names, err := declared(s.code)
	if err != nil {
		return "", err
	}
	body := strings.TrimSpace(s.code) + "\n"
	for _, name := range names {
		body += fmt.Sprintf("if err := try(%s); err != nil {\nreturn err\n}\n", name)
	}
	return body + "return nil\n", nil
}

// declared returns the variables that statements declare outside of blocks. err comes first,
// because the others are not valid if it is not nil.
func declared(statements string) ([]string, error) {
	file, err := parser.ParseFile(token.NewFileSet(), "", "package p\nfunc _() {\n"+statements+"\n}", 0)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, statement := range file.Decls[0].(*ast.FuncDecl).Body.List {
		assign, ok := statement.(*ast.AssignStmt)
		if !ok || assign.Tok != token.DEFINE {
			continue
		}
		for _, left := range assign.Lhs {
			if name := left.(*ast.Ident).Name; !slices.Contains(names, name) {
				names = append(names, name)
			}
		}
	}
	if i := slices.Index(names, "err"); i > 0 {
		names = slices.Insert(slices.Delete(names, i, i+1), 0, "err")
	}
	return names, nil
}
