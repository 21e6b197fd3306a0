package bench

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/grpc-ecosystem/go-grpc-middleware/v2/interceptors/retry"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// The migration guides in docs/ say what differs. The tests here measure it, row by row: the same calls
// to the same server, before and after, and after with the option that restores the old behaviour.

// A told server does what a test says.
type told struct {
	echov1.UnimplementedEchoServiceServer
	answer   func(ctx context.Context, number int64) error // to attempt 1, 2, ... of Echo
	attempts atomic.Int64
}

func (s *told) Echo(ctx context.Context, req *echov1.EchoRequest) (*echov1.EchoResponse, error) {
	if err := s.answer(ctx, s.attempts.Add(1)); err != nil {
		return nil, err
	}
	return &echov1.EchoResponse{Payload: make([]byte, req.GetSequence())}, nil
}

// Expand answers like Echo, or sends two messages and then fails. The sixth stream succeeds.
func (s *told) Expand(_ *echov1.EchoRequest, stream grpc.ServerStreamingServer[echov1.EchoResponse]) error {
	n := s.attempts.Add(1)
	if err := s.answer(stream.Context(), n); err != nil || n == 6 {
		return err
	}
	return errors.Join(stream.Send(&echov1.EchoResponse{}), stream.Send(&echov1.EchoResponse{}), errDown)
}

var (
	errDown = status.Error(codes.Unavailable, "down for maintenance")
	errFull = status.Error(codes.ResourceExhausted, "queue full")
)

// failing is a server that fails all attempts in the same way.
func failing(err error) func(context.Context, int64) error {
	return func(context.Context, int64) error { return err }
}

func downFor(failures int64) func(context.Context, int64) error {
	return func(_ context.Context, n int64) error {
		if n <= failures {
			return errDown
		}
		return nil
	}
}

// asksFor fails all attempts and asks for the next one by pushback.
func asksFor(ms string) func(context.Context, int64) error {
	return func(ctx context.Context, _ int64) error {
		return errors.Join(grpc.SetTrailer(ctx, metadata.Pairs("grpc-retry-pushback-ms", ms)), errDown)
	}
}

// isStuck does not respond until the client goes away.
func isStuck(ctx context.Context, _ int64) error {
	<-ctx.Done()
	return status.FromContextError(ctx.Err()).Err()
}

// once is a single call.
func once(ctx context.Context, client echov1.EchoServiceClient) error {
	return second(client.Echo(ctx, &echov1.EchoRequest{}))
}

// within is a single call with a deadline.
func within(d time.Duration) func(context.Context, echov1.EchoServiceClient) error {
	return func(ctx context.Context, client echov1.EchoServiceClient) error {
		ctx, cancel := context.WithTimeout(ctx, d)
		defer cancel()
		return once(ctx, client)
	}
}

func tenTimes(ctx context.Context, client echov1.EchoServiceClient) (err error) {
	for range 10 {
		err = once(ctx, client)
	}
	return err
}

// A row compares calls before and after a migration.
type row struct {
	name   string
	answer func(context.Context, int64) error
	call   func(context.Context, echov1.EchoServiceClient) error // nil for once

	before []grpc.DialOption
	was    seen
	after  []grpc.DialOption
	is     seen
	kept   []grpc.DialOption // restores the old behaviour, if an option can

	round time.Duration // of times; 0 for a millisecond
}

// seen is what can be seen of calls from both sides.
type seen struct {
	attempts int64         // at the server
	took     time.Duration // rounded
	code     codes.Code    // of the last call
}

func (r *row) measure(t *testing.T, opts []grpc.DialOption) (got seen) {
	synctest.Test(t, func(t *testing.T) {
		server := &told{answer: r.answer}
		client := echov1.NewEchoServiceClient(dialServer(t, server, opts...))
		call := r.call
		if call == nil {
			call = once
		}
		start := time.Now()
		err := call(t.Context(), client)
		got = seen{server.attempts.Load(), time.Since(start).Round(max(r.round, time.Millisecond)), status.Code(err)}
	})
	return got
}

