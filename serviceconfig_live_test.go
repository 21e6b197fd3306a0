package grpcretry

import (
	"context"
	"errors"
	"fmt"
	"io"
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
	time.AfterFunc(d, func() { l.mu.Lock(); defer l.mu.Unlock(); l.supply() })
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
	r, err := New(append([]Option{WithBudget(Unlimited), WithPatience(0)}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
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

// callKind is a way to call Echo.
type callKind struct {
	name string
	desc *grpc.StreamDesc // nil for a unary call
}

var callKinds = []callKind{{"unary", nil}, {"server stream", serverStream}, {"client stream", clientStream}, {"bidi stream", bidiStream}}

// call makes a call to its end.
func (k callKind) call(ctx context.Context, cc *grpc.ClientConn, method string, opts ...grpc.CallOption) error {
	if k.desc == nil {
		return cc.Invoke(ctx, method, request(), &echov1.EchoResponse{}, opts...)
	}
	stream, err := cc.NewStream(ctx, k.desc, method, opts...)
	if err != nil {
		return err
	}
	if err := stream.SendMsg(request()); err != nil && err != io.EOF {
		return err
	}
	stream.CloseSend()
	for err == nil {
		err = stream.RecvMsg(&echov1.EchoResponse{})
		if err == nil && !k.desc.ServerStreams {
			return nil
		}
	}
	if err == io.EOF {
		return nil
	}
	return err
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

// A call that starts on a channel with a connection obeys the service config of that time.
func TestACallInFlightKeepsTheChannelsPolicy(t *testing.T) {
	const half = second / 2
	slow := always(aborted().after(half))
	for _, tt := range []struct {
		name          string
		before, after string
		want          int // attempts of the call in flight
		then          int // attempts of the next call
	}{
		{"changed", configOf(retrying(nameEcho, 3)), configOf(retrying(nameEcho, 2)), 3, 2},
		{"added", configOf(), configOf(retrying(nameEcho, 3)), 1, 3},
		{"removed", configOf(retrying(nameEcho, 3)), configOf(), 3, 1},
		{"added for another scope", configOf(retrying(nameService, 3)), configOf(retrying(nameService, 3), retrying(nameEcho, 4)), 3, 4},
		{"hidden by an entry without a policy", configOf(retrying(nameService, 3)),
			configOf(retrying(nameService, 3), `{"name":[`+nameEcho+`]}`), 3, 1},
	} {
		for _, kind := range callKinds {
			for off, opts := range map[string][]Option{"": nil, ", disabled in Go": {Disable()}} {
				t.Run(fmt.Sprintf("%s, %s%s", tt.name, kind.name, off), func(t *testing.T) {
					bubble(t, func(t *testing.T) {
						server := serve(t, slow)
						cc, config := server.live(t, 0, tt.before, even(t, append(opts, WithResolverServiceConfig(true))...).DialOptions()...)
						connect(t, cc)
						time.AfterFunc(half/2, func() { config.update(tt.after) })
						_ = kind.call(t.Context(), cc, echoMethod)
						if got := len(server.attempts()); got != tt.want {
							t.Errorf("%d attempts of the call in flight, want %d", got, tt.want)
						}
						before := len(server.attempts())
						_ = kind.call(t.Context(), cc, echoMethod)
						if got := len(server.attempts()) - before; got != tt.then {
							t.Errorf("%d attempts of the next call, want %d", got, tt.then)
						}
					})
				})
			}
		}
	}
}

// The same, if WithServiceConfig hedges the method and the channel does not.
func TestACallThatTurnsOutNotToBeHedgedKeepsTheChannelsPolicy(t *testing.T) {
	hedging := WithServiceConfig(`{"methodConfig":[{"name":[{}],"hedgingPolicy":{"maxAttempts":5,"hedgingDelay":"100s"}}]}`)
	bubble(t, func(t *testing.T) {
		server := serve(t, always(aborted()))
		cc, config := server.live(t, 0, configOf(retrying(nameEcho, 3)), append(even(t, WithResolverServiceConfig(true), hedging).DialOptions(),
			belowUnary(func(_ context.Context, next func(context.Context) error) error { return next(context.Background()) }))...)
		time.AfterFunc(second/2, func() { config.update(configOf(retrying(nameEcho, 2))) })
		_ = echoOnce(t.Context(), cc, "unary")
		wantTimes(t, server, 0, second, 3*second)
	})
}

// As in gRPC, a service config with an error changes nothing.
func TestAServiceConfigWithAnErrorKeepsTheOldOne(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(aborted()))
		cc, config := server.live(t, 0, configOf(retrying(nameEcho, 2)), even(t, WithResolverServiceConfig(true)).DialOptions()...)
		_ = echoOnce(t.Context(), cc, "unary")
		config.set(`{"methodConfig":[{"name":[{}],"retryPolicy":{"maxAttempts":1}}]}`)
		_ = echoOnce(t.Context(), cc, "unary")
		wantTimes(t, server, 0, second, second, 2*second)
	})
}

// The narrower scope wins; of two equal ones, Go's.
func TestScopesOfTheChannelsPolicy(t *testing.T) {
	all := WithMaxAttempts(6)
	service := WithMethod("/grpcretry.test.v1.EchoService/", WithMaxAttempts(7))
	method := WithMethod(echoMethod, WithMaxAttempts(8))
	config := func(name string, n int) Option { return WithServiceConfig(configOf(retrying(name, n))) }
	for _, tt := range []struct {
		name    string
		channel string
		opts    []Option
		want    int
	}{
		{"default", nameDefault, nil, 2},
		{"default, all in Go", nameDefault, []Option{all}, 6},
		{"service, all in Go", nameService, []Option{all}, 2},
		{"service, service in Go", nameService, []Option{service}, 7},
		{"method, service in Go", nameEcho, []Option{service}, 2},
		{"method, method in Go", nameEcho, []Option{service, method}, 8},
		{"method, all but the method in Go", nameEcho, []Option{all, service}, 2},
		{"default, default in WithServiceConfig", nameDefault, []Option{config(nameDefault, 5)}, 2},
		{"default, service in WithServiceConfig", nameDefault, []Option{config(nameService, 5)}, 2},
		{"default, method in WithServiceConfig", nameDefault, []Option{config(nameEcho, 5)}, 2},
		{"method, default in WithServiceConfig", nameEcho, []Option{config(nameDefault, 5)}, 2},
		{"another method, default in WithServiceConfig", `{"service":"other"}`, []Option{config(nameDefault, 5)}, 5},
		{"another method, method in WithServiceConfig, method in Go", `{"service":"other"}`, []Option{config(nameEcho, 5), method}, 8},
		{"service, disabled for all", nameService, []Option{Disable()}, 2},
		{"default, disabled for all", nameDefault, []Option{Disable()}, 1},
		{"service, disabled for the method", nameService, []Option{WithMethod(echoMethod, Disable())}, 1},
	} {
		for _, fresh := range []bool{true, false} {
			for way, dial := range ways {
				t.Run(fmt.Sprintf("%s, fresh %v, %s", tt.name, fresh, way), func(t *testing.T) {
					bubble(t, func(t *testing.T) {
						server := serve(t, always(aborted()))
						opts := append([]Option{WithCodes(codes.Aborted), WithBackoff(Constant(second)), WithResolverServiceConfig(true)}, tt.opts...)
						cc, _ := server.live(t, 0, configOf(retrying(tt.channel, 2)), dial(even(t, opts...))...)
						if !fresh {
							connect(t, cc)
						}
						_ = echoOnce(t.Context(), cc, "unary")
						if got := len(server.attempts()); got != tt.want {
							t.Errorf("%d attempts, want %d", got, tt.want)
						}
					})
				})
			}
		}
	}
}

// A call's own options win over everything, on a fresh channel as well.
func TestACallsOwnOptionsWinOverTheChannel(t *testing.T) {
	for _, tt := range []struct {
		name string
		opt  CallOption
		want int
	}{{"more", WithMaxAttempts(4), 4}, {"off", Disable(), 1}} {
		for _, fresh := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, fresh %v", tt.name, fresh), func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					server := serve(t, always(aborted()))
					cc, _ := server.live(t, 0, configOf(retrying(nameEcho, 2)), even(t, WithResolverServiceConfig(true)).onlyInterceptors()...)
					if !fresh {
						connect(t, cc)
					}
					_ = echoOnce(t.Context(), cc, "unary", tt.opt)
					if got := len(server.attempts()); got != tt.want {
						t.Errorf("%d attempts, want %d", got, tt.want)
					}
				})
			})
		}
	}
}

