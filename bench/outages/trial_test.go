package main

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/stats"
	"google.golang.org/grpc/status"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// silent is a client whose calls end with their context.
type silent struct{ echov1.EchoServiceClient }

func (silent) Echo(ctx context.Context, _ *echov1.EchoRequest, _ ...grpc.CallOption) (*echov1.EchoResponse, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

func TestCalls(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := calls{client: silent{}, deadline: 10 * time.Second}
		stop := c.steadily(t.Context(), 200)
		if err := pause(t.Context(), 12*time.Millisecond); err != nil {
			t.Fatal(err)
		}
		stop()
		c.together(t.Context(), 2)
		c.running.Wait()
		var starts []time.Duration
		for i, made := range c.made {
			starts = append(starts, made.start.Sub(c.made[0].start)/time.Millisecond)
			if made.late != 0 {
				t.Errorf("call %d started %v late", i+1, made.late)
			}
			if made.took != 10*time.Second || !errors.Is(made.err, context.DeadlineExceeded) {
				t.Errorf("call %d ended after %v with %v, want its deadline of 10 s", i+1, made.took, made.err)
			}
		}
		if want := []time.Duration{0, 5, 10, 12, 12}; !slices.Equal(starts, want) {
			t.Errorf("calls started after %d ms, want %d", starts, want)
		}
	})
}

// What a client counts as a failed attempt must not depend on who retries, nor on whether it was sent.
func TestFailures(t *testing.T) {
	for _, c := range clients {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				cc := dialFailing(t, &c, &failing{code: codes.Unavailable}, grpc.WithStatsHandler(failures{}))
				calls := calls{client: echov1.NewEchoServiceClient(cc), deadline: time.Minute}
				calls.start(t.Context(), time.Now())
				calls.running.Wait()
				want := int32(attempts)
				if c.name == plain.name {
					want = 1
				}
				if got := calls.made[0].failed.Load(); got != want {
					t.Errorf("%d failed attempts, want %d", got, want)
				}
			})
		})
	}
	for _, err := range []error{nil, context.Canceled, status.Error(codes.Canceled, "lost to a hedge")} {
		made := &call{}
		failures{}.HandleRPC(context.WithValue(t.Context(), callKey{}, made), &stats.End{Error: err})
		if got := made.failed.Load(); got != 0 {
			t.Errorf("an attempt that ends with %v counts as failed", err)
		}
	}
}

// An attempt without a connection fails, too.
func TestFailuresWithoutAServer(t *testing.T) {
	target, err := newNobody(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	cc, err := plain.dial(target.addresses(), grpc.WithStatsHandler(failures{}))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cc.Close() }()
	calls := calls{client: echov1.NewEchoServiceClient(cc), deadline: time.Minute}
	calls.start(t.Context(), time.Now())
	calls.running.Wait()
	if got := calls.made[0].failed.Load(); got != 1 {
		t.Errorf("%d failed attempts, want 1", got)
	}
}

func TestResult(t *testing.T) {
	start := time.Unix(1000, 0)
	add := func(r *result, after, took time.Duration, failed int32, err error) {
		c := &call{start: start.Add(after), took: took, err: err}
		c.failed.Store(failed)
		r.calls = append(r.calls, c)
	}
	var r result
	add(&r, 0, 5*time.Second, 0, nil)
	add(&r, 999*time.Millisecond, 3*time.Second, 2, nil)
	add(&r, time.Second, time.Second, 1, nil)
	add(&r, 2*time.Second, time.Millisecond, 4, errors.New("lost"))
	if got := r.lost(); got != 1 {
		t.Errorf("lost = %d, want 1", got)
	}
	if got, want := r.rescued(), []time.Duration{time.Second, 3 * time.Second}; !slices.Equal(got, want) {
		t.Errorf("rescued = %v, want %v", got, want)
	}
	if got, want := r.inSecond(1), []time.Duration{3 * time.Second, 5 * time.Second}; !slices.Equal(got, want) {
		t.Errorf("inSecond(1) = %v, want %v", got, want)
	}
	if got := r.waiting(); got != 3 {
		t.Errorf("waiting = %d, want 3: the third call ends when the fourth starts", got)
	}
}

// A program that cannot keep its own schedule measures the machine.
func TestTooBusy(t *testing.T) {
	resultOf := func(punctual, late int, by time.Duration) *result {
		r := &result{}
		for i := range punctual + late {
			c := &call{}
			if i < late {
				c.late = by
			}
			r.calls = append(r.calls, c)
		}
		return r
	}
	idle := resultOf(100, 0, 0)
	for _, tt := range []struct {
		name   string
		result *result
		want   bool
	}{
		{"idle", idle, false},
		{"a little late", resultOf(0, 100, lateAtMost), false},
		{"a hiccup", resultOf(95, 5, time.Second), false},
		{"late", resultOf(94, 6, lateAtMost+1), true},
	} {
		rows := []row{{outage: &outage{}, results: []*result{idle, idle}}, {outage: &outage{name: "x"}, results: []*result{idle, tt.result}}}
		if err := tooBusy(rows); (err != nil) != tt.want {
			t.Errorf("%s: tooBusy = %v, want an error: %v", tt.name, err, tt.want)
		}
	}
}

func TestCallsThatStartLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := calls{client: silent{}, deadline: time.Second}
		c.start(t.Context(), time.Now().Add(-time.Minute))
		c.together(t.Context(), 1)
		c.running.Wait()
		if late := []time.Duration{c.made[0].late, c.made[1].late}; !slices.Equal(late, []time.Duration{time.Minute, 0}) {
			t.Errorf("calls started %v late, want 1m0s and 0s", late)
		}
	})
}

func TestQuantile(t *testing.T) {
	for _, tt := range []struct {
		sorted []time.Duration
		q      float64
		want   time.Duration
	}{
		{nil, 0.5, 0},
		{[]time.Duration{3}, 0.99, 3},
		{[]time.Duration{1, 2, 9}, 0.5, 2},
		{[]time.Duration{1, 2, 4, 9}, 0.5, 2},
		{[]time.Duration{1, 2, 4, 9}, 0.99, 9},
	} {
		if got := quantile(tt.sorted, tt.q); got != tt.want {
			t.Errorf("quantile(%v, %v) = %v, want %v", tt.sorted, tt.q, got, tt.want)
		}
	}
}

func TestPauseEndsWithTheContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := pause(ctx, time.Hour); !errors.Is(err, context.Canceled) {
		t.Errorf("pause = %v, want %v", err, context.Canceled)
	}
}
