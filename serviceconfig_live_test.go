package grpcretry

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry/internal/recorded"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// The tests here are about the service config that a channel's resolver supplies, and changes.

// A liveConfig is a resolver whose service config a test changes.
type liveConfig struct {
	mu     sync.Mutex
	cc     resolver.ClientConn // guarded by mu; nil before the channel is used
	config string              // guarded by mu
}

// live dials a server through a resolver that supplies config after d.
func (f *fixture) live(t *testing.T, d time.Duration, config string, dial ...grpc.DialOption) (*grpc.ClientConn, *liveConfig) {
	t.Helper()
	l, found := &liveConfig{config: config}, manual.NewBuilderWithScheme("live")
	found.BuildCallback = func(_ resolver.Target, cc resolver.ClientConn, _ resolver.BuildOptions) {
		l.built(cc, d)
	}
	return f.connTo(t, "live:///echo", append(dial, grpc.WithResolvers(found))...), l
}

// built supplies the service config to a channel that is used, after d.
func (l *liveConfig) built(cc resolver.ClientConn, d time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.cc = cc
	go func() {
		time.Sleep(d)
		l.mu.Lock()
		defer l.mu.Unlock()
		l.supply()
	}()
}

// supply needs mu.
func (l *liveConfig) supply() {
	_ = l.cc.UpdateState(resolver.State{Addresses: []resolver.Address{{Addr: "echo"}}, ServiceConfig: l.cc.ParseServiceConfig(l.config)})
}

// update changes the service config.
func (l *liveConfig) update(config string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.config = config
	if l.cc != nil {
		l.supply()
	}
}

// set changes the service config, and returns when the channel has it.
func (l *liveConfig) set(config string) {
	l.update(config)
	synctest.Wait()
}

// Names as methodConfig has them.
const (
	nameEcho    = `{"service":"grpcretry.test.v1.EchoService","method":"Echo"}`
	nameService = `{"service":"grpcretry.test.v1.EchoService"}`
	nameDefault = `{}`
)

// retrying is the methodConfig entry of a retryPolicy for ABORTED, which is not retried by default: n
// attempts, with waits of 1 s, 2 s, …
func retrying(name string, n int) string {
	return fmt.Sprintf(`{"name":[%s],"retryPolicy":{"maxAttempts":%d,"initialBackoff":"1s","maxBackoff":"60s","backoffMultiplier":2,`+
		`"retryableStatusCodes":["ABORTED"]}}`, name, n)
}

func configOf(entries ...string) string {
	return `{"methodConfig":[` + strings.Join(entries, ",") + `]}`
}

func aborted() answer { return fail(codes.Aborted, "conflict") }

// even returns a Retrier whose random number is always 0.5, so that waits with [ProportionalJitter]
// are what the policy says, and without patience, so that a target that is failing makes none longer.
func even(t *testing.T, opts ...Option) *Retrier {
	t.Helper()
	r := retrierOf(t, append([]Option{WithBudget(Unlimited), WithPatience(0)}, opts...)...)
	r.random = func() float64 { return 0.5 }
	r.settings.fallback.hedges = Unlimited // a new client could not send any hedge
	update(t, r)
	return r
}

// onlyInterceptors are the dial options of clients that leave gRPC's own retries on.
func (r *Retrier) onlyInterceptors() []grpc.DialOption {
	return []grpc.DialOption{
		grpc.WithChainUnaryInterceptor(r.UnaryClientInterceptor()),
		grpc.WithChainStreamInterceptor(r.StreamClientInterceptor()),
	}
}

// ways are the two ways to install a Retrier.
var ways = map[string]func(*Retrier) []grpc.DialOption{
	"DialOptions":       (*Retrier).DialOptions,
	"interceptors only": (*Retrier).onlyInterceptors,
}