func (r *row) run(t *testing.T) {
	t.Run(r.name, func(t *testing.T) {
		if got := r.measure(t, r.before); got != r.was {
			t.Errorf("before: %+v, want %+v", got, r.was)
		}
		if got := r.measure(t, r.after); got != r.is {
			t.Errorf("after: %+v, want %+v", got, r.is)
		}
		if r.kept == nil {
			return
		}
		if got := r.measure(t, r.kept); got != r.was {
			t.Errorf("with the old behaviour kept: %+v, want %+v", got, r.was)
		}
	})
}

// fromMiddleware returns the dial options of go-grpc-middleware, with a backoff of 10 ms.
func fromMiddleware(opts ...retry.CallOption) []grpc.DialOption {
	opts = append([]retry.CallOption{retry.WithBackoff(retry.BackoffLinear(10 * time.Millisecond))}, opts...)
	return []grpc.DialOption{
		grpc.WithChainUnaryInterceptor(retry.UnaryClientInterceptor(opts...)),
		grpc.WithChainStreamInterceptor(retry.StreamClientInterceptor(opts...)),
	}
}

// to returns the dial options of this library, with a backoff of 10 ms. Calls do not wait for a target that is failing,
// which would add random times.
func to(opts ...grpcretry.Option) []grpc.DialOption {
	return grpcretry.DialOptions(append([]grpcretry.Option{grpcretry.WithBackoff(grpcretry.Constant(10 * time.Millisecond)), impatient},
		opts...)...)
}

// impatient calls do not wait for a target that is failing, as those of other libraries.
var impatient = grpcretry.WithPatience(0)

// ms returns milliseconds.
func ms(n int64) time.Duration { return time.Duration(n) * time.Millisecond }

