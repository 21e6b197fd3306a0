package grpcretry

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry/internal/words"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

var (
	configDraws = flag.Int("configs.draws", 20, "how many service configs each randomized test draws")
	configSeed  = flag.Uint64("configs.seed", 1, "the first seed of these tests, 0 for one drawn from the clock: make soak does that")
)

// drawConfigs runs f in a bubble for each seed.
func drawConfigs(t *testing.T, draws int, f func(t *testing.T, d *rand.Rand)) {
	t.Helper()
	first := *configSeed
	if first == 0 {
		first = uint64(time.Now().UnixNano())
	}
	for seed := first; seed < first+uint64(draws) && !t.Failed(); seed++ {
		f(t, rand.New(rand.NewPCG(seed, 0)))
		if t.Failed() {
			t.Logf("-configs.seed=%d -configs.draws=1 draws it again", seed)
		}
	}
}

// The types below are a service config that a test draws.
type drawnConfig struct {
	MethodConfig    []*drawnEntry  `json:"methodConfig,omitempty"`
	RetryThrottling *drawnThrottle `json:"retryThrottling,omitempty"`
}

type drawnEntry struct {
	Name          []drawnName   `json:"name"`
	RetryPolicy   *drawnRetry   `json:"retryPolicy,omitempty"`
	HedgingPolicy *drawnHedging `json:"hedgingPolicy,omitempty"`
}

type drawnName struct {
	Service string `json:"service,omitempty"`
	Method  string `json:"method,omitempty"`
}

type drawnRetry struct {
	MaxAttempts          int           `json:"maxAttempts"`
	InitialBackoff       drawnDuration `json:"initialBackoff"`
	MaxBackoff           drawnDuration `json:"maxBackoff"`
	BackoffMultiplier    float64       `json:"backoffMultiplier"`
	RetryableStatusCodes []drawnCode   `json:"retryableStatusCodes"`
}

type drawnHedging struct {
	MaxAttempts         int           `json:"maxAttempts"`
	HedgingDelay        drawnDuration `json:"hedgingDelay"`
	NonFatalStatusCodes []drawnCode   `json:"nonFatalStatusCodes"`
}

type drawnThrottle struct {
	MaxTokens  float64 `json:"maxTokens"`
	TokenRatio float64 `json:"tokenRatio"`
}

type drawnDuration time.Duration

func (d drawnDuration) MarshalJSON() ([]byte, error) {
	return json.Marshal(fmt.Sprintf("%d.%09ds", d/drawnDuration(second), d%drawnDuration(second)))
}

type drawnCode codes.Code

func (c drawnCode) MarshalJSON() ([]byte, error) { return json.Marshal(words.Code(codes.Code(c))) }

func (c *drawnConfig) String() string {
	text, err := json.Marshal(c)
	if err != nil {
		panic(err)
	}
	return string(text)
}

const drawnService = "drawn.Service"

// drawnMethods are the methods that are called; a config may name the first two.
var drawnMethods = []string{"A", "B", "C"}

var drawnCodes = []codes.Code{codes.Unavailable, codes.ResourceExhausted, codes.Aborted, codes.Internal, codes.NotFound}

func drawCodes(d *rand.Rand) []drawnCode {
	var set []drawnCode
	for _, c := range drawnCodes[:4] {
		if d.IntN(2) == 0 {
			set = append(set, drawnCode(c))
		}
	}
	if set == nil {
		set = append(set, drawnCode(drawnCodes[d.IntN(4)]))
	}
	return set
}

// between draws a duration to the nanosecond, so that no two things happen at once.
func between(d *rand.Rand, least, most time.Duration) time.Duration {
	return least + time.Duration(d.Int64N(int64(most-least)))
}

func drawRetry(d *rand.Rand) *drawnRetry {
	initial := between(d, time.Millisecond, 2*second)
	return &drawnRetry{
		MaxAttempts:          2 + d.IntN(4),
		InitialBackoff:       drawnDuration(initial),
		MaxBackoff:           drawnDuration(between(d, initial, 10*second)),
		BackoffMultiplier:    1 + 2*d.Float64(),
		RetryableStatusCodes: drawCodes(d),
	}
}

