package grpcretrytest

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry"
)

// A script holds the steps of a server, and applies them as its interceptors.
type script struct {
	listener *listener
	settle   time.Duration  // the time in which what was sent reaches the client
	handlers sync.WaitGroup // handlers of streams that may outlive their attempt

	mu sync.Mutex
	on map[string][]Step // by pattern: step n is for attempt n of each call
	in map[string]*queue // by pattern: the next step is for the next attempt of any call
}

// A queue holds steps in the order of arrival.
type queue struct {
	steps []Step
	used  int // attempts that had a step
}

// options returns the interceptors.
func (s *script) options() []grpc.ServerOption {
	return []grpc.ServerOption{grpc.ChainUnaryInterceptor(s.unary), grpc.ChainStreamInterceptor(s.stream)}
}

// step returns what to do with an attempt; ok is false if the handler answers.
func (s *script) step(ctx context.Context, method string) (step Step, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	patterns := [...]string{method, method[:strings.LastIndex(method, "/")+1], "/"}
	for _, p := range patterns {
		if q := s.in[p]; q != nil {
			if step, ok := pick(q.steps, q.used+1); ok {
				q.used++
				return step, true
			}
		}
	}
	for _, p := range patterns {
		if steps, scripted := s.on[p]; scripted {
			return pick(steps, grpcretry.PreviousAttempts(ctx)+1)
		}
	}
	return Step{}, false
}

func (s *script) unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handler grpc.UnaryHandler) (any, error) {
	step, ok := s.step(ctx, info.FullMethod)
	if !ok {
		return handler(ctx, req)
	}
	if err := pause(ctx, step.delay); err != nil {
		return nil, err
	}
	if step.kind != answers {
		return nil, s.end(ctx, &step)
	}
	if err := step.announce(ctx); err != nil {
		return nil, err
	}
	return handler(ctx, req)
}

func (s *script) stream(srv any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
	ctx := stream.Context()
	step, ok := s.step(ctx, info.FullMethod)
	if !ok {
		return handler(srv, stream)
	}
	if err := pause(ctx, step.delay); err != nil {
		return err
	}
	if step.kind == answers {
		if err := step.announce(ctx); err != nil {
			return err
		}
		return handler(srv, stream)
	}
	if step.sent == 0 && step.received == 0 {
		return s.end(ctx, &step)
	}
	return s.endLater(&step, srv, stream, handler)
}

// endLater lets the handler run until it has sent, or received, as many messages as the step says. The
// handler may be in a method of the stream at that moment, which returns when the attempt has ended.
func (s *script) endLater(step *Step, srv any, stream grpc.ServerStream, handler grpc.StreamHandler) error {
	counted := &countedStream{ServerStream: stream, toSend: step.sent, toReceive: step.received, reached: make(chan struct{})}
	if err := stream.SetHeader(step.header); err != nil {
		return err
	}
	over := make(chan error, 1)
	s.handlers.Go(func() { over <- handler(srv, counted) })
	select {
	case <-counted.reached:
	case err := <-over:
		if !counted.isReached() {
			return err
		}
	}
	if len(step.header) > 0 {
		_ = stream.SendHeader(nil) // it fails if the handler has sent them
	}
	rest := *step
	rest.header = nil
	return s.end(stream.Context(), &rest)
}

// end ends an attempt as its step says.
func (s *script) end(ctx context.Context, step *Step) error {
	if err := step.announce(ctx); err != nil {
		return err
	}
	switch step.kind {
	case fails:
		return step.status()
	case cuts:
		if err := pause(ctx, s.settle); err != nil {
			return err
		}
		if p, ok := peer.FromContext(ctx); !ok || !s.listener.cut(p.Addr) {
			return status.Error(codes.Internal, "grpcretrytest: Cut finds no connection")
		}
	}
	<-ctx.Done()
	return status.FromContextError(ctx.Err()).Err()
}

// A countedStream counts the handler's messages. Once the numbers are reached, its methods only fail.
type countedStream struct {
	grpc.ServerStream
	mu                sync.Mutex
	toSend, toReceive int // what is left until the numbers are reached
	reached           chan struct{}
}

var errReached = status.Error(codes.Canceled, "grpcretrytest: the script has ended the attempt")

func (s *countedStream) SendMsg(m any) error {
	if s.isReached() {
		return errReached
	}
	err := s.ServerStream.SendMsg(m)
	s.count(&s.toSend, err)
	return err
}

func (s *countedStream) RecvMsg(m any) error {
	if s.isReached() {
		return errReached
	}
	err := s.ServerStream.RecvMsg(m)
	s.count(&s.toReceive, err)
	return err
}

// count counts a message that was sent or received without an error.
func (s *countedStream) count(left *int, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil || *left < 0 {
		return
	}
	if *left--; s.toSend <= 0 && s.toReceive <= 0 {
		select {
		case <-s.reached:
		default:
			close(s.reached)
		}
	}
}

func (s *countedStream) isReached() bool {
	select {
	case <-s.reached:
		return true
	default:
		return false
	}
}

// pause waits for d or the end of ctx.
func pause(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return nil
	}
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return status.FromContextError(ctx.Err()).Err()
	}
}

// check reports what is wrong with steps for a pattern on a server with the given services.
func check(services map[string]grpc.ServiceInfo, pattern string, steps []Step) error {
	for i, s := range steps {
		if s.err != nil {
			return fmt.Errorf("step %d: %w", i+1, s.err)
		}
		if i > 0 && steps[i-1].times == always {
			return fmt.Errorf("step %d comes after one that is Always", i+1)
		}
	}
	if pattern == "/" {
		return nil
	}
	service, method, ok := strings.Cut(strings.TrimPrefix(pattern, "/"), "/")
	info, known := services[service]
	switch {
	case !ok || !strings.HasPrefix(pattern, "/"):
		return fmt.Errorf(`want "/pkg.Service/Method", "/pkg.Service/" or "/"`)
	case !known:
		return fmt.Errorf("the server has no service %s; it has %s", service, names(services))
	case method == "":
		return nil
	}
	for _, m := range info.Methods {
		if m.Name != method {
			continue
		}
		for i, s := range steps {
			if err := s.fits(m); err != nil {
				return fmt.Errorf("step %d: %w", i+1, err)
			}
		}
		return nil
	}
	return fmt.Errorf("the service has no method %s; it has %s", method, methodNames(info))
}
