package grpcretry

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"

	"github.com/grpcretry/grpcretry/internal/patterns"
	"github.com/grpcretry/grpcretry/internal/serviceconfig"
)

// FuzzServiceConfig gives any text to New, and to a channel whose resolver supplies it. What New accepts
// has policies within the documented limits, and each method has the policy that gRPC's channel has for it,
// whether the text came from WithServiceConfig or from the channel. Package serviceconfig compares the
// readings of the text as a whole.
func FuzzServiceConfig(f *testing.F) {
	for _, text := range []string{
		`{}`, builtInPolicy, configOf(retrying(nameEcho, 3), retrying(nameService, 4), retrying(nameDefault, 5)),
		configOf(retrying(nameEcho+","+nameDefault, 6), `{"name":[`+nameService+`]}`),
		configOf(strings.Replace(retrying(nameService, 2), `"ABORTED"`, `"OK",14,"Aborted"`, 1)),
		configOf(strings.Replace(retrying(nameService, 2), `"ABORTED"`, `"OK"`, 1)),
		`{"methodConfig":[{"name":[{}],"hedgingPolicy":{"maxAttempts":9,"hedgingDelay":"0.5s","nonFatalStatusCodes":[14]}}],` +
			`"retryThrottling":{"maxTokens":10,"tokenRatio":0.1}}`,
		`{"methodConfig":[{"name":[{"service":"s"}],"retryPolicy":{"maxAttempts":2,"initialBackoff":"315576000000s",` +
			`"maxBackoff":"0.000000001s",` +
			`"backoffMultiplier":1e300,"retryableStatusCodes":[1]}}]}`,
		`{"methodConfig":1}`,
	} {
		for _, method := range []string{echoMethod, putMethod, "/s/m", ""} {
			f.Add(text, method)
		}
	}
	channel := newFuzzedChannel(f)
	f.Fuzz(func(t *testing.T, text, method string) {
		read, parseErr := serviceconfig.Parse(text)
		r, err := New(WithServiceConfig(text))
		if (err != nil) != (parseErr != nil) {
			t.Fatalf("New says %v, and the reader %v", err, parseErr)
		}
		if err != nil {
			if want := "grpcretry: WithServiceConfig: " + parseErr.Error(); err.Error() != want {
				t.Errorf("New says %v, want %s", err, want)
			}
			return
		}
		methods := []string{method, patterns.ServiceOf(method) + "other", "/other/m"}
		for _, m := range read.Methods {
			methods = append(methods, m.Names...)
		}
		understood := channel.supply(text)
		for _, m := range methods {
			if strings.Count(m, "/") != 2 || strings.HasSuffix(m, "/") {
				continue // gRPC has no such method
			}
			p := r.Policy(m)
			checkLimits(t, m, p)
			if !understood { // gRPC's reasons are compared in package serviceconfig
				continue
			}
			want := channel.expected(m, entryFor(read, m))
			if got := settingsOf(p); got != want {
				t.Errorf("%q has %s, want %s", m, got, want)
			}
			if entry := entryFor(read, m); entry == nil || entry.Hedging == nil {
				if got := settingsOf(channel.policy(m)); got != want {
					t.Errorf("%q has %s because of the channel, want %s", m, got, want)
				}
			}
		}
	})
}

// checkLimits checks that a policy that came from a service config is within the limits of gRFC A6, and
// can be shown.
func checkLimits(t *testing.T, method string, p Policy) {
	b, _ := p.Backoff.(Exponential)
	switch {
	case p.MaxAttempts < 1 || p.MaxAttempts > 5, p.Hedging == nil && (b.Base <= 0 || b.Max <= 0 || !(b.Multiplier > 0)):
		t.Errorf("%q: %+v is out of range", method, p)
	case p.Hedging != nil && p.MaxAttempts < 2:
		t.Errorf("%q: %+v is out of range", method, p)
	case slices.Contains(p.Codes, codes.OK) || slices.ContainsFunc(p.Codes, func(c codes.Code) bool { return c > maxCode }):
		t.Errorf("%q retries %v", method, p.Codes)
	case fmt.Sprint(p.Budget) == "":
		t.Errorf("%q has a budget without a description", method)
	}
	if p.Hedging != nil {
		if d, ok := p.Hedging.Delay.Delay(method, noon); d < 0 || !ok {
			t.Errorf("%q is hedged after %v", method, d)
		}
	}
	for _, retry := range []int{1, 2, 1000} {
		if d := p.Backoff.Delay(retry, time.Second, 0.999); d < 0 {
			t.Errorf("%q: the wait before retry %d is %v", method, retry, d)
		}
	}
}