// drawConfig draws a service config; with hedging it may hedge methods, with tokens it has a
// retryThrottling.
func drawConfig(d *rand.Rand, hedging, tokens bool) *drawnConfig {
	c := &drawnConfig{}
	for _, name := range []drawnName{{}, {drawnService, ""}, {drawnService, "A"}, {drawnService, "B"}} {
		e := &drawnEntry{Name: []drawnName{name}}
		switch what := d.IntN(6); {
		case what < 2: // no entry
			continue
		case what == 2 && hedging:
			e.HedgingPolicy = &drawnHedging{2 + d.IntN(4), drawnDuration(between(d, time.Millisecond, 2*second)), drawCodes(d)}
		case what < 5:
			e.RetryPolicy = drawRetry(d)
		} // otherwise an entry without a policy
		c.MethodConfig = append(c.MethodConfig, e)
	}
	d.Shuffle(len(c.MethodConfig), func(i, j int) {
		c.MethodConfig[i], c.MethodConfig[j] = c.MethodConfig[j], c.MethodConfig[i]
	})
	if tokens {
		// The ratios are sums of powers of 2: gRPC counts tokens in floating point, and at exactly half of them
		// the rounding of other ratios would decide.
		c.RetryThrottling = &drawnThrottle{float64(2 + d.IntN(8)), float64(1+d.IntN(16)) / 8}
	}
	return c
}

// of returns the entry for a method, nil if there is none.
func (c *drawnConfig) of(method string) *drawnEntry {
	for _, name := range []drawnName{{drawnService, method}, {drawnService, ""}, {}} {
		for _, e := range c.MethodConfig {
			if slices.Contains(e.Name, name) {
				return e
			}
		}
	}
	return nil
}

// A drawnResponse is how the server responds to one attempt.
type drawnResponse struct {
	after    time.Duration
	header   bool
	code     codes.Code
	pushback string
	number   int // in the message of the status
}

func drawResponse(d *rand.Rand, number int) drawnResponse {
	r := drawnResponse{number: number, after: between(d, time.Millisecond, 2*second), header: d.IntN(8) == 0}
	if d.IntN(4) > 0 {
		r.code = drawnCodes[d.IntN(len(drawnCodes))]
	}
	if d.IntN(5) == 0 {
		r.pushback = []string{"-1", "x", "0", strconv.Itoa(d.IntN(3000)), strconv.Itoa(d.IntN(3000))}[d.IntN(5)]
	}
	return r
}

func (r drawnResponse) send(stream grpc.ServerStream) error {
	time.Sleep(r.after) // also after the deadline, when client and server would end the stream at once
	if r.header {
		if err := stream.SendHeader(metadata.Pairs("k", "v")); err != nil {
			return err
		}
	}
	if r.pushback != "" {
		stream.SetTrailer(metadata.Pairs(pushbackKey, r.pushback))
	}
	if r.code != codes.OK {
		return status.Errorf(r.code, "drawn %d", r.number)
	}
	return stream.SendMsg(&echov1.EchoResponse{Message: "response"})
}

// A drawnCall is one of the calls of a test.
type drawnCall struct {
	at        time.Duration
	method    string
	kind      callKind
	limit     time.Duration // 0 for none
	responses []drawnResponse
}

func drawCall(d *rand.Rand) *drawnCall {
	c := &drawnCall{at: between(d, 0, 30*second), method: drawnMethods[d.IntN(len(drawnMethods))], kind: callKinds[d.IntN(len(callKinds))]}
	if d.IntN(3) == 0 {
		c.limit = between(d, second, 10*second)
	}
	for n := range 8 {
		c.responses = append(c.responses, drawResponse(d, n+1))
	}
	return c
}

func (c *drawnCall) withoutHeaders() {
	for i := range c.responses {
		c.responses[i].header = false
	}
}

// A transcript holds everything that happens, in the order of time.
type transcript struct {
	start time.Time

	mu    sync.Mutex
	lines []string
}

// note adds a line. At a deadline, client and server end a stream at the same moment, and it is a matter
// of goroutines which end gRPC reports.
func (l *transcript) note(format string, args ...any) {
	text := strings.ReplaceAll(fmt.Sprintf(format, args...),
		"stream terminated by RST_STREAM with error code: CANCEL", "context deadline exceeded")
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines, fmt.Sprintf("%15d %s", time.Since(l.start), text))
}

