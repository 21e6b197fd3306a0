package grpcretry

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"runtime"
	"slices"
	"strconv"
	"testing"
	"time"

	metricnoop "go.opentelemetry.io/otel/metric/noop"
	"go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"

	"github.com/grpcretry/grpcretry/internal/layers"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// A plain call knows what prepare would have found out, whatever the options.
func TestPlainCallsKnowWhatPrepareFindsOut(t *testing.T) {
	cc, err := grpc.NewClient("passthrough:///nobody", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultServiceConfig(`{"methodConfig": [{"name": [{}], "retryPolicy": {"maxAttempts": 2, "initialBackoff": "1s",
			"maxBackoff": "1s", "backoffMultiplier": 1, "retryableStatusCodes": ["UNAVAILABLE"]}}]}`))
	if err != nil {
		t.Fatal(err)
	}
	defer cc.Close()
	quantile := HedgeAtQuantile(0.9, time.Millisecond, time.Second)
	retriers := map[string][]Option{
		"defaults":       nil,
		"one policy":     {WithPolicy(Policy{MaxAttempts: 2, Codes: []codes.Code{codes.Aborted}}), WithMaxElapsed(time.Second)},
		"unsent only":    {WithUnsentOnly(true)},
		"a timeout":      {WithAttemptTimeout(time.Second)},
		"a classifier":   {WithRetryIf(func(error) bool { return true })},
		"one attempt":    {WithMaxAttempts(1)},
		"a dry run":      {WithDryRun(true)},
		"hedging":        {WithHedging(Hedging{Delay: HedgeAfter(time.Second), AllMethodsAreSafe: true})},
		"a quantile":     {WithHedging(Hedging{Delay: quantile, AllMethodsAreSafe: true})},
		"a method":       {WithMethod("/pkg.Service/Method", WithMaxAttempts(2))},
		"levels":         {WithSafeMethods()},
		"service config": {WithServiceConfig(`{"methodConfig": []}`)},
		"the channel's":  {WithResolverServiceConfig(true)},
		"an observer":    {WithObserver(func(context.Context, Event) {})},
		"metrics":        {WithMeterProvider(metricnoop.NewMeterProvider())},
		"a call span":    {WithCallSpan(true)},
	}
	var header, trailer, second metadata.MD
	calls := map[string][]grpc.CallOption{
		"a stub":         {grpc.StaticMethod()},
		"outputs":        {grpc.Header(&header), grpc.StaticMethod(), grpc.Trailer(&trailer)},
		"two headers":    {grpc.Header(&header), grpc.StaticMethod(), grpc.Header(&second)},
		"two trailers":   {grpc.Trailer(&trailer), grpc.Trailer(&second), grpc.StaticMethod()},
		"a peer":         {grpc.StaticMethod(), grpc.Peer(new(peer.Peer))},
		"OnFinish":       {grpc.StaticMethod(), grpc.OnFinish(func(error) {})},
		"own options":    {grpc.StaticMethod(), WithMaxAttempts(1)},
		"a proxy":        {},
		"a proxy's":      {grpc.Header(&header)},
		"other options":  {grpc.StaticMethod(), grpc.WaitForReady(true)},
		"a buffer limit": {grpc.StaticMethod(), grpc.MaxRetryRPCBufferSize(0)},
		"an attempt":     {grpc.StaticMethod(), &attempt{cc: cc, method: "/pkg.Service/Method"}},
	}
	plain := map[string]bool{}
	for name, options := range retriers {
		for _, off := range []bool{false, true} {
			if off {
				options = append(options, WithBuiltInRetryDisabled())
			}
			r, err := New(options...)
			if err != nil {
				t.Fatal(err)
			}
			for _, isServers := range []bool{false, true} {
				ctx := t.Context()
				if isServers {
					ctx = layers.New(ctx, true)
				}
				for what, opts := range calls {
					var o grpcOptions
					p := r.plain(ctx, cc, "/pkg.Service/Method", opts, &o)
					if p == nil {
						continue
					}
					plain[fmt.Sprintf("%s, %s, built-in retries off: %t, for a request: %t", name, what, off, isServers)] = true
					got := call{retrier: r, facts: facts{backend: backend{cc: cc}, ctx: ctx, method: "/pkg.Service/Method"}}
					want := got
					got.policy, got.mode, got.static = p, modeRetried, true
					got.options = o
					if err := want.prepare(opts, nil, new(int)); err != nil {
						t.Fatal(err)
					}
					if got.policy != want.policy || !reflect.DeepEqual(got, want) {
						t.Errorf("%s, %s: a plain call knows\n%+v, prepare finds\n%+v", name, what, got, want)
					}
				}
			}
		}
	}
	for _, name := range []string{"defaults", "one policy", "a method", "service config", "an observer", "metrics", "a call span"} {
		for _, what := range []string{"a stub", "outputs"} {
			for _, off := range []bool{true, false} {
				which := fmt.Sprintf("%s, %s, built-in retries off: %t, for a request: false", name, what, off)
				if want := off || name != "service config"; plain[which] != want {
					t.Errorf("%s: plain %t, want %t", which, plain[which], want)
				}
				delete(plain, which)
			}
		}
	}
	if len(plain) > 0 {
		t.Errorf("plain without a reason: %v", plain)
	}
}

