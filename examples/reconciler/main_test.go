package main

import (
	"context"
	"log/slog"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/test/bufconn"
)

func memory() (net.Listener, string, grpc.DialOption, error) {
	l := bufconn.Listen(1 << 16)
	return l, "memory", grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return l.DialContext(ctx) }), nil
}

// The command as it runs by default, with fewer keys and in virtual time.
func TestRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := setting{keys: 500, workers: 16, perSecond: 200, up: time.Second, outage: 9 * time.Second, limit: 18 * time.Second}
		var out strings.Builder
		services, err := run(t.Context(), s, memory, slog.New(slog.DiscardHandler), &out)
		if err != nil {
			t.Fatal(err)
		}
		ours, theirs := services[0], services[1]
		if got := ours.synced(); got != s.keys {
			t.Errorf("%d keys in sync, want all", got)
		}
		if got := theirs.synced(); got >= s.keys {
			t.Errorf("%d keys of the default rate limiter in sync, want fewer than all", got)
		}
		sum := 0
		for second := 5; second < 10; second++ { // the first attempts are over
			if o, d := ours.received(second), theirs.received(second); o > 8 || d < 9 {
				t.Errorf("second %d: %d requests and %d by default, want at most 8 and at least 9", second, o, d)
			}
			sum += ours.received(second)
		}
		if sum > 20 { // two per second from the slow lane, and retries that the budget pays for
			t.Errorf("%d requests in 5 seconds, want at most 20", sum)
		}
		if ours.failures() >= theirs.failures() {
			t.Errorf("%d requests failed, and %d by default, want fewer", ours.failures(), theirs.failures())
		}
		for _, want := range []string{"\n     5   DOWN ", "grpcretry/reconcile   ", "all keys in sync ", "of 500 keys in sync at the end\n"} {
			if !strings.Contains(out.String(), want) {
				t.Errorf("run printed\n%s\nwithout %q", out.String(), want)
			}
		}
		t.Log(out.String())
	})
}

func TestBadFlags(t *testing.T) {
	good := setting{keys: 1, workers: 1, perSecond: 1, limit: 1}
	if err := good.check(); err != nil {
		t.Errorf("check = %v for a good setting", err)
	}
	for want, change := range map[string]func(*setting){
		"-keys is 0, want at least 1":                                func(s *setting) { s.keys = 0 },
		"-workers is 0, want at least 1":                             func(s *setting) { s.workers = 0 },
		"-rate is 0, want more than 0":                               func(s *setting) { s.perSecond = 0 },
		"-up 0s, -outage -1s and -limit 1ns, want no negative times": func(s *setting) { s.outage = -time.Second },
	} {
		bad := good
		change(&bad)
		if err := bad.check(); err == nil || err.Error() != want {
			t.Errorf("check = %v, want %s", err, want)
		}
	}
}
