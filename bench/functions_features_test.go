package bench

import (
	"context"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	avast "github.com/avast/retry-go/v5"
	cenkalti "github.com/cenkalti/backoff/v7"
	failsafego "github.com/failsafe-go/failsafe-go"
	"github.com/failsafe-go/failsafe-go/retrypolicy"
	"github.com/failsafe-go/failsafe-go/timeout"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/grpcretry/grpcretry"
)

// The tests here hold the table of features in docs/performance.md to the libraries: a cell starts
// with "no" exactly if the library lacks the feature.

const performancePage = "../docs/performance.md"

// The columns of the table, and what a test needs of each library.
var functionLibraries = []struct {
	title, module string
	alternative   functionAlternative
}{
	{"cenkalti/backoff", "github.com/cenkalti/backoff/v7", cenkaltiBackoff},
	{"sethvargo/go-retry", "github.com/sethvargo/go-retry", sethvargoRetry},
	{"avast/retry-go", "github.com/avast/retry-go/v5", avastRetry},
	{"failsafe-go", "github.com/failsafe-go/failsafe-go", failsafeRetry},
	{"grpcretry", "github.com/grpcretry/grpcretry", oursForFunctions},
}

// Whether a library has something to configure is what its exported names say.
func TestFunctionFeaturesByName(t *testing.T) {
	for feature, names := range map[string]string{
		"a retry budget":                `Budget|Throttle`,
		"a timeout for each attempt":    `Timeout`,
		"waits specified by the server": `RetryAfter|DelayTypeFunc|DelayFunc|MaxServerDelay`,
		"errors that are not retried":   `Permanent|Unrecoverable|AbortOn|RetryableError`,
		"jitter":                        `Jitter|Randomization`,
		"callbacks for retries":         `Notify|OnRetry|WithObserver`,
		"spans and metrics":             `TracerProvider|MeterProvider`,
		"results of any type":           `DoValue|WithData|Operation|GetWithExecution`,
		"hedging":                       `(?i)^hedg`,
	} {
		t.Run(feature, func(t *testing.T) {
			for _, l := range functionLibraries {
				has := slices.ContainsFunc(exportedNames(t, l.module), regexp.MustCompile(names).MatchString)
				if feature == "hedging" && l.module == "github.com/grpcretry/grpcretry" {
					has = false // RPCs are hedged, functions are not
				}
				checkFunctionFeature(t, feature, l.title, has)
			}
		})
	}
}

// The other features are how a library behaves.

func TestFunctionFeatureDeadline(t *testing.T) {
	for _, l := range functionLibraries {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			took, err := waitAnHour(ctx, &l.alternative)
			checkFunctionFeature(t, "no wait beyond the context's deadline", l.title, took == 0)
			if took > time.Second {
				t.Errorf("%s waited %v, beyond the deadline", l.title, took)
			}
			checkFunctionFeature(t, "the last error, if the context ends", l.title, strings.Contains(err.Error(), "maintenance"))
		})
	}
}

func TestFunctionFeatureCancellation(t *testing.T) {
	for _, l := range functionLibraries {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			time.AfterFunc(time.Second, cancel)
			took, _ := waitAnHour(ctx, &l.alternative)
			checkFunctionFeature(t, "a cancelled context ends the wait", l.title, took == time.Second)
		})
	}
}

// waitAnHour makes a call that has an hour to wait after its first attempt.
func waitAnHour(ctx context.Context, a *functionAlternative) (time.Duration, error) {
	start := time.Now()
	err := a.retries(inBackoff)(ctx, func(context.Context) error { return a.unavailable() })()
	return time.Since(start), err
}

func TestFunctionFeatureJitterByDefault(t *testing.T) {
	for _, l := range functionLibraries {
		synctest.Test(t, func(t *testing.T) {
			call := l.alternative.retries(asUsed)(callContext(t), func(context.Context) error { return l.alternative.unavailable() })
			var waits []time.Duration
			for range 2 {
				start := time.Now()
				_ = call()
				waits = append(waits, time.Since(start))
			}
			checkFunctionFeature(t, "jitter by default", l.title, waits[0] != waits[1])
		})
	}
}

// What can be configured works as the table says.