// A fuzzedChannel is a channel whose service config changes.
type fuzzedChannel struct {
	cc       *grpc.ClientConn
	resolver *manual.Resolver
	plain    *Retrier
	fromIt   *Retrier // obeys the channel's service config
}

func newFuzzedChannel(f *testing.F) *fuzzedChannel {
	found := manual.NewBuilderWithScheme("fuzz")
	found.InitialState(resolver.State{})
	cc, err := grpc.NewClient("fuzz:///", grpc.WithResolvers(found), grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithMaxCallAttempts(5))
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { cc.Close() })
	cc.Connect()
	c := &fuzzedChannel{cc: cc, resolver: found}
	if c.plain, err = New(); err == nil {
		c.fromIt, err = New(WithResolverServiceConfig(true))
	}
	if err != nil {
		f.Fatal(err)
	}
	return c
}

// supply changes the channel's service config, and reports whether gRPC understands it.
func (c *fuzzedChannel) supply(text string) bool {
	config := c.resolver.CC().ParseServiceConfig(text)
	if config.Err != nil {
		return false
	}
	_ = c.resolver.CC().UpdateState(resolver.State{ServiceConfig: config}) // an error because there are no addresses
	return true
}

// expected returns the settings that gRPC has for a method, and a hedgingPolicy, which gRPC ignores.
func (c *fuzzedChannel) expected(method string, entry *serviceconfig.Method) string {
	p := c.plain.Policy(method)
	switch retry := c.cc.GetMethodConfig(method).RetryPolicy; {
	case entry != nil && entry.Hedging != nil:
		p.Hedging, p.MaxAttempts, p.Codes, p.Backoff = &Hedging{}, entry.Hedging.MaxAttempts, entry.Hedging.NonFatalCodes, Constant(0)
		slices.Sort(p.Codes)
	case retry != nil:
		p.MaxAttempts, p.Codes = retry.MaxAttempts, nil
		p.Backoff = Exponential{retry.InitialBackoff, retry.MaxBackoff, retry.BackoffMultiplier, ProportionalJitter}
		for code := range retry.RetryableStatusCodes {
			if code != codes.OK { // gRPC never retries it
				p.Codes = append(p.Codes, code)
			}
		}
		slices.Sort(p.Codes)
	}
	return settingsOf(p)
}

// policy returns the policy of calls on the channel.
func (c *fuzzedChannel) policy(method string) Policy {
	current, ch := c.fromIt.settings.current(), channelOf(c.fromIt, c.cc, method)
	return current.fromChannel(&ch, method, current.of(method)).exported()
}

// settingsOf describes the settings that a service config has.
func settingsOf(p Policy) string {
	return fmt.Sprintf("%d attempts, hedged %v, %+v after %v", p.MaxAttempts, p.Hedging != nil, p.Backoff, p.Codes)
}

// entryFor returns the entry that applies to a method; nil if there is none.
func entryFor(read *serviceconfig.Config, method string) *serviceconfig.Method {
	for _, name := range []string{method, patterns.ServiceOf(method), ""} {
		for i := range read.Methods {
			if slices.Contains(read.Methods[i].Names, name) {
				return &read.Methods[i]
			}
		}
	}
	return nil
}

// channelOf returns what a call of the Retrier would know about a channel.
func channelOf(r *Retrier, cc *grpc.ClientConn, method string) channel {
	c := call{retrier: r}
	c.cc, c.method = cc, method
	return c.channel()
}