func TestMigrationFromMiddleware(t *testing.T) {
	waits := func(d time.Duration) []grpc.DialOption {
		return fromMiddleware(retry.WithMax(4), retry.WithBackoff(retry.BackoffLinear(d)))
	}
	for _, r := range []row{
		{name: "no options", answer: failing(errDown),
			before: fromMiddleware(), was: seen{1, 0, codes.Unavailable},
			after: to(), is: seen{4, ms(30), codes.Unavailable}, kept: to(grpcretry.Disable())},
		{name: "the number counts attempts", answer: failing(errDown),
			before: fromMiddleware(retry.WithMax(3)), was: seen{3, ms(20), codes.Unavailable},
			after: to(grpcretry.WithMaxAttempts(3)), is: seen{3, ms(20), codes.Unavailable}},
		{name: "the last attempt is not cut", answer: isStuck, call: within(2 * time.Second),
			before: fromMiddleware(retry.WithMax(4), retry.WithPerRetryTimeout(ms(100)), retry.WithBackoff(retry.BackoffLinear(ms(2)))),
			was:    seen{4, ms(406), codes.DeadlineExceeded},
			after:  to(grpcretry.WithAttemptTimeout(ms(100)), grpcretry.WithBackoff(grpcretry.Constant(ms(2)))),
			is:     seen{4, 2 * time.Second, codes.DeadlineExceeded}},
		{name: "a server's CANCELED with an attempt timeout", answer: failing(status.Error(codes.Canceled, "shutting down")),
			before: fromMiddleware(retry.WithMax(4), retry.WithPerRetryTimeout(time.Second)), was: seen{4, ms(30), codes.Canceled},
			after: to(grpcretry.WithAttemptTimeout(time.Second)), is: seen{1, 0, codes.Canceled},
			kept: to(grpcretry.WithAttemptTimeout(time.Second),
				grpcretry.WithCodes(codes.Unavailable, codes.ResourceExhausted, codes.Canceled, codes.DeadlineExceeded))},
		{name: "DEADLINE_EXCEEDED among the codes", answer: failing(status.Error(codes.DeadlineExceeded, "too slow")),
			before: fromMiddleware(retry.WithMax(4), retry.WithCodes(codes.Unavailable, codes.DeadlineExceeded)),
			was:    seen{1, 0, codes.DeadlineExceeded},
			after:  to(grpcretry.WithCodes(codes.Unavailable, codes.DeadlineExceeded)), is: seen{4, ms(30), codes.DeadlineExceeded},
			kept: to(grpcretry.WithCodes(codes.Unavailable))},
		{name: "ten calls in an outage", answer: failing(errDown), call: tenTimes,
			before: fromMiddleware(retry.WithMax(4)), was: seen{40, ms(300), codes.Unavailable},
			after: to(), is: seen{13, ms(30), codes.Unavailable}, kept: to(grpcretry.WithBudget(grpcretry.Unlimited))},
		{name: "a wait beyond the deadline", answer: failing(errDown), call: within(ms(300)),
			before: waits(5 * time.Second), was: seen{1, ms(300), codes.DeadlineExceeded},
			after: to(grpcretry.WithBackoff(grpcretry.Constant(5 * time.Second))), is: seen{1, 0, codes.Unavailable}},
		{name: "a message over the size limit", answer: failing(nil),
			call: func(ctx context.Context, client echov1.EchoServiceClient) error {
				return second(client.Echo(ctx, &echov1.EchoRequest{Sequence: 5 << 20}))
			},
			before: fromMiddleware(retry.WithMax(4)), was: seen{4, ms(30), codes.ResourceExhausted},
			after: to(), is: seen{1, 0, codes.ResourceExhausted}},
		{name: "pushback", answer: asksFor("700"),
			before: fromMiddleware(retry.WithMax(2)), was: seen{2, ms(10), codes.Unavailable},
			after: to(grpcretry.WithMaxAttempts(2)), is: seen{2, ms(700), codes.Unavailable}},
		{name: "do not retry", answer: asksFor("-1"),
			before: fromMiddleware(retry.WithMax(4)), was: seen{4, ms(30), codes.Unavailable},
			after: to(), is: seen{1, 0, codes.Unavailable}},
		{name: "installed twice", answer: failing(errDown),
			before: append(fromMiddleware(retry.WithMax(2)), fromMiddleware(retry.WithMax(2))...), was: seen{4, ms(30), codes.Unavailable},
			after: append(to(grpcretry.WithMaxAttempts(2)), to(grpcretry.WithMaxAttempts(2))...), is: seen{2, ms(10), codes.Unavailable}},
		{name: "on top of a service config", answer: failing(errDown),
			before: append(fromMiddleware(retry.WithMax(2)), serviceConfig(atOnce, "")...), was: seen{8, ms(10), codes.Unavailable},
			after: append(to(grpcretry.WithMaxAttempts(2)), serviceConfig(atOnce, "")...), is: seen{2, ms(10), codes.Unavailable}},
		{name: "a server stream that is stuck", answer: isStuck,
			call: func(ctx context.Context, client echov1.EchoServiceClient) error {
				ctx, cancel := context.WithTimeout(ctx, time.Second)
				defer cancel()
				return receiveAll(ctx, client)
			},
			before: fromMiddleware(retry.WithMax(2), retry.WithPerRetryTimeout(ms(100))), was: seen{1, time.Second, codes.DeadlineExceeded},
			after: to(grpcretry.WithMaxAttempts(2), grpcretry.WithAttemptTimeout(ms(100))), is: seen{2, time.Second, codes.DeadlineExceeded},
			kept: to(grpcretry.WithMaxAttempts(2), grpcretry.WithAttemptTimeout(ms(100)),
				grpcretry.WithMethod(echov1.EchoService_Expand_FullMethodName, grpcretry.WithAttemptTimeout(0)))},
		{name: "a server stream that fails after two messages", answer: failing(nil), call: receiveAll,
			before: fromMiddleware(retry.WithMax(3)), was: seen{6, ms(50), codes.OK}, // the number starts again with each message
			after: to(grpcretry.WithMaxAttempts(3)), is: seen{1, 0, codes.Unavailable}},
	} {
		r.run(t)
	}
}