func TestTheChannelsPolicyIsObeyedFromTheFirstCall(t *testing.T) {
	for way, dial := range ways {
		for _, kind := range callKinds {
			for _, resolved := range []time.Duration{0, 3 * second} {
				t.Run(fmt.Sprintf("%s, %s, resolved after %v", way, kind.name, resolved), func(t *testing.T) {
					bubble(t, func(t *testing.T) {
						server := serve(t, always(aborted()))
						cc, _ := server.live(t, resolved, configOf(retrying(nameEcho, 3)), dial(even(t, WithResolverServiceConfig(true)))...)
						for range 2 {
							err := kind.call(t.Context(), cc, echoMethod)
							wantStop(t, err, codes.Aborted, ErrAttemptsExhausted, 3)
						}
						wantTimes(t, server, resolved, resolved+second, resolved+3*second, resolved+3*second, resolved+4*second, resolved+6*second)
						for i, one := range server.attempts() {
							if one.previous != i%3 {
								t.Errorf("attempt %d arrives with %d previous attempts, want %d", i+1, one.previous, i%3)
							}
						}
					})
				})
			}
		}
	}
}

// withThrottle adds a retryThrottling to a service config.
func withThrottle(config string, maxTokens, tokenRatio float64) string {
	return strings.TrimSuffix(config, "}") + fmt.Sprintf(`,"retryThrottling":{"maxTokens":%v,"tokenRatio":%v}}`, maxTokens, tokenRatio)
}

// On a fresh channel the attempt timeout of the first attempt depends on whether another one may follow,
// which is not known yet when the attempt starts.
func TestTheAttemptTimeoutOnAFreshChannel(t *testing.T) {
	for _, limit := range []time.Duration{0, time.Hour} {
		for _, kind := range callKinds {
			for way, dial := range ways {
				t.Run(fmt.Sprintf("limit %v, %s, %s", limit, kind.name, way), func(t *testing.T) {
					for _, tt := range []struct {
						method string
						want   []time.Duration
					}{
						{echoMethod, []time.Duration{0, 6 * second}},
						{putMethod, []time.Duration{0}},
					} {
						bubble(t, func(t *testing.T) {
							server := serve(t, script(ok().after(20*second), ok()))
							cc, _ := server.live(t, 0, configOf(retrying(nameEcho, 3)),
								dial(even(t, Disable(), WithAttemptTimeout(5*second), WithResolverServiceConfig(true)))...)
							ctx := t.Context()
							if limit > 0 {
								limited, cancel := context.WithTimeout(ctx, limit)
								defer cancel()
								ctx = limited
							}
							err := kind.call(ctx, cc, tt.method)
							if cut := tt.method == putMethod && limit == 0; cut != errors.Is(err, ErrAttemptTimeout) || !cut && err != nil {
								t.Errorf("%s = %v", tt.method, err)
							}
							var e *Error
							if errors.As(err, &e) {
								t.Errorf("%s = %v, want the error untouched", tt.method, err)
							}
							wantTimes(t, server, tt.want...)
						})
					}
				})
			}
		}
	}
}

// Nothing that a channel says turns on what an Update has turned off, so that is certain on a fresh channel.
func TestTheSwitchIsOffOnAFreshChannel(t *testing.T) {
	everyKind(t, func(t *testing.T, kind callKind) {
		events := 0
		server := serve(t, always(ok().after(20*second)))
		r := even(t, WithResolverServiceConfig(true), WithObserver(func(context.Context, Event) { events++ }))
		update(t, r, Disable())
		cc, _ := server.live(t, 0, configOf(retrying(nameEcho, 3)), r.DialOptions()...)
		if err := kind.call(t.Context(), cc, echoMethod); err != nil || events != 0 {
			t.Errorf("%d events, %v", events, err)
		}
	})
}

// Outdated retryPolicies are dropped.
func TestOutdatedChannelPoliciesDoNotPileUp(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(ok()))
		r := even(t, WithResolverServiceConfig(true))
		cc, config := server.live(t, 0, configOf(retrying(nameEcho, 2)), r.DialOptions()...)
		most := 0
		for range 2*maxChannelPolicies + 10 {
			if err := callKinds[0].call(t.Context(), cc, echoMethod); err != nil {
				t.Fatal(err)
			}
			config.set(configOf(retrying(nameEcho, 2)))
			most = max(most, len(r.settings.current().channels.Current()))
		}
		if most > maxChannelPolicies || most < 2 {
			t.Errorf("up to %d policies were remembered, want at most %d", most, maxChannelPolicies)
		}
	})
}