func (l *transcript) observe(_ context.Context, e Event) {
	l.note("%s: attempt %d of %s, hedge %v, %v: %v; wait %v (%v), reason %v; the call: %v, %v, attempts %d; balance %v", e.Kind,
		e.Attempt.Number, e.Attempt.Method, e.Attempt.Hedge, e.Attempt.Duration, e.Attempt.Err, e.Wait, e.WaitSource, e.Reason,
		e.Err, e.Elapsed, len(e.Attempts), e.budget.Balance(time.Now()))
}

// sorted returns the lines; losers of a hedged call end at the same time, in any order.
func (l *transcript) sorted() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	slices.Sort(l.lines)
	return l.lines
}

// serveDrawn serves the calls; each sends its number.
func serveDrawn(t *testing.T, calls []*drawnCall, l *transcript) *fixture {
	t.Helper()
	var mu sync.Mutex
	made := make([]int, len(calls))
	return serveStreams(t, func(_ int, stream grpc.ServerStream) error {
		var m echov1.EchoRequest
		if err := stream.RecvMsg(&m); err != nil {
			return err
		}
		call, err := strconv.Atoi(m.GetMessage())
		if err != nil {
			return err
		}
		mu.Lock()
		n := made[call]
		made[call]++
		mu.Unlock()
		l.note("call %d: attempt %d arrives, previous %d", call, n+1, PreviousAttempts(stream.Context()))
		return calls[call].responses[n].send(stream)
	})
}

// make makes a call and notes its result.
func (c *drawnCall) make(t *testing.T, number int, cc *grpc.ClientConn, l *transcript) {
	ctx := t.Context()
	if c.limit > 0 {
		limited, cancel := context.WithTimeout(ctx, c.limit)
		defer cancel()
		ctx = limited
	}
	err := c.send(ctx, number, cc)
	var e *Error
	if errors.As(err, &e) {
		l.note("call %d: %v, %v, %d attempts, %v", number, err, e.Reason, len(e.Attempts), e.Elapsed)
		return
	}
	l.note("call %d: %v", number, err)
}

func (c *drawnCall) send(ctx context.Context, number int, cc *grpc.ClientConn) error {
	return c.kind.send(ctx, cc, "/"+drawnService+"/"+c.method, &echov1.EchoRequest{Message: strconv.Itoa(number)})
}

// retrier returns a Retrier that reports to the transcript and whose random numbers come from a seed.
func (l *transcript) retrier(t *testing.T, seed uint64, opts ...Option) *Retrier {
	t.Helper()
	r := retrierOf(t, append(opts, WithObserver(l.observe))...)
	randoms := rand.New(rand.NewPCG(seed, 0))
	r.random = func() float64 { l.mu.Lock(); defer l.mu.Unlock(); return randoms.Float64() }
	return r
}

// run makes the calls and the changes, and returns the transcript.
func (l *transcript) run(t *testing.T, cc *grpc.ClientConn, calls []*drawnCall, changes []time.Duration, change func(n int)) []string {
	var wg sync.WaitGroup
	wg.Go(func() {
		for n, at := range changes {
			time.Sleep(at - time.Since(l.start))
			change(n)
		}
	})
	for number, c := range calls {
		wg.Go(func() { time.Sleep(c.at); c.make(t, number, cc, l) })
	}
	wg.Wait()
	time.Sleep(2 * second) // until the server's handlers have ended
	return l.sorted()
}

// firstDifference returns the number of the first line in which two transcripts differ.
func firstDifference(a, b []string) (n int, same bool) {
	for n = range min(len(a), len(b)) {
		if a[n] != b[n] {
			return n, false
		}
	}
	return min(len(a), len(b)), len(a) == len(b)
}

