package grpcretry

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/grpcretry/grpcretry/internal/bytarget"
	"github.com/grpcretry/grpcretry/internal/recorded"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// These tests hold what logs, metrics and traces say about a target that is failing.

// An outage is a server that is down until somebody mends it, and a client whose budget is empty until then.
type outage struct {
	*fixture
	client echov1.EchoServiceClient
	down   *aBudget // whose refuse is true while the server is down
	calls  sync.WaitGroup
}

func newOutage(t *testing.T, opts ...Option) *outage {
	o := &outage{down: &aBudget{}}
	o.fixture = serve(t, func(int) answer {
		if o.isDown() {
			return unavailable()
		}
		return ok()
	})
	o.client = o.fixture.client(t, append([]Option{WithBackoff(Constant(second)), WithPatience(5 * second), WithBudget(o.down)}, opts...)...)
	return o
}

func (o *outage) isDown() bool {
	o.down.mu.Lock()
	defer o.down.mu.Unlock()
	return o.down.refuse
}

func (o *outage) set(down bool) {
	o.down.mu.Lock()
	defer o.down.mu.Unlock()
	o.down.refuse = down
}

// start makes n calls that end for the given reason, nil if they succeed.
func (o *outage) start(t *testing.T, n int, reason error) {
	for range n {
		o.calls.Go(func() {
			_, err := o.client.Echo(t.Context(), request())
			if got := reasonOf(err); got != reason || err != nil && got == nil {
				t.Errorf("a call ended with %v, want %v", got, reason)
			}
		})
	}
}

func TestATroubleIsLoggedOnce(t *testing.T) {
	bubble(t, func(t *testing.T) {
		logs := &logRecorder{}
		o := newOutage(t, WithLogger(slog.New(onlyAbove{logs, slog.LevelInfo})))
		const (
			waits = "level=WARN…target is failing, calls wait for it…target=passthrough:///echo waiting=3"
			// Two calls end at that time, in any order, so that one waits or none.
			over   = "level=WARN…target has been failing for too long, calls do not wait for it any more…target=passthrough:///echo waiting="
			again3 = "level=INFO…target answers again…target=passthrough:///echo waiting=3"
			again0 = "level=INFO…target answers again…target=passthrough:///echo waiting=0"
		)
		for range 2 {
			o.set(true)
			o.start(t, 3, nil)
			time.Sleep(999 * time.Millisecond)
			wantLines(t, logs) // they wait for their backoff
			time.Sleep(time.Second)
			wantLines(t, logs, waits)
			o.set(false)
			o.start(t, 1, nil)
			o.calls.Wait()
			wantLines(t, logs, again3)

			o.set(true)
			o.start(t, 2, ErrTargetDown)
			o.calls.Wait()
			wantLines(t, logs, strings.Replace(waits, "=3", "=2", 1), over)
			o.start(t, 5, ErrTargetDown) // at once
			o.calls.Wait()
			wantLines(t, logs)
			o.set(false)
			o.start(t, 1, nil)
			o.calls.Wait()
			wantLines(t, logs, again0)
		}
	})
}

// A call also gives up before a wait that would be too long, and says so.
func TestAWaitThatWouldOutlastThePatienceIsCountedAndLogged(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server, logs := serve(t, always(unavailable())), &logRecorder{}
		r := retrierOf(t, steady, unmoved, WithPatience(5*second), WithMaxAttempts(10), WithBudget(Unlimited),
			WithLogger(slog.New(onlyAbove{logs, slog.LevelInfo})))
		logs.clear()
		err := echo(t.Context(), newEchoClient(t, server, r))
		wantTimes(t, server, 0, second, 3*second)
		if states := r.targets.states(time.Now()); reasonOf(err) != ErrTargetDown || states[0].GaveUp != 1 {
			t.Errorf("%v, and the target is %+v, want %v, and one call that gave up", err, states[0], ErrTargetDown)
		}
		wantLines(t, logs, "target has been failing for too long")
	})
}

// The ClientConns of a Retrier may have several targets. What is said about one says nothing about another.
func TestEachTargetIsCountedAndLogged(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server, logs, meters := serve(t, always(unavailable())), &logRecorder{}, &recorded.Meters{}
		r := retrierOf(t, WithBudget(stingy{}), WithPatience(0), WithLogger(slog.New(logs)), WithMeterProvider(meters))
		logs.clear()
		for _, name := range []string{"echo", "other"} {
			client := echov1.NewEchoServiceClient(server.connTo(t, "passthrough:///"+name, r.DialOptions()...))
			for range 2 {
				_ = echo(t.Context(), client)
			}
			wantLines(t, logs, "level=WARN…budget exhausted…target=passthrough:///"+name)
		}
		const attempts, other = "grpcretry.attempts 2 grpcretry.decision=stop ", "grpcretry.target=passthrough:///other"
		wantMetrics(t, meters,
			attempts+other+" rpc.response.status_code=UNAVAILABLE",
			attempts+"rpc.response.status_code=UNAVAILABLE",
			"grpcretry.budget.refusals 2 grpcretry.budget=all",
			"grpcretry.budget.refusals 2 grpcretry.budget=all "+other,
			"grpcretry.calls 2 grpcretry.outcome=budget",
			"grpcretry.calls 2 grpcretry.outcome=budget "+other)
	})
}