// The tests here are about clients that obey a service config but leave gRPC's own retries on, because
// they do not use DialOptions: attempts must not multiply.

// obeying are the options with which a service config is obeyed. Both allow Echo three attempts.
var obeying = map[string]Option{
	"WithServiceConfig":         WithServiceConfig(configOf(retrying(nameEcho, 3))),
	"WithResolverServiceConfig": WithResolverServiceConfig(true),
}

func TestAttemptsDoNotMultiply(t *testing.T) {
	for with, option := range obeying {
		for _, kind := range callKinds {
			for _, tt := range []struct {
				name string
				opts []Option
				call []grpc.CallOption
				want int
			}{
				{"obeyed", nil, nil, 3},
				{"call turned off", nil, []grpc.CallOption{Disable()}, 1},
				{"method turned off", []Option{WithMethod(echoMethod, Disable())}, nil, 1},
				{"the caller wants a large buffer", nil, []grpc.CallOption{grpc.MaxRetryRPCBufferSize(1 << 20)}, 3},
				{"call turned off, and the caller wants a large buffer", nil, []grpc.CallOption{Disable(), grpc.MaxRetryRPCBufferSize(1 << 20)}, 1},
				{"no buffer for streams", []Option{WithBufferLimit(0)}, nil, 0}, // 1 if it is a stream
			} {
				t.Run(with+", "+kind.name+", "+tt.name, func(t *testing.T) {
					bubble(t, func(t *testing.T) {
						server := serve(t, always(aborted()))
						cc, _ := server.live(t, 0, configOf(retrying(nameEcho, 3)), even(t, append(tt.opts, option)...).onlyInterceptors()...)
						want := tt.want
						if want == 0 {
							if want = 3; kind.desc != nil {
								want = 1
							}
						}
						for range 2 {
							before := len(server.attempts())
							if err := kind.call(t.Context(), cc, echoMethod, tt.call...); status.Code(err) != codes.Aborted {
								t.Errorf("err = %v, want ABORTED", err)
							}
							if got := len(server.attempts()) - before; got != want {
								t.Errorf("%d attempts, want %d", got, want)
							}
						}
					})
				})
			}
		}
	}
}

// A policy that the channel gets while a call runs is not added to the library's retries.
func TestAttemptsDoNotMultiplyWhenAPolicyArrives(t *testing.T) {
	withPolicy := configOf(fmt.Sprintf(`{"name":[%s],"retryPolicy":{"maxAttempts":3,"initialBackoff":"0.01s","maxBackoff":"0.01s",`+
		`"backoffMultiplier":1,"retryableStatusCodes":["UNAVAILABLE"]}}`, nameDefault))
	for _, obeys := range []bool{false, true} {
		for _, kind := range callKinds {
			for _, during := range []int{1, 2} {
				for _, connected := range []bool{false, true} {
					t.Run(fmt.Sprintf("%s, obeyed %v, in attempt %d, connected %v", kind.name, obeys, during, connected), func(t *testing.T) {
						bubble(t, func(t *testing.T) {
							var l *liveConfig
							server := serve(t, func(n int) answer {
								if n == during {
									l.update(withPolicy)
								}
								return unavailable().after(second / 10)
							})
							var cc *grpc.ClientConn
							r := even(t, WithResolverServiceConfig(obeys), WithMaxAttempts(4), WithBudget(Unlimited))
							cc, l = server.live(t, 0, `{}`, r.onlyInterceptors()...)
							if connected {
								connect(t, cc)
							}
							if err := kind.call(t.Context(), cc, echoMethod); status.Code(err) != codes.Unavailable {
								t.Errorf("err = %v, want UNAVAILABLE", err)
							}
							if got := len(server.attempts()); got > 4 || during == 2 && got < 4 {
								t.Errorf("%d attempts, want 4, or less if the policy came in time to count", got)
							}
						})
					})
				}
			}
		}
	}
}

