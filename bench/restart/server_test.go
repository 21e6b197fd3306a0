package main

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

func TestServerEndsWithoutACommand(t *testing.T) {
	var out strings.Builder
	if err := serve("127.0.0.1:0", strings.NewReader(""), &out); err != nil {
		t.Errorf("serve = %v", err)
	}
	if got := out.String(); got != "ready\n" {
		t.Errorf("the server said %q, want only that it is ready", got)
	}
}

func TestServerReportsAttempts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out strings.Builder
		s := &server{address: "here", out: &out}
		start := time.Now()
		response, err := s.Echo(t.Context(), &echov1.EchoRequest{Sequence: 17})
		if err != nil || response.GetMessage() != "here" || time.Since(start) != responseTime {
			t.Errorf("Echo = %v, %v after %v, want its address after %v", response, err, time.Since(start), responseTime)
		}

		p := &process{said: make(chan string), read: make(chan struct{})}
		p.readAll(strings.NewReader(out.String()))
		if len(p.arrivals) != 1 || p.arrivals[0].call != 17 || !p.arrivals[0].at.Equal(start) || p.err != nil {
			t.Errorf("read %v and %v, want call 17 at %v", p.arrivals, p.err, start)
		}
	})
}

func TestReadAll(t *testing.T) {
	p := &process{said: make(chan string, 2), read: make(chan struct{})}
	p.readAll(strings.NewReader("ready\nlistening\n1000 1\nnonsense\n2000 2\n"))
	for _, word := range []string{"ready", "listening"} {
		if err := p.await(t.Context(), word); err != nil {
			t.Error(err)
		}
	}
	want := []arrival{{time.Unix(0, 1000), 1}, {time.Unix(0, 2000), 2}}
	if !slices.Equal(p.arrivals, want) {
		t.Errorf("arrivals = %v, want %v", p.arrivals, want)
	}
	if !strings.Contains(fmt.Sprint(p.err), `"nonsense"`) {
		t.Errorf("err = %v, want one that quotes the line", p.err)
	}
	if err := p.await(t.Context(), "more"); err == nil {
		t.Error("await = nil for a process that has ended")
	}
}

func TestFreeAddressesDiffer(t *testing.T) {
	addresses, err := freeAddresses(20)
	if err != nil {
		t.Fatal(err)
	}
	slices.Sort(addresses)
	if len(slices.Compact(addresses)) != 20 {
		t.Errorf("freeAddresses = %v, want 20 different ones", addresses)
	}
}
