//go:build e2e

package main

import (
	"errors"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// spread is the least time over which waiting calls have to return. Without jitter fifty of
// them take a few milliseconds.
const spread = 20 * time.Millisecond

func TestCallsSurviveARestart(t *testing.T) {
	for _, away := range []time.Duration{100 * time.Millisecond, time.Second, 2500 * time.Millisecond} {
		t.Run(away.String(), func(t *testing.T) {
			t.Parallel()
			s := measureOurs(t, &scenario{replicas: 1, away: away, load: load{calls: 50, deadline: 10 * time.Second}})
			if s.succeeded != s.calls {
				t.Errorf("%d of %d calls succeeded, want all", s.succeeded, s.calls)
			}
			if s.back.over < spread {
				t.Errorf("%d waiting calls returned within %v, want at least %v", s.back.attempts, s.back.over, spread)
			}
		})
	}
}

func TestWaitingCallsDoNotReturnTogether(t *testing.T) {
	s := measureOurs(t, &scenario{replicas: 1, away: time.Second, load: load{calls: 2000, deadline: 10 * time.Second}})
	if s.back.attempts != s.calls || s.back.over < spread {
		t.Errorf("%d of %d calls returned, within %v; want all, over at least %v",
			s.back.attempts, s.calls, s.back.over, spread)
	}
}

func measureOurs(t *testing.T, s *scenario) *summary {
	t.Helper()
	result, err := s.measure(t.Context(), &ours)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%+v", *result)
	return result
}

// TestServerThatNeverReturns is about a call that nothing but the library can end.
func TestServerThatNeverReturns(t *testing.T) {
	t.Parallel()
	const least, most = 9 * time.Second, 13 * time.Second // around the default wait for a connection, 10 s
	tr, err := newTrial(t.Context(), &ours, 1)
	if err != nil {
		t.Fatal(err)
	}
	defer tr.close()
	if err := tr.kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	_, err = tr.calls.client.Echo(t.Context(), &echov1.EchoRequest{Sequence: 1})
	if took := time.Since(start); status.Code(err) != codes.Unavailable || took < least || took > most {
		t.Errorf("Echo = %v after %v, want %v after %v to %v", err, took, codes.Unavailable, least, most)
	}
	if !errors.Is(err, grpcretry.ErrNotConnected) {
		t.Errorf("Echo = %v, want %v", err, grpcretry.ErrNotConnected)
	}
}

// TestRun fills every table, with small numbers; what they say is not judged.
func TestRun(t *testing.T) {
	p := plan{
		absences: []time.Duration{50 * time.Millisecond},
		calls:    2,
		rate:     20,
		before:   100 * time.Millisecond,
		after:    100 * time.Millisecond,
		deadline: 5 * time.Second,
	}
	tables, err := p.run(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	for _, table := range tables {
		if err := table.print(&out); err != nil {
			t.Fatal(err)
		}
	}
	t.Log(out.String())
	for _, c := range clients {
		if got := strings.Count(out.String(), " "+c.name+" "); got != len(tables) {
			t.Errorf("%s has %d rows, want one in each of %d tables", c.name, got, len(tables))
		}
	}
}