// A call that the library retries is not left to gRPC because a policy arrives, and so keeps its attempt timeout.
func TestACallThatIsRetriedKeepsItsAttemptTimeoutWhenAPolicyArrives(t *testing.T) {
	for _, kind := range callKinds[:2] {
		t.Run(kind.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				var network cable
				var l *liveConfig
				server := serve(t, func(n int) answer {
					switch n {
					case 1:
						network.cut() // so that the call does not know the channel's config when it is retried
						return hang()
					case 2:
						return hang()
					default:
						return ok()
					}
				})
				var cc *grpc.ClientConn
				r := even(t, WithAttemptTimeout(second), WithBackoff(Constant(second)))
				cc, l = server.live(t, 0, `{}`, append(r.onlyInterceptors(), network.to(server))...)
				connect(t, cc)
				time.AfterFunc(second/2, func() { l.update(configOf(retrying(nameDefault, 3))) })
				if err := kind.call(t.Context(), cc, echoMethod); err != nil {
					t.Error(err)
				}
				if got := len(server.attempts()); got != 3 {
					t.Errorf("%d attempts, want 3", got)
				}
			})
		})
	}
}

// gRPC applies to an attempt what the config said when the attempt was sent. A config that arrives later does not keep the attempt timeout
// from ending a call that has no deadline.
func TestAConfigThatArrivesDoesNotTurnTheAttemptTimeoutOff(t *testing.T) {
	for _, tt := range []struct {
		name   string
		config string
		dial   func(*Retrier) []grpc.DialOption
		opts   []Option
		want   int // attempts
	}{
		{"policy", configOf(retrying(nameDefault, 3)), (*Retrier).onlyInterceptors, nil, 4},
		{"policy, unsent only", configOf(retrying(nameDefault, 3)), (*Retrier).onlyInterceptors, []Option{WithUnsentOnly(true)}, 1},
		{"timeout, unsent only", `{"methodConfig":[{"name":[{}],"timeout":"30s"}]}`, (*Retrier).DialOptions, []Option{WithUnsentOnly(true)}, 1},
	} {
		for _, kind := range callKinds[:2] {
			t.Run(tt.name+", "+kind.name, func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					server := serve(t, always(hang()))
					cc, l := server.live(t, 0, `{}`, tt.dial(even(t, append(tt.opts, WithAttemptTimeout(2*second))...))...)
					connect(t, cc)
					time.AfterFunc(second, func() { l.update(tt.config) })
					if err := kind.call(t.Context(), cc, echoMethod); !errors.Is(err, ErrAttemptTimeout) {
						t.Errorf("err = %v, want an attempt timeout", err)
					}
					if got := len(server.attempts()); got != tt.want {
						t.Errorf("%d attempts, want %d", got, tt.want)
					}
				})
			})
		}
	}
}

// A channel that has been idle has an outdated config. That a retryPolicy in it leaves the call to gRPC is asked again.
func TestAnOutdatedPolicyDoesNotTurnTheAttemptTimeoutOff(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(ok(), hang(), hang(), hang(), hang()))
		cc, l := server.live(t, 3*second, configOf(retrying(nameDefault, 3)),
			append(even(t, WithAttemptTimeout(2*second), WithPatience(time.Minute)).onlyInterceptors(), grpc.WithIdleTimeout(time.Minute))...)
		if err := callKinds[0].call(t.Context(), cc, echoMethod); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Hour)
		l.set(`{}`)
		if err := callKinds[0].call(t.Context(), cc, echoMethod); !errors.Is(err, ErrAttemptTimeout) {
			t.Errorf("err = %v, want an attempt timeout", err)
		}
	})
}

