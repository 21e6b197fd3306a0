package grpcretry

import (
	"context"
	"fmt"
	"go/ast"
	"go/parser"
	"go/printer"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// elapsed lets d pass and returns true, or returns false as soon as done is closed. See
// [afterFunc] for why a wait that is already over needs no timer.
func elapsed(d time.Duration, done <-chan struct{}) bool {
	if d <= 0 {
		return true
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-done:
		return false
	}
}

// Many hedged calls without a delay share a bubble. With timers of zero duration the race detector
// crashed in every second run.
func TestHedgesWithoutDelayShareABubble(t *testing.T) {
	bubble(t, func(t *testing.T) {
		hedge := UnaryClientInterceptor(WithBudget(Unlimited), WithPatience(0),
			WithPolicy(Policy{MaxAttempts: 3, Hedging: &Hedging{Delay: HedgeAfter(0), AllMethodsAreSafe: true, Budget: Unlimited}}))
		var attempts atomic.Int64
		fail := func(context.Context, string, any, any, *grpc.ClientConn, ...grpc.CallOption) error {
			attempts.Add(1)
			return status.Error(codes.Unavailable, "down")
		}
		const calls = 1000
		var all sync.WaitGroup
		for range calls {
			all.Go(func() {
				_ = hedge(t.Context(), "/a.B/C", new(echov1.EchoRequest), new(echov1.EchoResponse), nil, fail)
			})
		}
		all.Wait()
		if got := attempts.Load(); got != 3*calls {
			t.Errorf("%d attempts, want %d", got, 3*calls)
		}
	})
}

// Every timer with a duration that is not a positive constant is guarded: the function that
// creates or resets it compares the duration with 0, or is listed in positive. That holds in
// all packages that have tests in bubbles, for the reason given at [afterFunc]. The callbacks of
// tests, which run at times from tables, are left out.
func TestTimersHaveSomethingToWaitFor(t *testing.T) {
	for _, folder := range foldersWithBubbles(t) {
		for _, timer := range unguardedTimers(t, folder) {
			if !positive[timer] {
				t.Errorf("%s may be 0 or less", timer)
			}
		}
	}
}

// positive are durations that are above 0 for a reason outside the function that uses them.
var positive = map[string]bool{
	"stream_faults_test.go, wait: c.stall":           true, // drawn above 0
	"examples/demo/server.go, goAway: away":          true, // from a table
	"grpcretrytest/server.go, Down: s.script.settle": true, // set to one of two constants
	"e2e/browser/shop_test.go, answer: d":            true, // constants
}

// foldersWithBubbles are the folders of the repository whose Go files use testing/synctest.
func foldersWithBubbles(t *testing.T) (folders []string) {
	t.Helper()
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() && len(path) > 1 && path[0] == '.' {
			return fs.SkipDir // .git, .bin
		}
		if err != nil || d.IsDir() || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		text, err := os.ReadFile(path)
		if folder := filepath.Dir(path); strings.Contains(string(text), `"testing/synctest"`) && !slices.Contains(folders, folder) {
			folders = append(folders, folder)
		}
		return err
	})
	if err != nil || len(folders) < 5 {
		t.Fatalf("found bubbles in %v: %v", folders, err)
	}
	return folders
}

// unguardedTimers lists the timers of a folder whose duration may be 0 or less.
func unguardedTimers(t *testing.T, folder string) (found []string) {
	t.Helper()
	files, constants := parseFolder(t, folder)
	for name, file := range files {
		for _, decl := range file.Decls {
			f, ok := decl.(*ast.FuncDecl)
			if !ok || f.Body == nil {
				continue
			}
			ast.Inspect(f.Body, func(n ast.Node) bool {
				d := durationOf(n, strings.HasSuffix(name, "_test.go"))
				if d != nil && !isConstant(d, constants) && !isAboveZero(source(d), source(f.Body)) {
					found = append(found, fmt.Sprintf("%s, %s: %s", filepath.Join(folder, name), f.Name.Name, source(d)))
				}
				return true
			})
		}
	}
	slices.Sort(found)
	return found
}

func parseFolder(t *testing.T, folder string) (files map[string]*ast.File, constants map[string]bool) {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(folder, "*.go"))
	if err != nil {
		t.Fatal(err)
	}
	files, constants = map[string]*ast.File{}, map[string]bool{}
	for _, name := range names {
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		files[filepath.Base(name)] = file
		ast.Inspect(file, func(n ast.Node) bool {
			if decl, ok := n.(*ast.GenDecl); ok && decl.Tok == token.CONST {
				for _, spec := range decl.Specs {
					for _, name := range spec.(*ast.ValueSpec).Names {
						constants[name.Name] = true
					}
				}
			}
			return true
		})
	}
	return files, constants
}

// durationOf returns the duration of a new timer, or of one that is reset; nil for other nodes, and
// for a test's AfterFunc unless its time is drawn.
func durationOf(n ast.Node, inTest bool) ast.Expr {
	call, ok := n.(*ast.CallExpr)
	if !ok || len(call.Args) == 0 {
		return nil
	}
	f, ok := call.Fun.(*ast.SelectorExpr)
	if !ok {
		return nil
	}
	from, _ := f.X.(*ast.Ident)
	creates := from != nil && from.Name == "time" &&
		slices.Contains([]string{"After", "AfterFunc", "NewTimer", "NewTicker", "Tick"}, f.Sel.Name)
	resets := f.Sel.Name == "Reset" && len(call.Args) == 1 && (from == nil || from.Name != "proto")
	if !creates && !resets {
		return nil
	}
	if inTest && f.Sel.Name == "AfterFunc" && !strings.Contains(source(call.Args[0]), "IntN(") {
		return nil
	}
	return call.Args[0]
}

// isConstant reports whether an expression has only literals, the units of package time and
// constants of the folder.
func isConstant(e ast.Expr, constants map[string]bool) bool {
	switch e := e.(type) {
	case *ast.BasicLit:
		return true
	case *ast.Ident:
		return constants[e.Name]
	case *ast.SelectorExpr:
		from, ok := e.X.(*ast.Ident)
		return ok && from.Name == "time"
	case *ast.ParenExpr:
		return isConstant(e.X, constants)
	case *ast.BinaryExpr:
		return isConstant(e.X, constants) && isConstant(e.Y, constants)
	}
	return false
}

// isAboveZero reports whether a function compares a duration with 0, or adds to what may be 0.
func isAboveZero(duration, function string) bool {
	return strings.Contains(function, duration+" > 0") || strings.Contains(function, duration+" <= 0") ||
		strings.Contains(duration, "(1+")
}

func source(n ast.Node) string {
	var b strings.Builder
	_ = printer.Fprint(&b, token.NewFileSet(), n) // a Builder does not fail
	return b.String()
}
