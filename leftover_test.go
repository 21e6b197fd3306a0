package grpcretry

import (
	"log/slog"
	"slices"
	"testing"
	"time"
)

// The options themselves are tested in bench/, whose module requires go-grpc-middleware.

// A warning that a call causes is logged and listed once, beside those about options, and an Update
// keeps it.
func TestWarningsFoundInCallsOutliveUpdates(t *testing.T) {
	logs := &logRecorder{}
	r := retrierOf(t, WithLogger(slog.New(logs)), WithAttemptTimeout(time.Microsecond))
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