// A call that is never left to gRPC keeps gRPC from all of its attempts, also if it is the first that reaches a server.
func TestUnsentOnlyRunsOnceWhenAPolicyArrives(t *testing.T) {
	policy := configOf(fmt.Sprintf(`{"name":[%s],"retryPolicy":{"maxAttempts":4,"initialBackoff":"0.01s","maxBackoff":"0.01s",`+
		`"backoffMultiplier":1,"retryableStatusCodes":["UNAVAILABLE"]}}`, nameDefault))
	t.Run("while the call waits for a connection", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			server := serve(t, always(unavailable()))
			network := &link{listener: server.listener}
			slow := grpc.WithChainUnaryInterceptor(func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn,
				invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
				if a, _ := AttemptFromContext(ctx); a.Number == 1 {
					time.Sleep(second) // for a token, for example
				}
				return invoker(ctx, method, req, reply, cc, opts...)
			})
			r := even(t, WithUnsentOnly(true), WithPatience(time.Minute))
			cc, l := server.live(t, 0, `{}`, append(r.onlyInterceptors(), slow, redials, grpc.WithContextDialer(network.dial))...)
			connect(t, cc)
			time.AfterFunc(second/2, network.cut)
			time.AfterFunc(3*second, func() { network.mend(); l.update(policy) })
			if err := callKinds[0].call(t.Context(), cc, echoMethod); !errors.Is(err, ErrMayHaveRun) {
				t.Errorf("err = %v, want ErrMayHaveRun", err)
			}
			if got := len(server.attempts()); got != 1 {
				t.Errorf("the method ran %d times", got)
			}
		})
	})
	t.Run("when the channel has been idle", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			server := serve(t, script(unavailable().pushback("5000"), unavailable(), unavailable(), unavailable(), unavailable()))
			cc, l := server.live(t, 0, `{}`, append(even(t, WithUnsentOnly(true)).onlyInterceptors(), grpc.WithIdleTimeout(2*second))...)
			connect(t, cc)
			time.AfterFunc(3*second, func() { l.update(policy) }) // so that the channel has it with the next resolution
			if err := callKinds[0].call(t.Context(), cc, echoMethod); !errors.Is(err, ErrMayHaveRun) {
				t.Errorf("err = %v, want ErrMayHaveRun", err)
			}
			if got := len(server.attempts()); got != 2 {
				t.Errorf("the method ran %d times, and the server has asked for 2", got)
			}
		})
	})
}

// The application may receive, or wait for headers, before it sends anything.
func TestAttemptsOfAStreamThatHasSentNothingDoNotMultiply(t *testing.T) {
	for _, steps := range []string{"recv ABORTED", "close; recv ABORTED", "header", "wait 1s; try a; recv ABORTED"} {
		for with, option := range obeying {
			for off, want := range map[bool]int{false: 3, true: 1} {
				t.Run(fmt.Sprintf("%s, %s, off %v", steps, with, off), func(t *testing.T) {
					bubble(t, func(t *testing.T) {
						server := serveStreams(t, func(int, grpc.ServerStream) error { return status.Error(codes.Aborted, "conflict") })
						config := configOf(retrying(nameDefault, 3))
						opts := []Option{option}
						if with == "WithServiceConfig" {
							opts = []Option{WithServiceConfig(config)}
						}
						var call []grpc.CallOption
						if off {
							call = append(call, Disable())
						}
						cc, _ := server.live(t, 0, config, even(t, opts...).onlyInterceptors()...)
						for range 2 {
							before := len(server.attempts())
							app := openOn(t, cc, bidiStream, call...)
							if steps == "header" {
								_, _ = app.stream.Header()
								app.play(t, "recv ABORTED")
							} else {
								app.play(t, steps)
							}
							if got := len(server.attempts()) - before; got != want {
								t.Errorf("%d attempts, want %d", got, want)
							}
						}
					})
				})
			}
		}
	}
}

const builtInPolicy = `{"methodConfig": [{
	"name": [{"service": "grpcretry.test.v1.EchoService", "method": "Echo"}],
	"retryPolicy": {"maxAttempts": 3, "initialBackoff": "1s", "maxBackoff": "1s",
	"backoffMultiplier": 1, "retryableStatusCodes": ["UNAVAILABLE"]}
}]}`

