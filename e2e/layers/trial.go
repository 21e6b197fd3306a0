package main

import (
	"context"
	"sync"
	"time"

	"google.golang.org/grpc"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// A plan is what happens to D, and when. It is the same for all setups.
type plan struct {
	rate     int           // calls per second, evenly spaced
	deadline time.Duration // of each call

	healthy time.Duration // D responds,
	down    time.Duration // fails all attempts,
	healed  time.Duration // responds again,
	flaky   time.Duration // fails some attempts,
	settled time.Duration // responds once more, so that no call has spent attempts already,
	away    time.Duration // is killed and does not exist,
	after   time.Duration // and responds again
}

// A trial is one setup with services of its own.
type trial struct {
	services *services
	failed   context.CancelCauseFunc // ends the trial
	calls    calls

	attempts                              []attempt // of D, until it is killed
	wentDown, cameUp, turnedFlaky, killed time.Time // what happened to D when
}

// measure tries one setup.
func (p *plan) measure(ctx context.Context, s *setup) (*summary, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	services, err := startServices(ctx, s.name, "", cancel)
	if err != nil {
		return nil, err
	}
	defer services.stop()
	t := &trial{services: services, failed: cancel}
	if err := t.run(ctx, p); err != nil {
		return nil, err
	}
	return t.summarize()
}

func (t *trial) run(ctx context.Context, p *plan) error {
	cc, err := dial(t.services.address.a, grpc.WithDisableRetry())
	if err != nil {
		return err
	}
	defer cc.Close()
	t.calls.client = echov1.NewEchoServiceClient(cc)
	stop := t.calls.every(ctx, time.Second/time.Duration(p.rate), p.deadline)
	defer stop()
	for _, step := range []struct {
		do   func(context.Context) error
		then time.Duration
	}{
		{func(context.Context) error { return nil }, p.healthy},
		{t.takeDown, p.down},
		{t.bringUp, p.healed},
		{t.makeFlaky, p.flaky},
		{t.settle, p.settled},
		{t.kill, p.away},
		{t.restart, p.after},
	} {
		if err := step.do(ctx); err != nil {
			return err
		}
		if err := pause(ctx, step.then); err != nil {
			return err
		}
	}
	stop()
	return context.Cause(ctx) // calls that were cut short are no result
}

func (t *trial) takeDown(ctx context.Context) (err error) {
	t.wentDown, err = t.services.d.become(ctx, down)
	return err
}

func (t *trial) bringUp(ctx context.Context) (err error) {
	t.cameUp, err = t.services.d.become(ctx, up)
	return err
}

func (t *trial) makeFlaky(ctx context.Context) (err error) {
	t.turnedFlaky, err = t.services.d.become(ctx, flaky)
	return err
}

func (t *trial) settle(ctx context.Context) error {
	_, err := t.services.d.become(ctx, up)
	return err
}

// kill ends the process of D without a warning.
func (t *trial) kill(context.Context) error {
	t.killed = time.Now()
	t.services.d.kill()
	t.attempts = t.services.d.attempts
	return t.services.d.err
}

func (t *trial) restart(ctx context.Context) error { return t.services.restartD(ctx, t.failed) }

// calls are those of a trial, numbered from 1 in the order in which they start.
type calls struct {
	client  echov1.EchoServiceClient
	made    []*call
	running sync.WaitGroup
}

// A call is complete when it no longer runs.
type call struct {
	start, end time.Time
	late       time.Duration // by which it started after its time
	err        error
}

// every starts a call each interval, the first after half of one, so that no call starts just when
// the plan changes D's state. It does so until stop is called, which returns when all calls have
// ended.
func (c *calls) every(ctx context.Context, interval, deadline time.Duration) (stop func()) {
	ticking, cancel := context.WithCancel(ctx)
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		for next := time.Now().Add(interval / 2); pause(ticking, time.Until(next)) == nil; next = next.Add(interval) {
			c.start(ctx, next, deadline)
		}
	}()
	return func() {
		cancel()
		<-stopped
		c.running.Wait()
	}
}

// start starts a call whose time is due.
func (c *calls) start(ctx context.Context, due time.Time, deadline time.Duration) {
	made := &call{start: time.Now(), late: time.Since(due)}
	c.made = append(c.made, made)
	request := &echov1.EchoRequest{Sequence: int64(len(c.made))}
	c.running.Go(func() {
		ctx, cancel := context.WithTimeout(ctx, deadline)
		defer cancel()
		_, made.err = c.client.Echo(ctx, request)
		made.end = time.Now()
	})
}

// pause waits for d, which may have passed already, or until ctx ends.
func pause(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return context.Cause(ctx)
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