// receiveAll opens a server stream and receives until it fails.
func receiveAll(ctx context.Context, client echov1.EchoServiceClient) error {
	stream, err := client.Expand(ctx, &echov1.EchoRequest{})
	for err == nil {
		_, err = stream.Recv()
	}
	if errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

func TestMigrationFromServiceConfig(t *testing.T) {
	// The waits of the config are 10 ms ±20% in gRPC and with WithServiceConfig, and those of the rows below are
	// rounded to that.
	config := func(attempts int, more string) string {
		return fmt.Sprintf(policyConfig, attempts, "0.000001s", "0.000001s", 1, more)
	}
	read := func(json string, opts ...grpcretry.Option) []grpc.DialOption {
		return grpcretry.DialOptions(append(opts, grpcretry.WithServiceConfig(json))...)
	}
	const onlyPut = `{"methodConfig": [{"name": [{"service": "grpcretry.test.v1.EchoService", "method": "Put"}], "retryPolicy": {
		"maxAttempts": 2, "initialBackoff": "1s", "maxBackoff": "1s", "backoffMultiplier": 1, "retryableStatusCodes": ["UNAVAILABLE"]}}]}`
	const hedging = `{"methodConfig": [{"name": [{"service": "grpcretry.test.v1.EchoService", "method": "Echo"}], "hedgingPolicy": {
		"maxAttempts": 2, "hedgingDelay": "1s"}}]}`
	slowOnce := func(ctx context.Context, n int64) error { // the twelfth attempt is slow
		if n == 12 {
			return isStuck(ctx, n)
		}
		return nil
	}
	twelve := func(ctx context.Context, client echov1.EchoServiceClient) (err error) {
		for range 11 {
			err = errors.Join(err, once(ctx, client))
		}
		return errors.Join(err, within(10*time.Second)(ctx, client))
	}
	for _, r := range []row{
		{name: "a method without a policy", answer: downFor(1),
			before: withServiceConfig(onlyPut), was: seen{1, 0, codes.Unavailable},
			after: read(onlyPut, grpcretry.WithBackoff(grpcretry.Constant(ms(10)))), is: seen{2, 0, codes.OK},
			kept: read(onlyPut, grpcretry.Disable())},
		{name: "ten calls in an outage, without a throttle", answer: failing(errDown), call: tenTimes,
			before: withServiceConfig(config(4, "")), was: seen{40, 0, codes.Unavailable},
			after: read(config(4, ""), impatient), is: seen{13, 0, codes.Unavailable},
			kept: read(config(4, ""), grpcretry.WithBudget(grpcretry.Unlimited), impatient)},
		{name: "a pushback of ten minutes", answer: asksFor("600000"),
			before: withServiceConfig(config(2, "")), was: seen{2, 10 * time.Minute, codes.Unavailable},
			after: read(config(2, "")), is: seen{1, 0, codes.Unavailable},
			kept: read(config(2, ""), grpcretry.WithMaxServerDelay(-1))},
		{name: "hedgingPolicy", answer: slowOnce, call: twelve,
			before: withServiceConfig(hedging), was: seen{12, 10 * time.Second, codes.DeadlineExceeded},
			after: read(hedging), is: seen{13, time.Second, codes.OK},
			kept: read(hedging, grpcretry.WithMethod(echov1.EchoService_Echo_FullMethodName, grpcretry.Disable()))},
	} {
		r.round = time.Second // jitter hardly counts then
		r.run(t)
	}
}

// A server that is not there: gRPC fails attempts immediately, and the next dial is a second away.
func TestMigrationWithoutAServer(t *testing.T) {
	noServer := grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) { return nil, errors.New("connection refused") })
	for _, tt := range []struct {
		name string
		dial []grpc.DialOption
		want time.Duration
	}{
		{"go-grpc-middleware", fromMiddleware(retry.WithMax(4)), ms(30)},
		{"grpc-go", withServiceConfig(fmt.Sprintf(policyConfig, 4, "0.01s", "0.01s", 1, "")), ms(30)},
		{"grpcretry", grpcretry.DialOptions(), 10 * time.Second},
		{"grpcretry without patience", to(), 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				cc, err := grpc.NewClient("passthrough:///none", append(tt.dial, noServer, grpc.WithTransportCredentials(insecure.NewCredentials()))...)
				if err != nil {
					t.Fatal(err)
				}
				defer cc.Close()
				start := time.Now()
				err = once(t.Context(), echov1.NewEchoServiceClient(cc))
				took := time.Since(start) // grpc-go has a jitter of ±20%
				if took < tt.want*8/10 || took > tt.want*12/10 || status.Code(err) != codes.Unavailable {
					t.Errorf("Echo = %v after %v, want UNAVAILABLE after %v", err, took, tt.want)
				}
			})
		})
	}
}