// withThrottle adds a retryThrottling to a service config.
func withThrottle(config string, maxTokens, tokenRatio float64) string {
	return strings.TrimSuffix(config, "}") + fmt.Sprintf(`,"retryThrottling":{"maxTokens":%v,"tokenRatio":%v}}`, maxTokens, tokenRatio)
}

// Budgets keep their state when the resolver supplies its service config again; gRPC's throttle
// starts full.
func TestBudgetsKeepTheirStateOverARefresh(t *testing.T) {
	perTarget, err := NewThrottle(4, 1)
	if err != nil {
		t.Fatal(err)
	}
	policy := configOf(retrying(nameEcho, 5))
	for _, tt := range []struct {
		name   string
		config string
		opts   []Option // nil for plain gRPC
		want   []int    // attempts of each call; the config is refreshed after the second
	}{
		{"gRPC", withThrottle(policy, 4, 1), nil, []int{2, 1, 2, 1}},
		{"a throttle in Go", policy, []Option{WithBudget(perTarget)}, []int{2, 1, 1, 1}},
		{"the default budget", policy, []Option{}, []int{4, 1, 1, 1}},
		{"a throttle in WithServiceConfig", withThrottle(policy, 4, 1), []Option{WithServiceConfig(withThrottle(policy, 4, 1))},
			[]int{2, 1, 1, 1}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, always(aborted()))
				var dial []grpc.DialOption
				if tt.opts != nil {
					dial = DialOptions(append(tt.opts, WithResolverServiceConfig(true))...)
				}
				cc, config := server.live(t, 0, tt.config, dial...)
				var got []int
				for i := range tt.want {
					if i == 2 {
						config.set(tt.config)
					}
					before := len(server.attempts())
					_ = echoOnce(t.Context(), cc, "unary")
					got = append(got, len(server.attempts())-before)
				}
				if !slices.Equal(got, tt.want) {
					t.Errorf("calls made %v attempts, want %v", got, tt.want)
				}
			})
		})
	}
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

