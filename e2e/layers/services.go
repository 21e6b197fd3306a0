package main

import (
	"context"
	"sync"
)

// services are A, B, C and D, each in a process of its own.
type services struct {
	d       *process
	others  []*process // C, B and A
	address struct{ a, d string }
}

// startServices starts D first and A last, because each needs the address of the next. If a service
// ends before it is stopped, its end is reported to failed.
func startServices(ctx context.Context, setup, otlp string, failed func(error)) (_ *services, err error) {
	s := &services{}
	defer func() {
		if err != nil {
			s.stop()
		}
	}()
	if s.d, s.address.d, err = start(ctx, &serviceConfig{Name: "D", OTLP: otlp}, failed); err != nil {
		return nil, err
	}
	s.address.a = s.address.d
	for _, name := range []string{"C", "B", "A"} {
		var p *process
		c := serviceConfig{Name: name, Setup: setup, Next: s.address.a, OTLP: otlp}
		if p, s.address.a, err = start(ctx, &c, failed); err != nil {
			return nil, err
		}
		s.others = append(s.others, p)
	}
	return s, nil
}

// restartD starts D again on its port, after it has been killed.
func (s *services) restartD(ctx context.Context, failed func(error)) error {
	d, _, err := start(ctx, &serviceConfig{Name: "D", Address: s.address.d}, failed)
	if err != nil {
		return err
	}
	s.d = d
	return nil
}

// stop ends all processes and returns when they have ended. A second stop does nothing.
func (s *services) stop() {
	var stopping sync.WaitGroup
	for _, p := range append(s.others, s.d) {
		if p != nil {
			stopping.Go(p.stop)
		}
	}
	stopping.Wait()
}