func TestMethodsWithABuiltInPolicyAreLeftToGRPC(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(unavailable()))
		logs := &logRecorder{}
		budget := &aBudget{}
		cc := server.conn(t, grpc.WithDefaultServiceConfig(builtInPolicy), grpc.WithChainUnaryInterceptor(
			UnaryClientInterceptor(WithMaxAttempts(5), WithLogger(slog.New(logs)), WithBudget(budget))))
		client := echov1.NewEchoServiceClient(cc)
		for range 3 { // from the first call of a fresh channel on
			before := len(server.attempts())
			_, err := client.Echo(t.Context(), request())
			if got := len(server.attempts()) - before; got != 3 {
				t.Errorf("%d attempts, want the 3 of gRPC's policy", got)
			}
			var e *Error
			if errors.As(err, &e) || status.Code(err) != codes.Unavailable {
				t.Errorf("err = %v, want gRPC's own", err)
			}
		}
		if got := logs.lines(); len(got) != 1 || !strings.Contains(got[0], "retryPolicy") || !strings.Contains(got[0], "/Echo") {
			t.Errorf("logged %q, want one line", got)
		}
		// Once the service config is known, calls pass through.
		if want := []Outcome{{Attempt: 1, Result: Ignored}}; !slices.Equal(budget.heard, want) || budget.asked != nil {
			t.Errorf("budget heard %v and was asked at %v, want %v and never", budget.heard, budget.asked, want)
		}
		// Another method of the same service is ours.
		before := len(server.attempts())
		client.Put(t.Context(), request())
		if got := len(server.attempts()) - before; got != 5 {
			t.Errorf("%d attempts of a method without a policy, want 5", got)
		}
	})
}

// Whether gRPC retries a method itself is known when the channel is ready: until then there
// is no hedge, which could not be sent anyway.
func TestNoHedgeBeforeTheServiceConfigIsKnown(t *testing.T) {
	for _, tt := range []struct {
		name   string
		config string
		want   []time.Duration
	}{
		{"left to gRPC", `{"methodConfig":[{"name":[{}],"retryPolicy":{"maxAttempts":2,"initialBackoff":"1s","maxBackoff":"1s",` +
			`"backoffMultiplier":1,"retryableStatusCodes":["ABORTED"]}}]}`, []time.Duration{3 * second / 2}},
		{"hedged", `{}`, []time.Duration{3 * second / 2, 2 * second}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, script(says("a").after(2*second), says("b").after(time.Hour)))
				cc, _ := server.live(t, 3*second/2, tt.config,
					grpc.WithChainUnaryInterceptor(UnaryClientInterceptor(hedged(2, Hedging{Delay: HedgeAfter(second)}))))
				reply, err := echov1.NewEchoServiceClient(cc).Echo(t.Context(), request())
				if reply.GetMessage() != "a" || err != nil {
					t.Errorf("Echo = %v, %v, want a", reply, err)
				}
				wantTimes(t, server, tt.want...)
			})
		})
	}
}

func TestBuiltInPolicyWhereBuiltInRetriesAreOff(t *testing.T) {
	for _, tt := range []struct {
		name string
		dial []grpc.DialOption
	}{
		{"DialOptions", DialOptions(WithBackoff(Constant(second)), WithMaxAttempts(5), WithBudget(Unlimited))},
		{"WithBuiltInRetryDisabled", []grpc.DialOption{grpc.WithDisableRetry(), grpc.WithChainUnaryInterceptor(
			UnaryClientInterceptor(WithBackoff(Constant(second)), WithMaxAttempts(5), WithBudget(Unlimited), WithBuiltInRetryDisabled()))}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, always(unavailable()))
				cc := server.conn(t, append(tt.dial, grpc.WithDefaultServiceConfig(builtInPolicy))...)
				_, err := echov1.NewEchoServiceClient(cc).Echo(t.Context(), request())
				wantStop(t, err, codes.Unavailable, ErrAttemptsExhausted, 5)
				if got := len(server.attempts()); got != 5 {
					t.Errorf("%d attempts, want our 5", got)
				}
			})
		})
	}
}