// The first wait by default, after the two codes that are retried by default.
func TestMigrationOfTheBackoff(t *testing.T) {
	middleware := []grpc.DialOption{grpc.WithChainUnaryInterceptor(retry.UnaryClientInterceptor(retry.WithMax(2)))}
	ours := func(opts ...grpcretry.Option) []grpc.DialOption {
		return grpcretry.DialOptions(append(opts, grpcretry.WithMaxAttempts(2), grpcretry.WithBudget(grpcretry.Unlimited), impatient)...)
	}
	config := fmt.Sprintf(policyConfig, 2, "0.1s", "1s", 2, "")
	for _, tt := range []struct {
		name   string
		dial   []grpc.DialOption
		err    error
		lo, hi time.Duration
	}{
		{"go-grpc-middleware", middleware, errDown, ms(45), ms(55)},
		{"go-grpc-middleware, overload", middleware, errFull, ms(45), ms(55)},
		{"grpcretry", ours(), errDown, ms(50), ms(100)},
		{"grpcretry, overload", ours(), errFull, 0, time.Second},
		{"grpcretry, overload with one backoff",
			ours(grpcretry.WithBackoff(grpcretry.Exponential{Base: ms(50), Max: ms(50), Jitter: grpcretry.ProportionalJitter})),
			errFull, ms(40), ms(60)},
		{"grpc-go", withServiceConfig(config), errFull, ms(80), ms(120)},
		{"WithServiceConfig", ours(grpcretry.WithServiceConfig(config)), errFull, ms(80), ms(120)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				client := echov1.NewEchoServiceClient(dialServer(t, &told{answer: failing(tt.err)}, tt.dial...))
				shortest, longest := time.Hour, time.Duration(0)
				for range 100 { // all of them in one half of the range: once in 10³⁰ times
					start := time.Now()
					if err := once(t.Context(), client); status.Code(err) != status.Code(tt.err) {
						t.Fatal(err)
					}
					shortest, longest = min(shortest, time.Since(start)), max(longest, time.Since(start))
				}
				if shortest < tt.lo || longest > tt.hi {
					t.Errorf("waits from %v to %v, want %v to %v", shortest, longest, tt.lo, tt.hi)
				}
				if middle := (tt.lo + tt.hi) / 2; shortest > middle || longest < middle {
					t.Errorf("waits from %v to %v, want them spread over %v to %v", shortest, longest, tt.lo, tt.hi)
				}
			})
		})
	}
}

// The error of a call that used up its attempts, and the call options that report to the caller.
func TestMigrationOfErrorsAndCallOptions(t *testing.T) {
	for name, tt := range map[string]struct {
		dial     []grpc.DialOption
		text     string
		ours     bool
		finishes int
	}{
		"go-grpc-middleware": {fromMiddleware(retry.WithMax(2)), "rpc error: code = Unavailable desc = down for maintenance", false, 2},
		"grpc-go": {withServiceConfig(fmt.Sprintf(policyConfig, 2, "0.01s", "0.01s", 1, "")),
			"max retries exhausted: failed after 2 attempts: rpc error: code = Unavailable desc = down for maintenance", false, 1},
		"grpcretry": {to(grpcretry.WithMaxAttempts(2)),
			"grpcretry: gave up after 2 attempts in 10ms: no attempts left: rpc error: code = Unavailable desc = down for maintenance", true, 1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				client := echov1.NewEchoServiceClient(dialServer(t, &told{answer: failing(errDown)}, tt.dial...))
				finished := 0
				_, err := client.Echo(t.Context(), &echov1.EchoRequest{}, grpc.OnFinish(func(error) { finished++ }))
				var e *grpcretry.Error
				if status.Code(err) != codes.Unavailable || err.Error() != tt.text || errors.As(err, &e) != tt.ours {
					t.Errorf("Echo = %v, want %s", err, tt.text)
				}
				if finished != tt.finishes {
					t.Errorf("OnFinish ran %d times, want %d", finished, tt.finishes)
				}
			})
		})
	}
}

// policyConfig is a service config with a retryPolicy for all methods: attempts, backoffs and multiplier, and
// more parts.
const policyConfig = `{"methodConfig": [{"name": [{}], "retryPolicy": {
	"maxAttempts": %d, "initialBackoff": %q, "maxBackoff": %q, "backoffMultiplier": %d,
	"retryableStatusCodes": ["UNAVAILABLE", "RESOURCE_EXHAUSTED"]}}]%s}`

// withServiceConfig returns the dial options of a client whose retries are gRPC's own.
func withServiceConfig(json string) []grpc.DialOption {
	return []grpc.DialOption{grpc.WithDefaultServiceConfig(json)}
}