// A target that cannot be reached is logged like one that fails.
func TestTheWaitForAConnectionIsLogged(t *testing.T) {
	bubble(t, func(t *testing.T) {
		logs := &logRecorder{}
		link, cc := serve(t, always(ok())).linked(t,
			DialOptions(WithPatience(2*second), unmoved, WithLogger(slog.New(onlyAbove{logs, slog.LevelInfo})))...)
		link.cut()
		synctest.Wait()
		client := echov1.NewEchoServiceClient(cc)
		var first sync.WaitGroup
		first.Go(func() { _ = echo(t.Context(), client) })
		time.Sleep(second)
		wantLines(t, logs, "target is failing, calls wait for it…waiting=1")
		first.Wait()
		wantLines(t, logs, "calls do not wait for it any more…waiting=0")
		link.mend()
		time.Sleep(time.Minute)
		if err := echo(t.Context(), client); err != nil {
			t.Error(err)
		}
		wantLines(t, logs, "target answers again…waiting=0")
	})
}

// Without patience, no call waits for a connection, and the log says so immediately.
func TestThatNoCallWaitsIsLogged(t *testing.T) {
	bubble(t, func(t *testing.T) {
		logs := &logRecorder{}
		link, cc := serve(t, always(ok())).linked(t, DialOptions(WithPatience(0), WithLogger(slog.New(onlyAbove{logs, slog.LevelInfo})))...)
		link.cut()
		synctest.Wait()
		for range 2 {
			_ = echo(t.Context(), echov1.NewEchoServiceClient(cc))
		}
		wantLines(t, logs, "calls do not wait for it any more…waiting=0")
	})
}

// A call with less patience than another gives up before that. The other goes on waiting, so nothing is said until it ends.
func TestThatPatienceIsOverIsNotLoggedBefore(t *testing.T) {
	bubble(t, func(t *testing.T) {
		logs := &logRecorder{}
		server := serve(t, always(unavailable()))
		client := server.client(t, WithPatience(5*second), WithBudget(stingy{}), WithLogger(slog.New(onlyAbove{logs, slog.LevelInfo})))
		var calls sync.WaitGroup
		calls.Go(func() { _, _ = client.Echo(t.Context(), request()) })
		time.Sleep(second)
		if _, err := client.Echo(t.Context(), request(), WithPatience(300*time.Millisecond)); !errors.Is(err, ErrTargetDown) {
			t.Errorf("err = %v, want ErrTargetDown", err)
		}
		wantLines(t, logs, "target is failing, calls wait for it…waiting=1")
		calls.Wait()
		if after := time.Since(server.start); after < 4*second || after > 5*second {
			t.Errorf("the patient call ended after %v, want nearly 5s", after)
		}
		wantLines(t, logs, "calls do not wait for it any more…waiting=0")
	})
}

func TestMetricsOfTargets(t *testing.T) {
	bubble(t, func(t *testing.T) {
		meters := &recorded.Meters{}
		o := newOutage(t, WithMeterProvider(meters))
		check := func(want ...string) {
			t.Helper()
			lines := slices.DeleteFunc(metricLines(t, meters), func(line string) bool { return !strings.HasPrefix(line, "grpcretry.target.") })
			wantList(t, "metrics of targets", lines, want...)
		}
		o.start(t, 1, nil)
		o.calls.Wait()
		check()

		o.set(true)
		o.start(t, 3, nil)
		time.Sleep(500 * time.Millisecond)
		check("grpcretry.target.failing 0.5", "grpcretry.target.waiting_calls 3")
		time.Sleep(1500*time.Millisecond - 1)
		o.set(false)
		o.start(t, 1, nil)
		o.calls.Wait()
		check()

		o.set(true)
		o.start(t, 2, ErrTargetDown)
		o.calls.Wait()
		check("grpcretry.target.failing 5")
		o.start(t, 5, ErrTargetDown) // at once
		o.calls.Wait()
		check("grpcretry.target.failing 5")
		o.set(false)
		o.start(t, 1, nil)
		o.calls.Wait()
		check()
	})
}

// What is known about a target that no call has used for two sweeps is forgotten, unless a call waits for it.
func TestTargetsThatAreNotUsedAreForgotten(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := retrierOf(t, WithPatience(time.Hour), WithBackoff(Constant(10*time.Minute)))
		ctx, cancel := context.WithCancel(t.Context())
		var waits sync.WaitGroup
		waits.Go(func() { _ = r.Do(ctx, "/waited-for", func(context.Context) error { return errUnavailable }) })
		try := func(name string) {
			_ = r.Do(t.Context(), name, func(context.Context) error { return errUnavailable }, WithDryRun(true))
		}
		var names []string
		for _, name := range []string{"/old", "/first-sweep", "/second-sweep"} {
			try(name)
			time.Sleep(bytarget.SweepEvery)
		}
		for _, s := range r.targets.states(time.Now()) {
			names = append(names, s.Name)
		}
		if want := []string{"/first-sweep", "/second-sweep", "/waited-for"}; !slices.Equal(names, want) {
			t.Errorf("targets %v, want %v", names, want)
		}
		cancel()
		waits.Wait()
	})
}

// An answer to an attempt that was sent before the failures began ends the trouble without a line. The next one is then told of together
// with it.
func TestATroubleThatEndsWithoutALine(t *testing.T) {
	logs := &logRecorder{}
	of := retrierOf(t, WithLogger(slog.New(onlyAbove{logs, slog.LevelInfo}))).targets.Named("x")
	now := instantOf(noon)
	for range 2 {
		of.fail(now, 10*second)
		of.await()
		of.answer(now - 1)
		now = now.Add(2 * second)
		of.fail(now, 10*second)
		of.await()
		of.answer(now)
		wantLines(t, logs, "target is failing, calls wait for it…", "target answers again…")
		now = now.Add(2 * second)
	}
}