// A plain call returns what its caller asks for, of the attempt whose result is returned, and passes its options on.
func TestOutputsOfAPlainCall(t *testing.T) {
	for name, answers := range map[string][]answer{"first try": {ok()}, "a retry": {unavailable(), ok()}} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				attempt := 0
				server := serve(t, func(n int) answer {
					a := answers[n-1]
					a.do = func(ctx context.Context) error {
						attempt++
						md := metadata.Pairs("attempt", strconv.Itoa(attempt))
						return errors.Join(grpc.SetHeader(ctx, md), grpc.SetTrailer(ctx, md))
					}
					return a
				})
				var below []string
				cc := server.conn(t, append(DialOptions(steady), grpc.WithChainUnaryInterceptor(
					func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, next grpc.UnaryInvoker, opts ...grpc.CallOption) error {
						below = nil
						for _, o := range opts {
							below = append(below, fmt.Sprintf("%T", o))
						}
						return next(ctx, method, req, reply, cc, opts...)
					}))...)
				header, trailer := metadata.Pairs("attempt", "of an earlier call"), metadata.Pairs("attempt", "of an earlier call")
				_, err := echov1.NewEchoServiceClient(cc).Echo(t.Context(), request(), grpc.Header(&header), grpc.Trailer(&trailer))
				want := []string{strconv.Itoa(len(answers))}
				if err != nil || !slices.Equal(header["attempt"], want) || !slices.Equal(trailer["attempt"], want) {
					t.Errorf("got header %v, trailer %v and %v, want those of attempt %v", header, trailer, err, want)
				}
				if !slices.Contains(below, "grpc.StaticMethodCallOption") {
					t.Errorf("below, the call has the options %v, want the stub's among them", below)
				}
			})
		})
	}
}

// Whatever becomes of a plain call's first attempt is reported to the budget once. Nothing of an earlier call is left in the caller's
// variables, and interceptors below have no room to append to the library's options.
func TestTheFirstAttemptOfAPlainCall(t *testing.T) {
	for name, tt := range map[string]struct {
		invoker grpc.UnaryInvoker
		want    Result
	}{
		"is answered": {succeed, Succeeded},
		"panics": {func(context.Context, string, any, any, *grpc.ClientConn, ...grpc.CallOption) error {
			panic("as the test wants")
		}, Ignored},
		"ends the goroutine": {func(context.Context, string, any, any, *grpc.ClientConn, ...grpc.CallOption) error {
			runtime.Goexit()
			return nil
		}, Ignored},
	} {
		t.Run(name, func(t *testing.T) {
			budget := &tally{}
			intercept := UnaryClientInterceptor(WithBudget(budget), WithBuiltInRetryDisabled())
			header, trailer := metadata.Pairs("of", "an earlier call"), metadata.Pairs("of", "an earlier call")
			var room int
			done := make(chan struct{})
			go func() {
				defer close(done)
				defer func() { _ = recover() }()
				_ = intercept(t.Context(), "/pkg.Service/Method", nil, nil, nil, func(
					ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, opts ...grpc.CallOption) error {
					room = cap(opts) - len(opts)
					return tt.invoker(ctx, method, req, reply, cc, opts...)
				}, grpc.StaticMethod(), grpc.Header(&header), grpc.Trailer(&trailer))
			}()
			<-done
			var want counts
			want.told[tt.want], want.highest = 1, 1
			if budget.counts != want || header != nil || trailer != nil || room > 0 {
				t.Errorf("the budget was told %+v, want %+v; header %v, trailer %v, room for %d options", budget.counts, want, header, trailer, room)
			}
		})
	}
}

// badSpan is an application's span that panics when it is asked.
type badSpan struct{ noop.Span }

func (badSpan) IsRecording() bool { panic("as the test wants") }

// The first attempt of a plain call is reported to the budget once, also if the caller's span panics after it.
func TestASpanThatPanicsAfterAPlainAttempt(t *testing.T) {
	for name, result := range map[string]error{"a success": nil, "a failure": errUnavailable} {
		t.Run(name, func(t *testing.T) {
			budget, made := &tally{}, 0
			func() {
				defer func() { _ = recover() }()
				_ = UnaryClientInterceptor(WithBudget(budget))(trace.ContextWithSpan(t.Context(), badSpan{}), "/pkg.Service/Method", nil, nil, nil,
					func(context.Context, string, any, any, *grpc.ClientConn, ...grpc.CallOption) error {
						made++
						return result
					}, grpc.StaticMethod())
			}()
			if made != 1 || budget.told[Ignored] != 1 || budget.highest != 1 {
				t.Errorf("%d attempts, and the budget was told %+v; want one that is ignored", made, budget.counts)
			}
		})
	}
}

// A method has the policy of the narrowest pattern, however many are called, and only those of stubs are remembered.
func TestPoliciesOfManyMethods(t *testing.T) {
	r, err := New(WithMethod("/a.Service/", WithMaxAttempts(2)), WithMethod("/a.Service/Method", WithMaxAttempts(3)),
		WithBuiltInRetryDisabled())
	if err != nil {
		t.Fatal(err)
	}
	stub := []grpc.CallOption{grpc.StaticMethod()}
	for range 2 {
		for n := range 200 {
			for name, want := range map[string]int{
				"/a.Service/Method": 3, fmt.Sprint("/a.Service/Method", n): 2, fmt.Sprint("/b.Service/Method", n): 4,
			} {
				if p := r.plain(t.Context(), nil, name, stub, new(grpcOptions)); p.MaxAttempts != want {
					t.Fatalf("%s may make %d attempts, want %d", name, p.MaxAttempts, want)
				}
			}
			another := fmt.Sprint("/c.Service/Method", n)
			if p := r.plain(t.Context(), nil, another, nil, new(grpcOptions)); p != nil || r.Policy(another).MaxAttempts != 4 {
				t.Fatalf("%s has %+v", another, r.Policy(another))
			}
		}
	}
	stubs := r.settings.current().stubs.Current()
	if len(stubs) != 100 || stubs["/c.Service/Method0"] != nil {
		t.Errorf("%d methods are remembered, want 100 of stubs", len(stubs))
	}
}