// On a channel that has its service config, such calls pass through: they are not hedged, have no attempt timeout, and
// are not reported.
func TestMethodsLeftToGRPCPassThrough(t *testing.T) {
	for name, opts := range map[string][]Option{
		"retried":         nil,
		"attempt timeout": {WithAttemptTimeout(second / 2)},
		"hedged":          {hedged(9, Hedging{Delay: HedgeAfter(second / 4)})},
	} {
		for _, kind := range callKinds {
			t.Run(name+", "+kind.name, func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					server, logs, meters := serve(t, always(aborted().after(second))), &logRecorder{}, &recorded.Meters{}
					r := even(t, append(opts, WithLogger(slog.New(logs)), WithMeterProvider(meters), WithObserver(func(_ context.Context, e Event) {
						t.Errorf("%v is reported", e.Kind)
					}))...)
					cc, _ := server.live(t, 0, configOf(retrying(nameEcho, 2)), r.onlyInterceptors()...)
					connect(t, cc)
					err := kind.call(t.Context(), cc, echoMethod)
					var e *Error
					if got := len(server.attempts()); got != 2 || status.Code(err) != codes.Aborted || errors.As(err, &e) {
						t.Errorf("%d attempts and %v, want the 2 of gRPC's policy and its own error", got, err)
					}
					wantLines(t, logs, "WARN…leaving it to gRPC")
					wantMetrics(t, meters, "grpcretry.passed_calls 1 grpcretry.target=live:///echo rpc.method=other")
				})
			})
		}
	}
}

const oneSecond = `{"methodConfig":[{"name":[{}],"timeout":"1s"}]}`

// With its own retries, gRPC ends a call after the timeout of its service config.
func TestTheServiceConfigsTimeoutIsTheCalls(t *testing.T) {
	const tenth = second / 10
	slow := always(unavailable().after(8 * tenth))
	waits := []Option{WithBackoff(Constant(tenth)), WithBudget(Unlimited)}
	hedging := []Option{WithPolicy(Policy{MaxAttempts: 4,
		Hedging: &Hedging{Delay: HedgeAfter(3 * tenth), AllMethodsAreSafe: true, Budget: Unlimited},
		Codes:   []codes.Code{codes.DeadlineExceeded}}), WithBudget(Unlimited)}
	for _, tt := range []struct {
		name   string
		script func(int) answer
		opts   []Option
		limit  time.Duration // of the caller; 0 for none
		want   []time.Duration
		ends   time.Duration
	}{
		{"retried", slow, waits, 0, []time.Duration{0, 9 * tenth}, second},
		{"with a deadline that is later", slow, waits, time.Hour, []time.Duration{0, 9 * tenth}, second},
		{"with a deadline that is earlier", slow, waits, 95 * second / 100, []time.Duration{0, 9 * tenth}, 95 * second / 100},
		{"with an attempt timeout", always(hang()), append(waits, WithAttemptTimeout(6*tenth)), 0, []time.Duration{0, 7 * tenth}, second},
		{"with a code for it", always(hang()), append(waits, WithCodes(codes.DeadlineExceeded)), 0, []time.Duration{0}, second},
		{"hedged", always(hang()), hedging, 0, []time.Duration{0, 3 * tenth, 6 * tenth, 9 * tenth}, second},
	} {
		for _, kind := range callKinds[:2] {
			t.Run(tt.name+", "+kind.name, func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					server := serve(t, tt.script)
					cc, _ := server.live(t, 0, oneSecond, DialOptions(tt.opts...)...)
					connect(t, cc)
					ctx := t.Context()
					if tt.limit > 0 {
						limited, cancel := context.WithTimeout(ctx, tt.limit)
						defer cancel()
						ctx = limited
					}
					err := kind.call(ctx, cc, echoMethod)
					if got := time.Since(server.start); got != tt.ends || status.Code(err) != codes.DeadlineExceeded {
						t.Errorf("the call ended after %v with %v, want DEADLINE_EXCEEDED after %v", got, err, tt.ends)
					}
					if e := asError(t, err); !errors.Is(err, context.DeadlineExceeded) || len(e.Attempts) != len(tt.want) {
						t.Errorf("err = %v of %d attempts, want %d and context.DeadlineExceeded", err, len(e.Attempts), len(tt.want))
					}
					wantTimes(t, server, tt.want...)
				})
			})
		}
	}
}

