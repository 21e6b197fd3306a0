package main

import (
	"encoding/xml"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/pprof/profile"
)

// stack is a sample with these functions, the innermost first.
func stack(value int64, functions ...string) *profile.Sample {
	s := &profile.Sample{Value: []int64{value, value * 10_000_000}}
	for _, f := range functions {
		s.Location = append(s.Location, &profile.Location{Line: []profile.Line{{Function: &profile.Function{Name: f}}}})
	}
	return s
}

func TestBreakDown(t *testing.T) {
	const unary = library + "(*Retrier).unary"
	b := breakDown(&profile.Profile{Sample: []*profile.Sample{
		stack(3, "runtime.nextFreeFast", "runtime.mallocgcSmallScanNoHeader", "runtime.newobject", unary),
		stack(2, "runtime.scanobject", "runtime.gcBgMarkWorker"),
		stack(2, "time.now", "time.Now", library+"(*reporter).watches", unary),
		stack(1, library+"(*Retrier).unary-fm", unary),
		stack(1, "runtime.mapaccess2_faststr", library+"(*methodPolicies).of", library+"(*Retrier).plain", unary),
		stack(1, unary),
		stack(100, "runtime.futex", "runtime.findRunnable"),
	}}, 1_000_000)
	if b.total != 100 {
		t.Errorf("a call takes %v, want 100ns: ten samples of 10 ms for a million of them", b.total)
	}
	if b.samples != 10 {
		t.Errorf("%d samples, want 10: waiting for work is no part of a call", b.samples)
	}
	for name, want := range map[string]time.Duration{
		"allocate the attempt, and collect it":           50,
		"read the clock":                                 20,
		"read the call options, find the policy":         10,
		"the rest: the loop, and to fill in the attempt": 20,
		"report the success to the budget":               0,
	} {
		i := slices.IndexFunc(b.parts, func(p part) bool { return p.name == name })
		if i < 0 || b.parts[i].measured != want {
			t.Errorf("%q is part %d of %v, want it with %v", name, i, b.parts, want)
		}
	}
}

// TestFunctionsExist finds a function that was renamed: its time would silently go to the
// rest.
func TestFunctionsExist(t *testing.T) {
	exist := declared(t, "../..")
	for _, p := range path() {
		for _, f := range p.functions {
			if !strings.HasPrefix(f, "runtime.") && !strings.HasPrefix(f, "time.") && f != "gcWriteBarrier" && !exist[f] {
				t.Errorf("%q of %q is no function of the library", f, p.name)
			}
		}
	}
}

// declared are the functions of the package in a folder, as profiles name them.
func declared(t *testing.T, folder string) map[string]bool {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(folder, "*.go"))
	if err != nil || len(files) == 0 {
		t.Fatalf("no Go files in %s: %v", folder, err)
	}
	found := map[string]bool{}
	for _, name := range files {
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		for _, d := range file.Decls {
			if f, ok := d.(*ast.FuncDecl); ok {
				found[receiver(f)+f.Name.Name] = true
			}
		}
	}
	return found
}

func receiver(f *ast.FuncDecl) string {
	if f.Recv == nil {
		return ""
	}
	switch of := f.Recv.List[0].Type.(type) {
	case *ast.StarExpr:
		switch x := of.X.(type) {
		case *ast.IndexExpr: // of one type parameter
			return "(*" + x.X.(*ast.Ident).Name + "[...])."
		case *ast.IndexListExpr:
			return "(*" + x.X.(*ast.Ident).Name + "[...])."
		}
		return "(*" + of.X.(*ast.Ident).Name + ")."
	case *ast.Ident:
		return of.Name + "."
	default:
		return "?."
	}
}

func TestRun(t *testing.T) {
	picture := filepath.Join(t.TempDir(), "path.svg")
	var out strings.Builder
	if err := run([]string{"-for", "200ms", "-picture", picture}, &out); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out.String(), "read the clock") {
		t.Errorf("run printed\n%s\nwithout the clock", out.String())
	}
	content, err := os.ReadFile(picture)
	if err != nil {
		t.Fatal(err)
	}
	d := xml.NewDecoder(strings.NewReader(string(content)))
	for {
		if _, err := d.Token(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatalf("the picture is no XML: %v", err)
		}
	}
}

func TestCallsOnly(t *testing.T) {
	var out strings.Builder
	if err := run([]string{"-calls", "10"}, &out); err != nil || out.Len() > 0 {
		t.Errorf("run = %v, printed %q; want nothing", err, out.String())
	}
}
