package main

import (
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

func TestServerFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := &listening{server: server{rejected: map[int64]int{}}}
		echo := func(call int64, want codes.Code, after time.Duration) {
			t.Helper()
			start := time.Now()
			_, err := s.Echo(t.Context(), &echov1.EchoRequest{Sequence: call})
			if took := time.Since(start); status.Code(err) != want || took != after {
				t.Errorf("Echo = %v after %v, want %v after %v", err, took, want, after)
			}
		}
		echo(1, codes.OK, responseTime)
		if got := s.attemptsPerCall(); got != 0 {
			t.Errorf("attemptsPerCall = %v before any was rejected, want 0", got)
		}
		s.fail()
		for _, call := range []int64{2, 3, 3, 3} {
			echo(call, codes.Unavailable, 0)
		}
		if err := s.restore(t.Context()); err != nil {
			t.Error(err)
		}
		echo(2, codes.OK, responseTime)
		if got := s.attemptsPerCall(); got != 2 {
			t.Errorf("attemptsPerCall = %v for four attempts of two calls, want 2", got)
		}
	})
}

func TestProcessEndsWithoutACommand(t *testing.T) {
	var out strings.Builder
	if err := serve("127.0.0.1:0", strings.NewReader(""), &out); err != nil || out.Len() > 0 {
		t.Errorf("serve = %v, and the process said %q; want nothing", err, out.String())
	}
}

func TestFreeAddressesDiffer(t *testing.T) {
	seen := map[string]bool{}
	for range 20 {
		address, err := freeAddress()
		if err != nil || seen[address] {
			t.Fatalf("freeAddress = %q, %v after %v, want another one", address, err, seen)
		}
		seen[address] = true
	}
}