// The context that has this timeout ends with the call.
func TestTheServiceConfigsTimeoutLeavesNoContext(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(unavailable(), ok()))
		var last context.Context
		cc, _ := server.live(t, 0, oneSecond, append(DialOptions(WithBackoff(Constant(second/2))), grpc.WithChainUnaryInterceptor(
			func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, next grpc.UnaryInvoker, opts ...grpc.CallOption) error {
				last = ctx
				return next(ctx, method, req, reply, cc, opts...)
			}))...)
		connect(t, cc)
		if err := echo(t.Context(), echov1.NewEchoServiceClient(cc)); err != nil {
			t.Fatal(err)
		}
		if _, limited := last.Deadline(); !limited || last.Err() == nil {
			t.Errorf("after the call, its context is limited: %t, and its end is %v", limited, last.Err())
		}
	})
}

// As with a deadline of the caller, no wait is started that would reach the end.
func TestAWaitThatReachesTheServiceConfigsTimeoutIsNotStarted(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(unavailable()))
		cc, _ := server.live(t, 0, oneSecond, DialOptions(WithBackoff(Constant(second)))...)
		err := callKinds[0].call(t.Context(), cc, echoMethod)
		wantStop(t, err, codes.Unavailable, ErrDeadline, 1)
		if !strings.Contains(err.Error(), "db-down") {
			t.Errorf("err = %v, want the server's last word", err)
		}
		wantTimes(t, server, 0)
	})
}

// With WithResolverServiceConfig, calls are hedged once the channel's service config is known.
func TestHedgesFollowWhenTheServiceConfigIsKnown(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(says("a").after(time.Minute), says("b")))
		cc, _ := server.live(t, 3*second/2, `{}`, DialOptions(WithResolverServiceConfig(true), hedged(2, Hedging{Delay: HedgeAfter(second)}))...)
		if err := echo(t.Context(), echov1.NewEchoServiceClient(cc)); err != nil {
			t.Error(err)
		}
		wantTimes(t, server, 3*second/2, 2*second)
	})
}

// A call that turns out to pass through has the reason of its caller, if that has ended it.
func TestACallThatPassesThroughAfterAllIsEndedByItsCaller(t *testing.T) {
	for _, kind := range callKinds {
		t.Run(kind.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				var reasons []error
				server := serve(t, always(hang()))
				cc, _ := server.live(t, second, `{}`, even(t, Disable(), WithResolverServiceConfig(true),
					WithObserver(func(_ context.Context, e Event) {
						if e.Kind == Decision || e.Kind == CallEnd {
							reasons = append(reasons, e.Reason)
						}
					})).DialOptions()...)
				ctx, cancel := context.WithTimeout(t.Context(), 3*second)
				defer cancel()
				if err := kind.call(ctx, cc, echoMethod); status.Code(err) != codes.DeadlineExceeded {
					t.Errorf("err = %v, want DEADLINE_EXCEEDED", err)
				}
				if want := []error{context.DeadlineExceeded, context.DeadlineExceeded}; !slices.Equal(reasons, want) {
					t.Errorf("the reasons are %v, want %v", reasons, want)
				}
			})
		})
	}
}

// Its attempts are shown like those of any other call.
func TestACallThatPassesThroughAfterAllShowsItsAttempts(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server, start := serve(t, always(unavailable())), time.Now()
		var unsent []bool
		observe := func(_ context.Context, e Event) {
			for _, a := range e.Attempts {
				unsent = append(unsent, a.Unsent)
			}
		}
		r := even(t, Disable(), WithResolverServiceConfig(true), WithPatience(time.Minute), WithObserver(observe))
		cc, live := server.live(t, 0, builtInPolicy, append(r.DialOptions(),
			grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
				if time.Since(start) < 2*second {
					return nil, errors.New("down")
				}
				return server.listener.DialContext(ctx)
			}))...)
		defer time.AfterFunc(second, func() { live.update(`{}`) }).Stop()
		var e *Error
		if err := callKinds[0].call(t.Context(), cc, echoMethod); status.Code(err) != codes.Unavailable || errors.As(err, &e) {
			t.Errorf("err = %v, want the server's", err)
		}
		if want := []bool{true, false}; !slices.Equal(unsent, want) {
			t.Errorf("the attempts shown were unsent: %v, want %v", unsent, want)
		}
	})
}
