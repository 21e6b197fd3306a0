package grpcretry

import (
	"log/slog"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc"
)

// The options themselves are tested in bench/, whose module requires go-grpc-middleware.

func TestPathsOfTheMiddlewaresRetryPackage(t *testing.T) {
	for path, want := range map[string]bool{
		"github.com/grpc-ecosystem/go-grpc-middleware/retry":                   true, // version 1
		"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/retry":   true,
		"github.com/grpc-ecosystem/go-grpc-middleware/v3/interceptors/retry":   true,
		"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/logging": false,
		"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/noretry": false,
		"github.com/other/go-grpc-middleware/retry":                            false,
		"google.golang.org/grpc": false,
		"":                       false,
	} {
		if got := isMiddlewareRetry(path); got != want {
			t.Errorf("isMiddlewareRetry(%q) = %v, want %v", path, got, want)
		}
	}
}

func TestOptionsOfOthersAreNotLeftovers(t *testing.T) {
	for _, opt := range []grpc.CallOption{
		nil, grpc.EmptyCallOption{}, grpc.WaitForReady(true), anOption{}, &anOption{}, struct{ grpc.EmptyCallOption }{},
	} {
		if isLeftover(opt) {
			t.Errorf("%T is recognized as a leftover option", opt)
		}
	}
}

type anOption struct{ grpc.EmptyCallOption }

// A warning that a call causes is logged and listed once, beside those about options, and an Update
// keeps it.
func TestWarningsFoundInCallsOutliveUpdates(t *testing.T) {
	logs := &logRecorder{}
	r, err := New(WithLogger(slog.New(logs)), WithAttemptTimeout(time.Microsecond))
	if err != nil {
		t.Fatal(err)
	}
	wantLines(t, logs, "WARN…WithAttemptTimeout")
	r.warnOfLeftover("/pkg.Service/Method")
	r.warnOfLeftover("/pkg.Service/Other")
	wantLines(t, logs, "WARN…a call of /pkg.Service/Method has an option of go-grpc-middleware")
	two := r.Warnings()
	if len(two) != 2 {
		t.Fatalf("Warnings = %q, want two", two)
	}
	if err := r.Update(WithAttemptTimeout(time.Second)); err != nil {
		t.Fatal(err)
	}
	if got := r.Warnings(); !slices.Equal(got, two[1:]) {
		t.Errorf("after an Update, Warnings = %q, want %q", got, two[1:])
	}
	wantLines(t, logs)
}