// A service config that the channel has behaves like one in WithServiceConfig, from the first call of a
// fresh channel on; and if calls start on a channel with a connection, also when it changes while they
// run. gRPC's own retries may be on or off.
func TestTheChannelsServiceConfigIsLikeWithServiceConfig(t *testing.T) {
	t.Parallel()
	drawConfigs(t, *configDraws, func(t *testing.T, d *rand.Rand) {
		configs := []*drawnConfig{drawConfig(d, false, false)}
		var changes []time.Duration
		for range d.IntN(4) {
			configs = append(configs, drawConfig(d, false, false))
			changes = append(changes, between(d, 0, 30*second))
		}
		slices.Sort(changes)
		var calls []*drawnCall
		for range 1 + d.IntN(12) {
			calls = append(calls, drawCall(d))
		}
		seed, off := d.Uint64(), d.IntN(2) == 0 // off: Go allows one attempt, and the service config more
		var got [3][]string
		for i, way := range []string{"WithServiceConfig", "DialOptions", "interceptors only"} {
			bubble(t, func(t *testing.T) {
				l := &transcript{start: time.Now()}
				server := serveDrawn(t, calls, l)
				var opts []Option
				if off {
					opts = append(opts, Disable(), WithBudget(Unlimited))
				}
				if i == 0 {
					r := l.retrier(t, seed, append(opts, WithServiceConfig(configs[0].String()))...)
					cc, _ := server.live(t, 0, "{}", r.DialOptions()...)
					got[i] = l.run(t, cc, calls, changes, func(n int) { update(t, r, WithServiceConfig(configs[n+1].String())) })
					return
				}
				cc, live := server.live(t, 0, configs[0].String(), ways[way](l.retrier(t, seed, append(opts, WithResolverServiceConfig(true))...))...)
				if len(changes) > 0 {
					connect(t, cc)
				}
				got[i] = l.run(t, cc, calls, changes, func(n int) { live.update(configs[n+1].String()) })
			})
		}
		for i, way := range []string{"DialOptions", "interceptors only"} {
			a, b := got[0], got[i+1]
			if off { // on a fresh channel, events are reported of calls that pass through after all
				a, b = withoutEvents(a), withoutEvents(b)
			}
			if n, same := firstDifference(a, b); !same {
				t.Errorf("with WithServiceConfig:\n%s\nwith the channel's, %s:\n%s", strings.Join(a[max(0, n-5):min(n+3, len(a))], "\n"),
					way, strings.Join(b[max(0, n-5):min(n+3, len(b))], "\n"))
				t.Logf("configs %v, changed at %v", configs, changes)
			}
		}
	})
}

// withoutEvents removes the events from a transcript.
func withoutEvents(lines []string) []string {
	return slices.DeleteFunc(slices.Clone(lines), func(line string) bool { return !strings.Contains(line, " call ") })
}

// The throttle of a service config keeps its tokens over an Update with the same numbers, and starts full
// with others.
func TestTheThrottleOfAServiceConfig(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(aborted()))
		config := func(attempts int, maxTokens, ratio float64) Option {
			return WithServiceConfig(withThrottle(configOf(retrying(nameDefault, attempts)), maxTokens, ratio))
		}
		r := retrierOf(t, config(5, 6, 1), WithPatience(0))
		cc := server.conn(t, r.DialOptions()...)
		call := func(want int) {
			t.Helper()
			before := len(server.attempts())
			_ = callKinds[0].call(t.Context(), cc, echoMethod)
			if got := len(server.attempts()) - before; got != want {
				t.Errorf("%d attempts, want %d", got, want)
			}
		}
		call(3) // the tokens are 3, half of 6
		update(t, r, config(4, 6, 1))
		call(1)
		update(t, r, config(4, 6, 0.5))
		call(3)
		update(t, r, config(4, 8, 0.5))
		call(4)
		update(t, r, WithServiceConfig(configOf(retrying(nameDefault, 4)))) // the default budget
		call(4)
		call(1)
	})
}

// An outcome is what a caller and the server see of a call, apart from jitter.
type drawnOutcome struct {
	attempts int
	previous []int
	code     codes.Code
	says     string // the end of the error's text
}

