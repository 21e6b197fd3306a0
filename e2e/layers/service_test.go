package main

import (
	"context"
	"io"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// TestDObeys makes three attempts of each of forty calls in every state of D.
func TestDObeys(t *testing.T) {
	for _, tt := range []struct {
		states string      // one a line
		want   map[int]int // how many calls have so many failures
	}{
		{"", map[int]int{0: 40}},
		{"down\n", map[int]int{3: 40}},
		{"down\nup\n", map[int]int{0: 40}},
		{"up\nflaky\n", map[int]int{0: 34, 1: 4, 2: 2}},
	} {
		d := &last{out: io.Discard, seen: map[int64]int{}}
		d.obey(strings.NewReader(tt.states))
		got := map[int]int{}
		for call := range int64(40) {
			failures := 0
			for range attempts {
				if _, err := d.Echo(t.Context(), &echov1.EchoRequest{Sequence: call}); status.Code(err) == codes.Unavailable {
					failures++
				} else if err != nil {
					t.Fatalf("Echo = %v", err)
				}
			}
			got[failures]++
		}
		if len(got) != len(tt.want) {
			t.Errorf("after %q, failures by call: %v, want %v", tt.states, got, tt.want)
		}
		for n, calls := range tt.want {
			if got[n] != calls {
				t.Errorf("after %q, %d calls with %d failures, want %d", tt.states, got[n], n, calls)
			}
		}
	}
}

// TestDWritesDownWhatHappens reads what D writes, as the other end of the pipe does.
func TestDWritesDownWhatHappens(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var out strings.Builder
		d := &last{out: &out, seen: map[int64]int{}}
		begin := time.Now()
		d.obey(strings.NewReader("down\n"))
		time.Sleep(time.Second)
		_, _ = d.Echo(t.Context(), &echov1.EchoRequest{Sequence: 17})
		time.Sleep(time.Second)
		d.obey(strings.NewReader("up\n"))

		p := &process{name: "D", lines: make(chan line, 8), commands: discard{}}
		if err := p.read(strings.NewReader(out.String())); err != nil {
			t.Fatal(err)
		}
		if want := []attempt{{begin.Add(time.Second), 17}}; !slices.EqualFunc(p.attempts, want, sameAttempt) {
			t.Errorf("attempts = %v, want %v", p.attempts, want)
		}
		for _, tt := range []struct {
			state state
			want  time.Time
		}{{down, begin}, {up, begin.Add(2 * time.Second)}} {
			if at, err := p.become(t.Context(), tt.state); err != nil || !at.Equal(tt.want) {
				t.Errorf("become(%s) = %v, %v, want %v", tt.state, at, err, tt.want)
			}
		}
	})
}

func sameAttempt(a, b attempt) bool { return a.at.Equal(b.at) && a.call == b.call }

// discard is a standard input that nobody reads.
type discard struct{}

func (discard) Write(p []byte) (int, error) { return len(p), nil }
func (discard) Close() error                { return nil }

func TestReadReportsNonsense(t *testing.T) {
	p := &process{name: "D", lines: make(chan line, 1)}
	err := p.read(strings.NewReader("listening here\nattempt one\nattempt 1000 1\nup 2000\n"))
	if len(p.attempts) != 1 || p.attempts[0].call != 1 {
		t.Errorf("attempts = %v, want one, of call 1", p.attempts)
	}
	for _, want := range []string{`service D wrote "attempt one"`, `service D wrote "up 2000" unasked`} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("read = %v, want an error that contains %s", err, want)
		}
	}
}

func TestServiceThatEndsEarly(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	services, err := startServices(ctx, everything, "", cancel)
	if err != nil {
		t.Fatal(err)
	}
	defer services.stop()
	if err := services.others[1].cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	<-ctx.Done()
	const want = "service B ended while it was needed: "
	if err := context.Cause(ctx); !strings.HasPrefix(err.Error(), want) {
		t.Errorf("the trial ends with %v, want %s", err, want)
	}
	services.d.kill()
	if _, err := services.d.become(t.Context(), down); err == nil || !strings.HasPrefix(err.Error(), "service D ended") {
		t.Errorf("become = %v for a service that has ended", err)
	}
}

func TestServiceThatCannotStart(t *testing.T) {
	listener, err := listen("")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	failed := func(error) {}
	const want = "service D ended while it was needed: exit status 1"
	if _, _, err := start(t.Context(), &serviceConfig{Name: "D", Address: listener.Addr().String()}, failed); err == nil ||
		err.Error() != want {
		t.Errorf("start = %v on an address that is taken, want %s", err, want)
	}
}