// A method that Go hedges stays hedged, with the attempts of the channel's retryPolicy; one that WithServiceConfig
// hedges follows the channel's retryPolicy.
func TestHedgedMethodsAndTheChannelsPolicy(t *testing.T) {
	const config = `{"methodConfig":[{"name":[` + nameEcho +
		`],"hedgingPolicy":{"maxAttempts":3,"hedgingDelay":"%s","nonFatalStatusCodes":["ABORTED"]}}]}`
	hedging := Policy{MaxAttempts: 3, Codes: []codes.Code{codes.Aborted},
		Hedging: &Hedging{Delay: HedgeAfter(second / 2), AllMethodsAreSafe: true, Budget: Unlimited}}
	slow := always(aborted().after(10 * second))
	for _, tt := range []struct {
		name string
		opt  Option
		want []time.Duration
	}{
		{"in Go", WithPolicy(hedging), []time.Duration{0, second / 2}},
		{"in WithServiceConfig", WithServiceConfig(fmt.Sprintf(config, "0.5s")), []time.Duration{0, 11 * second}},
		{"in WithServiceConfig, without a delay", WithServiceConfig(fmt.Sprintf(config, "0s")), []time.Duration{0, 11 * second}},
	} {
		for way, dial := range ways {
			for _, kind := range []callKind{callKinds[0], callKinds[1]} {
				for _, resolved := range []time.Duration{0, 3 * second} {
					for _, fresh := range []bool{true, false} {
						t.Run(fmt.Sprintf("%s, %s, %s, resolved after %v, fresh %v", tt.name, way, kind.name, resolved, fresh), func(t *testing.T) {
							bubble(t, func(t *testing.T) {
								server := serve(t, slow)
								cc, _ := server.live(t, resolved, configOf(retrying(nameEcho, 2)), dial(even(t, tt.opt, WithResolverServiceConfig(true)))...)
								if !fresh {
									connect(t, cc)
								}
								_ = kind.call(t.Context(), cc, echoMethod)
								first := server.times()[0]
								var want []time.Duration
								for _, d := range tt.want {
									want = append(want, first+d)
								}
								if fresh && resolved > 0 && tt.name == "in Go" { // hedges that are due while the channel connects are put off
									want = server.times()
									if len(want) != 2 || want[1]-first >= 10*second {
										t.Errorf("attempts at %v, want two, with the second before the first has failed", want)
									}
								}
								wantTimes(t, server, want...)
							})
						})
					}
				}
			}
		}
	}
}