func TestFunctionWaitsSpecifiedByTheServer(t *testing.T) {
	const wait = 7 * time.Second
	failure := status.New(codes.Unavailable, "down for maintenance")
	withDetails, err := failure.WithDetails(&errdetails.RetryInfo{RetryDelay: durationpb.New(wait)})
	if err != nil {
		t.Fatal(err)
	}
	for name, call := range map[string]func(ctx context.Context, f func() error) error{
		"cenkalti": func(ctx context.Context, f func() error) error {
			return second(cenkalti.Retry(ctx, func() (int, error) {
				if err := f(); err != nil {
					return 0, cenkalti.RetryAfter(wait, err)
				}
				return 0, nil
			}))
		},
		"avast": func(ctx context.Context, f func() error) error {
			return avast.New(avast.Context(ctx), avast.DelayType(func(uint, error, avast.DelayContext) time.Duration { return wait })).Do(f)
		},
		"failsafe": func(ctx context.Context, f func() error) error {
			policy := retrypolicy.NewBuilder[any]().WithDelayFunc(func(failsafego.ExecutionAttempt[any]) time.Duration { return wait })
			return failsafego.With(policy.Build()).WithContext(ctx).Run(f)
		},
		"grpcretry": func(ctx context.Context, f func() error) error {
			r, err := grpcretry.New()
			if err != nil {
				return err
			}
			return r.Do(ctx, "/bench/function", func(context.Context) error { return f() })
		},
	} {
		synctest.Test(t, func(t *testing.T) {
			start, made := time.Now(), 0
			err := call(callContext(t), func() error {
				if made++; made == 1 {
					return withDetails.Err()
				}
				return nil
			})
			if took := time.Since(start); err != nil || took < wait || took > wait*12/10 {
				t.Errorf("%s: the call took %v and returned %v, want %v and nil", name, took, err, wait)
			}
		})
	}
}

func TestFunctionAttemptTimeouts(t *testing.T) {
	const limit = time.Second
	for name, call := range map[string]func(ctx context.Context, f func(context.Context) error) error{
		"failsafe": func(ctx context.Context, f func(context.Context) error) error {
			retry := retrypolicy.NewBuilder[any]().WithMaxAttempts(2).Build()
			executor := failsafego.With[any](retry, timeout.New[any](limit)).WithContext(ctx)
			return executor.RunWithExecution(func(e failsafego.Execution[any]) error { return f(e.Context()) })
		},
		"grpcretry": func(ctx context.Context, f func(context.Context) error) error {
			r, err := grpcretry.New(grpcretry.WithBackoff(grpcretry.Constant(0)))
			if err != nil {
				return err
			}
			return r.Do(ctx, "/bench/function", f, grpcretry.WithAttemptTimeout(limit))
		},
	} {
		synctest.Test(t, func(t *testing.T) {
			start, made := time.Now(), 0
			err := call(callContext(t), func(ctx context.Context) error {
				if made++; made == 1 {
					<-ctx.Done()
					return ctx.Err()
				}
				return nil
			})
			if took := time.Since(start); err != nil || made != 2 || took != limit {
				t.Errorf("%s: %v after %d attempts and %v, want nil after 2 and %v", name, err, made, took, limit)
			}
		})
	}
}

// checkFunctionFeature compares a cell of the table with what a test has found.
func checkFunctionFeature(t *testing.T, feature, library string, has bool) {
	t.Helper()
	cell, err := featureCell(feature, library)
	if err != nil {
		t.Error(err)
		return
	}
	if said := !strings.HasPrefix(cell, "no"); said != has {
		t.Errorf("%s says %q of %s and %q, but the library has it: %t", performancePage, cell, library, feature, has)
	}
}

// featureCell returns a cell of the page's table.
func featureCell(feature, library string) (string, error) {
	page, err := os.ReadFile(performancePage)
	if err != nil {
		return "", err
	}
	_, table, _ := strings.Cut(string(page), "<!-- features of functions -->\n")
	table, _, found := strings.Cut(table, "<!-- end of features of functions -->")
	if !found {
		return "", errors.New(performancePage + " has no table of features of functions")
	}
	rows := strings.Split(table, "\n")
	column := slices.IndexFunc(strings.Split(rows[0], "|"), func(head string) bool { return strings.Trim(head, " *") == library })
	for _, row := range rows {
		if cells := strings.Split(row, "|"); column > 0 && len(cells) > column && strings.TrimSpace(cells[1]) == feature {
			return strings.TrimSpace(cells[column]), nil
		}
	}
	return "", errors.New(performancePage + " says nothing of " + library + " and " + feature)
}

// exportedNames returns the names of what a module's packages declare and export, methods included.
func exportedNames(t *testing.T, module string) []string {
	t.Helper()
	folder, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", module).Output()
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, pattern := range []string{"*.go", "*/*.go"} {
		files, err := filepath.Glob(filepath.Join(strings.TrimSpace(string(folder)), pattern))
		if err != nil {
			t.Fatal(err)
		}
		for _, file := range files {
			if !strings.HasSuffix(file, "_test.go") && !strings.Contains(file, "examples") {
				names = append(names, exportedIn(t, file)...)
			}
		}
	}
	return names
}

func exportedIn(t *testing.T, file string) []string {
	t.Helper()
	parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	ast.FileExports(parsed)
	var names []string
	ast.Inspect(parsed, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.BlockStmt:
			return false
		case *ast.FuncDecl:
			names = append(names, n.Name.Name)
		case *ast.TypeSpec:
			names = append(names, n.Name.Name)
		case *ast.ValueSpec:
			for _, name := range n.Names {
				names = append(names, name.Name)
			}
		case *ast.Field:
			for _, name := range n.Names {
				names = append(names, name.Name)
			}
		}
		return true
	})
	return names
}
