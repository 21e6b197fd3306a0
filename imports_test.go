package grpcretry

import (
	"go/doc"
	"go/parser"
	"go/token"
	"io/fs"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// An experimental package of grpc-go may change at any time, and then every program that imports this one
// would not compile. Only package balancer imports any, and nothing that this package imports may import that.
func TestNothingExperimentalIsImported(t *testing.T) {
	const own, grpcs = "github.com/grpcretry/grpcretry", "google.golang.org/grpc"
	folder, err := exec.CommandContext(t.Context(), "go", "list", "-m", "-f", "{{.Dir}}", grpcs).Output()
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	var visit func(path string)
	visit = func(path string) {
		if seen[path] {
			return
		}
		seen[path] = true
		below, isOwn := strings.CutPrefix(path, own)
		if isOwn {
			_, files := sources(t, filepath.Join(".", below))
			for _, file := range files {
				for _, one := range file.Imports {
					imported, err := strconv.Unquote(one.Path.Value)
					if err != nil {
						t.Fatal(err)
					}
					visit(imported)
				}
			}
		} else if below, isGRPC := strings.CutPrefix(path, grpcs); isGRPC &&
			isExperimental(t, filepath.Join(strings.TrimSpace(string(folder)), below)) {
			t.Errorf("package %s is imported, and it is experimental", path)
		}
	}
	visit(own)
	if !seen[own+"/internal/tried"] || !seen[grpcs+"/codes"] {
		t.Errorf("the test has seen only %v", seen)
	}
	for _, experimental := range []string{"balancer", "balancer/endpointsharding", "resolver", "serviceconfig"} {
		if !isExperimental(t, filepath.Join(strings.TrimSpace(string(folder)), experimental)) {
			t.Errorf("the test takes %s for stable", experimental)
		}
	}
}

var experimental = regexp.MustCompile(`(?is)# Experimental|APIs\s+in\s+this\s+package\s+are\s+experimental`)

// isExperimental reports whether the comment of the package in a folder says so.
func isExperimental(t *testing.T, folder string) bool {
	t.Helper()
	fileSet := token.NewFileSet()
	noTests := func(f fs.FileInfo) bool { return !strings.HasSuffix(f.Name(), "_test.go") }
	mode := parser.ParseComments | parser.PackageClauseOnly
	parsed, err := parser.ParseDir(fileSet, folder, noTests, mode) //nolint:staticcheck // build tags do not matter
	if err != nil {
		t.Fatal(err)
	}
	for _, one := range parsed {
		if experimental.MatchString(doc.New(one, folder, 0).Doc) {
			return true
		}
	}
	return false
}
