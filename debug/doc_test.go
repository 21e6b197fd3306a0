package debug

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"strings"
	"testing"
)

// The JSON is an interface: each of its fields says what it means.
func TestEveryFieldIsDocumented(t *testing.T) {
	entries, err := os.ReadDir(".")
	if err != nil {
		t.Fatal(err)
	}
	fields := 0
	for _, entry := range entries {
		if name := entry.Name(); !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go") {
			continue
		}
		file, err := parser.ParseFile(token.NewFileSet(), entry.Name(), nil, parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(file, func(n ast.Node) bool {
			spec, ok := n.(*ast.TypeSpec)
			if !ok || !spec.Name.IsExported() {
				return true
			}
			if s, ok := spec.Type.(*ast.StructType); ok {
				for _, f := range s.Fields.List {
					if len(f.Names) > 0 && f.Names[0].IsExported() {
						fields++
						if f.Comment == nil && f.Doc == nil {
							t.Errorf("%s.%s has no comment", spec.Name, f.Names[0])
						}
					}
				}
			}
			return true
		})
	}
	if fields < 50 {
		t.Errorf("%d fields were looked at", fields)
	}
}