// The library obeys a service config as grpc-go's own retries do, apart from what is turned off here:
// waits for a connection and the limit for pushback. No response has headers, because gRPC does not
// retry after them. Both draw their own jitter, so waits are compared with its bounds.
func TestAServiceConfigIsObeyedAsGRPCDoes(t *testing.T) {
	t.Parallel()
	drawConfigs(t, *configDraws, func(t *testing.T, d *rand.Rand) {
		config := drawConfig(d, false, d.IntN(2) == 0)
		for _, e := range config.MethodConfig {
			if e.RetryPolicy != nil && d.IntN(4) == 0 { // the waits shrink, or are limited from the first on
				e.RetryPolicy.BackoffMultiplier = 0.1 + d.Float64()
				e.RetryPolicy.MaxBackoff = drawnDuration(between(d, time.Millisecond, 2*second))
			}
		}
		var calls []*drawnCall
		for range 1 + d.IntN(20) {
			c := drawCall(d)
			c.limit = 0
			c.withoutHeaders() // gRPC does not retry after headers, nor does its throttle count such failures
			calls = append(calls, c)
		}
		var got [2][]drawnOutcome
		for i := range got {
			bubble(t, func(t *testing.T) {
				l := &transcript{start: time.Now()}
				server := serveDrawn(t, calls, l)
				dial := []grpc.DialOption{grpc.WithDefaultServiceConfig(config.String())}
				if i == 0 {
					opts := []Option{WithPatience(0), WithMaxServerDelay(-1), WithServiceConfig(config.String())}
					if config.RetryThrottling == nil {
						opts = append(opts, WithBudget(Unlimited))
					}
					// The methods without a policy are retried here by default, and not by gRPC, whose throttle counts them.
					for _, m := range drawnMethods {
						if e := config.of(m); e == nil || e.RetryPolicy == nil {
							opts = append(opts, WithMethod("/"+drawnService+"/"+m, WithCodes(codes.DataLoss)))
						}
					}
					dial = append(dial, DialOptions(opts...)...)
				}
				cc := server.conn(t, dial...)
				for number, c := range calls {
					before := len(server.attempts())
					err := c.send(t.Context(), number, cc)
					seen := server.attempts()[before:]
					out := drawnOutcome{attempts: len(seen), code: status.Code(err)}
					if err != nil {
						text := status.Convert(err).Message()
						if e := (*Error)(nil); errors.As(err, &e) {
							text = status.Convert(e.Last).Message()
						}
						out.says = text[strings.LastIndex(text, "drawn "):]
					}
					for _, one := range seen {
						out.previous = append(out.previous, one.previous)
					}
					c.checkWaits(t, config, seen)
					got[i] = append(got[i], out)
				}
			})
		}
		for n := range got[0] {
			if a, b := fmt.Sprint(got[0][n]), fmt.Sprint(got[1][n]); a != b {
				t.Errorf("call %d of %s, %s: outcome %s, with gRPC's retries %s\nresponses %+v\nconfig %v", n, calls[n].method,
					calls[n].kind.name, a, b, calls[n].responses, config)
			}
		}
	})
}

// checkWaits compares the waits between attempts with what the config and the server's pushback say.
func (c *drawnCall) checkWaits(t *testing.T, config *drawnConfig, seen []seen) {
	t.Helper()
	since := 0 // retries since the last pushback
	for n := 1; n < len(seen); n++ {
		r, policy := c.responses[n-1], config.of(c.method).RetryPolicy
		wait := seen[n].at - seen[n-1].at - r.after
		if ms, err := strconv.Atoi(r.pushback); err == nil {
			if want := time.Duration(ms) * time.Millisecond; wait != want {
				t.Errorf("a wait of %v, want the pushback's %v", wait, want)
			}
			since = 0
			continue
		}
		backoff := float64(policy.InitialBackoff)
		for range since {
			backoff *= policy.BackoffMultiplier
		}
		backoff = min(backoff, float64(policy.MaxBackoff))
		if float64(wait) < 0.8*backoff-1000 || float64(wait) > 1.2*backoff+1000 {
			t.Errorf("a wait of %v, want %v ± 20%%", wait, time.Duration(backoff))
		}
		since++
	}
}

// Options for other settings of a longer pattern do not change which entry of a service config applies to a function.
func TestTheEntryForAFunction(t *testing.T) {
	config := WithServiceConfig(configOf(retrying(`{"service":"http"}`, 2)))
	for _, pattern := range []string{"/other/", "/http/api.example.com/", "/http/api.example.com/GET"} {
		r := retrierOf(t, config, WithMethod(pattern, WithMaxElapsed(second)))
		if got := r.Policy("/http/api.example.com/GET").MaxAttempts; got != 2 {
			t.Errorf("beside an option for %s: %d attempts, want 2", pattern, got)
		}
	}
}