// Update(Disable()) turns off what the channel's service config turns on.
func TestUpdateTurnsTheChannelsPolicyOff(t *testing.T) {
	for way, dial := range ways {
		for _, kind := range callKinds {
			t.Run(way+", "+kind.name, func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					server := serve(t, always(aborted()))
					r := even(t, WithResolverServiceConfig(true))
					if err := r.Update(Disable()); err != nil {
						t.Fatal(err)
					}
					cc, _ := server.live(t, 0, configOf(retrying(nameEcho, 3)), dial(r)...)
					for _, want := range []int{1, 1} {
						before := len(server.attempts())
						err := kind.call(t.Context(), cc, echoMethod)
						wantUntouched(t, err, codes.Aborted, "conflict")
						if got := len(server.attempts()) - before; got != want {
							t.Errorf("%d attempts, want %d", got, want)
						}
					}
					if err := r.Update(WithMaxAttempts(4)); err != nil {
						t.Fatal(err)
					}
					before := len(server.attempts())
					_ = kind.call(t.Context(), cc, echoMethod)
					if got := len(server.attempts()) - before; got != 3 {
						t.Errorf("%d attempts, want the channel's 3 again", got)
					}
				})
			})
		}
	}
}

// Outdated retryPolicies are dropped.
func TestOutdatedChannelPoliciesDoNotPileUp(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(ok()))
		r := even(t, WithResolverServiceConfig(true))
		cc, config := server.live(t, 0, configOf(retrying(nameEcho, 2)), r.DialOptions()...)
		most := 0
		for range 2*maxChannelPolicies + 10 {
			if err := echoOnce(t.Context(), cc, "unary"); err != nil {
				t.Fatal(err)
			}
			config.set(configOf(retrying(nameEcho, 2)))
			most = max(most, len(r.settings.current().channels.known))
		}
		if most > maxChannelPolicies || most < 2 {
			t.Errorf("up to %d policies were remembered, want at most %d", most, maxChannelPolicies)
		}
	})
}

func TestTheChannelsPolicyAllocatesNothing(t *testing.T) {
	server := serve(t, always(ok()))
	r := even(t, WithResolverServiceConfig(true))
	cc, _ := server.live(t, 0, configOf(retrying(nameEcho, 2)), r.DialOptions()...)
	connect(t, cc)
	if got := testing.AllocsPerRun(100, func() {
		ch := r.channelOf(cc, echoMethod)
		if p, err := r.settings.current().forCall(ch, echoMethod, nil); err != nil || p.MaxAttempts != 2 {
			t.Errorf("policy %v, %v, want 2 attempts", p, err)
		}
	}); got != 0 {
		t.Errorf("%v allocations, want none", got)
	}
}
