package grpcretry

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/grpcretry/grpcretry/internal/patterns"
	"github.com/grpcretry/grpcretry/internal/protos"
	"github.com/grpcretry/grpcretry/internal/serviceconfig"
)

var scopeDraws = flag.Int("scopes.draws", 100, "histories of options that TestScopesMatchTheirModel draws")

// The methods of the test, by their levels. The last service is not linked.
var scopeMethods = []string{
	"/scopes.v1.One/Read", "/scopes.v1.One/Put", "/scopes.v1.One/Append",
	"/scopes.v1.Two/Read", "/scopes.v1.Two/Put", "/scopes.v1.Two/Append",
	"/scopes.v1.Three/Read",
}

var scopeLevels = map[string]level{
	"Read":   descriptorpb.MethodOptions_NO_SIDE_EFFECTS,
	"Put":    descriptorpb.MethodOptions_IDEMPOTENT,
	"Append": descriptorpb.MethodOptions_IDEMPOTENCY_UNKNOWN,
}

func init() {
	file := &descriptorpb.FileDescriptorProto{
		Name: proto.String("scopes/v1/scopes.proto"), Package: proto.String("scopes.v1"), Syntax: proto.String("proto3"),
		Dependency: []string{(&emptypb.Empty{}).ProtoReflect().Descriptor().ParentFile().Path()},
	}
	for _, name := range []string{"One", "Two"} {
		service := &descriptorpb.ServiceDescriptorProto{Name: proto.String(name)}
		for _, method := range []string{"Read", "Put", "Append"} {
			service.Method = append(service.Method, &descriptorpb.MethodDescriptorProto{
				Name: proto.String(method), InputType: proto.String(".google.protobuf.Empty"), OutputType: proto.String(".google.protobuf.Empty"),
				Options: &descriptorpb.MethodOptions{IdempotencyLevel: scopeLevels[method].Enum()},
			})
		}
		file.Service = append(file.Service, service)
	}
	linked, err := protodesc.NewFile(file, protoregistry.GlobalFiles)
	if err == nil {
		err = protoregistry.GlobalFiles.RegisterFile(linked)
	}
	if err != nil {
		panic(err) // the test would compare nothing
	}
}

// A modelOption is one setting of one option, and what it does by its documentation.
type modelOption struct {
	on    bool // it may turn retries or hedging on
	later bool // but not in the Update that turned them off
	off   bool // it turns both off
	do    func(*modelPolicy)
}

// A modelPolicy has every setting as a text, "" for the default.
type modelPolicy map[string]string

func (m modelPolicy) String() string {
	var all []string
	for key, value := range m {
		all = append(all, key+"="+value)
	}
	slices.Sort(all)
	return strings.Join(all, "\n")
}

func setting(key, value string) func(*modelPolicy) {
	return func(m *modelPolicy) { (*m)[key] = value }
}

func modelOff(m *modelPolicy) { (*m)["attempts"], (*m)["hedging"] = "1", "none" }

// modelAll is what has been said, in the order in which it was said.
type modelAll struct {
	said    []modelSaid
	updates int
	off     int // the Update that turned everything off; 0 for none

	config       *modelConfig
	configUpdate int
	channel      bool
}

type modelSaid struct {
	scope  string // "all", "level READ", "/pkg.Service/", "/pkg.Service/Method"
	update int
	modelOption
}

// A modelConfig is a service config: by "", "/pkg.Service/" and "/pkg.Service/Method", the options of
// each entry.
type modelConfig struct {
	json    string
	entries map[string][]modelOption
	budget  bool
}

func (a *modelAll) say(scope string, options []modelOption) {
	for _, o := range options {
		if scope == "all" && o.off && a.updates > 0 {
			a.off = a.updates
			continue
		}
		if scope == "all" && o.on && !(o.later && a.off == a.updates) {
			a.off = 0
		}
		a.said = append(a.said, modelSaid{scope, a.updates, o})
	}
}

// policy applies the scopes in the documented order.
func (a *modelAll) policy(method string, channel *modelConfig, own []modelOption) modelPolicy {
	p := modelPolicy{
		"attempts": "4", "hedging": "none", "codes": "[ResourceExhausted Unavailable]", "backoff": "", "overload": "",
		"timeout": "0s", "elapsed": "0s", "server": "5m0s", "patience": "", "buffer": "262144", "unsent": "false",
		"classifier": "false", "budget": "default",
	}
	service := method[:strings.LastIndex(method, "/")+1]
	name := strings.TrimPrefix(method, service)
	of := levelUnknown
	if service != "/scopes.v1.Three/" {
		of = scopeLevels[name]
	}
	inConfig := func(c *modelConfig) (string, []modelOption) {
		for _, key := range []string{method, service, ""} {
			if e, ok := c.entries[key]; ok {
				return key, e
			}
		}
		return "-", nil
	}
	where, entry, since := "-", []modelOption(nil), 0
	if a.config != nil {
		where, entry = inConfig(a.config)
		since = a.configUpdate
	}
	if a.channel && channel != nil {
		if key, e := inConfig(channel); e != nil {
			where, entry, since = key, e, 0
		}
	}
	apply := func(o modelOption, update int) {
		if !o.on || update >= a.off {
			o.do(&p)
		}
	}
	fromConfig := func(key string) {
		if where == key {
			for _, o := range entry {
				apply(o, since)
			}
		}
	}
	said := func(scope string) {
		for _, s := range a.said {
			if s.scope == scope {
				if scope == "all" {
					s.do(&p)
				} else {
					apply(s.modelOption, s.update)
				}
			}
		}
	}
	if a.config != nil && a.config.budget {
		p["budget"] = "throttle"
	}
	fromConfig("")
	said("all")
	if a.off > 0 {
		modelOff(&p)
	}
	said("level " + of.String())
	fromConfig(service)
	said(service)
	fromConfig(method)
	said(method)
	for _, o := range own {
		o.do(&p)
	}
	if p["overload"] == "" {
		p["overload"] = p["backoff"]
	}
	if p["patience"] == "" {
		p["patience"] = fmt.Sprint(max(10*time.Second, 2*longestWaits(p)))
	}
	if p["overload"] == "" {
		p["overload"] = fmt.Sprint(Exponential{Base: time.Second, Max: 20 * time.Second}.withDefaults())
	}
	if p["backoff"] == "" {
		p["backoff"] = fmt.Sprint(defaultBackoff.withDefaults())
	}
	switch hedged := p["hedging"] != "none" && p["unsent"] == "false"; {
	case p["attempts"] == "1":
		p["mode"] = "passes"
	case hedged:
		p["mode"] = "hedged"
	default:
		p["mode"] = "retried"
	}
	return p
}

// longestWaits returns what the waits of a service config's backoff can add up to; other backoffs are short.
func longestWaits(p modelPolicy) (total time.Duration) {
	var attempts, most int
	if n, _ := fmt.Sscanf(p["backoff"]+p["attempts"], fmt.Sprintf("{1s %%ds 3 %d}%%d", ProportionalJitter), &most, &attempts); n < 2 {
		return 0
	}
	for wait := 1; attempts > 1; attempts, wait = attempts-1, 3*wait {
		total += time.Duration(min(wait, most)) * 1200 * time.Millisecond
	}
	return total
}

// modelOf describes a real policy in the model's words.
func modelOf(p *policy, budgets map[Budget]string, fallback Budget) modelPolicy {
	m := modelPolicy{
		"attempts": fmt.Sprint(p.MaxAttempts), "codes": fmt.Sprint(slices.Sorted(slices.Values(p.Codes))),
		"backoff": fmt.Sprint(p.Backoff), "overload": fmt.Sprint(p.OverloadBackoff), "timeout": fmt.Sprint(p.AttemptTimeout),
		"elapsed": fmt.Sprint(p.MaxElapsed), "server": fmt.Sprint(p.MaxServerDelay), "patience": fmt.Sprint(p.Patience),
		"buffer": fmt.Sprint(p.BufferLimit), "unsent": fmt.Sprint(p.UnsentOnly),
		"classifier": fmt.Sprint(p.Classifier != nil), "hedging": "none",
		"mode": "retried",
	}
	if _, _, hedged := p.hedgingOf("/s/m", nil, time.Now); hedged {
		m["mode"] = "hedged"
	} else if p.modeOf(nil) == modePassThrough {
		m["mode"] = "passes"
	}
	if p.Hedging != nil {
		m["hedging"] = fmt.Sprint(p.Hedging.Delay)
	}
	switch each, isEach := p.Budget.(*perTarget); {
	case p.Budget == fallback:
		m["budget"] = "default"
	case isEach:
		m["budget"] = fmt.Sprint(each.settings)
		if _, throttles := each.settings.(serviceconfig.Throttling); throttles {
			m["budget"] = "throttle"
		}
	default:
		m["budget"] = budgets[p.Budget]
	}
	return m
}

// A scopeDraw draws options.
type scopeDraw struct {
	*rand.Rand
	budgets []Budget
	names   map[Budget]string
}

// one draws an option and its model. A zero in a Policy leaves a setting alone.
func (d *scopeDraw) one() (CallOption, []modelOption) {
	wait := time.Duration(1+d.IntN(9)) * time.Millisecond
	simple := func(o CallOption, key, value string) (CallOption, []modelOption) {
		return o, []modelOption{{do: setting(key, value)}}
	}
	switch d.IntN(18) {
	case 0, 1:
		n := 2 + d.IntN(5)
		return WithMaxAttempts(n), []modelOption{{on: true, do: setting("attempts", fmt.Sprint(n))}}
	case 2:
		return Disable(), []modelOption{{off: true, do: modelOff}}
	case 3:
		return WithMaxAttempts(1), []modelOption{{off: true, do: modelOff}}
	case 4, 5:
		h := d.hedging()
		return WithHedging(h), []modelOption{d.hedgingModel(h)}
	case 6:
		return simple(WithBackoff(Constant(wait)), "backoff", fmt.Sprint(Constant(wait)))
	case 7:
		return simple(WithOverloadBackoff(Constant(wait)), "overload", fmt.Sprint(Constant(wait)))
	case 8:
		c := codes.Code(1 + d.IntN(16))
		return simple(WithCodes(c), "codes", fmt.Sprint([]codes.Code{c}))
	case 9:
		wait *= time.Duration(d.IntN(2))
		return simple(WithAttemptTimeout(wait), "timeout", fmt.Sprint(wait))
	case 10:
		wait *= time.Duration(d.IntN(2))
		return simple(WithMaxElapsed(wait), "elapsed", fmt.Sprint(wait))
	case 11:
		return simple(WithMaxServerDelay(-wait), "server", fmt.Sprint(-wait))
	case 12:
		if d.IntN(2) == 0 {
			return simple(WithPatience(0), "patience", "-1ns")
		}
		return simple(WithPatience(wait), "patience", fmt.Sprint(wait))
	case 13:
		if d.IntN(2) == 0 {
			return simple(WithBufferLimit(0), "buffer", "-1")
		}
		return simple(WithBufferLimit(77), "buffer", "77")
	case 14:
		on := d.IntN(3) > 0
		return simple(WithUnsentOnly(on), "unsent", fmt.Sprint(on))
	case 15:
		if d.IntN(2) == 0 {
			return simple(WithClassifier(nil), "classifier", "false")
		}
		return simple(WithClassifier(func(context.Context, Attempt) Classification { return Stop }), "classifier", "true")
	case 16:
		if d.IntN(2) == 0 {
			s := RatioBudget{Ratio: 0.5, Reserve: float64(1 + d.IntN(3)), Window: time.Second}
			return simple(WithRatioBudget(s), "budget", fmt.Sprint(s))
		}
		b := d.budgets[d.IntN(len(d.budgets))]
		return simple(WithBudget(b), "budget", d.names[b])
	default:
		return d.policy(wait)
	}
}

func (d *scopeDraw) hedging() Hedging {
	return Hedging{Delay: HedgeAfter(time.Duration(d.IntN(5)) * time.Second), AllMethodsAreSafe: true}
}

func (d *scopeDraw) hedgingModel(h Hedging) modelOption {
	return modelOption{on: true, later: true, do: setting("hedging", fmt.Sprint(h.Delay))}
}

// policy draws a WithPolicy with some fields.
func (d *scopeDraw) policy(wait time.Duration) (CallOption, []modelOption) {
	var p Policy
	var all []modelOption
	add := func(o modelOption) { all = append(all, o) }
	some := func() bool { return d.IntN(4) == 0 }
	if some() {
		p.MaxAttempts = 1 + d.IntN(4)
		if p.MaxAttempts == 1 {
			add(modelOption{off: true, do: modelOff})
		} else {
			add(modelOption{on: true, do: setting("attempts", fmt.Sprint(p.MaxAttempts))})
		}
	}
	if some() {
		h := d.hedging()
		p.Hedging = &h
		add(d.hedgingModel(h))
	}
	if some() {
		p.Codes = []codes.Code{codes.Internal, codes.Aborted}
		add(modelOption{do: setting("codes", "[Aborted Internal]")})
	}
	if some() {
		p.Backoff = Constant(wait)
		add(modelOption{do: setting("backoff", fmt.Sprint(p.Backoff))})
	}
	if some() {
		p.Patience, p.BufferLimit = -1, -1
		add(modelOption{do: setting("patience", "-1ns")})
		add(modelOption{do: setting("buffer", "-1")})
	}
	if some() {
		p.UnsentOnly = true
		add(modelOption{do: setting("unsent", "true")})
	}
	if some() {
		p.Budget = d.budgets[0]
		add(modelOption{do: setting("budget", d.names[p.Budget])})
	}
	if some() {
		p.AttemptTimeout, p.MaxElapsed, p.MaxServerDelay = wait, wait, wait
		for _, key := range []string{"timeout", "elapsed", "server"} {
			add(modelOption{do: setting(key, fmt.Sprint(wait))})
		}
	}
	return WithPolicy(p), all
}

func (d *scopeDraw) several() (options []CallOption, model []modelOption) {
	for range 1 + d.IntN(3) {
		o, m := d.one()
		options, model = append(options, o), append(model, m...)
	}
	return options, model
}

// config draws a service config.
func (d *scopeDraw) config(hedges bool) *modelConfig {
	c := &modelConfig{entries: map[string][]modelOption{}}
	var methods []string
	for _, key := range []string{"", "/scopes.v1.One/", "/scopes.v1.Three/", "/scopes.v1.One/Read", "/scopes.v1.Two/Put"} {
		if d.IntN(2) == 0 {
			continue
		}
		service, method, _ := strings.Cut(strings.TrimPrefix(key, "/"), "/")
		name := fmt.Sprintf(`{"service":%q,"method":%q}`, service, method)
		n, after := 2+d.IntN(4), 1+d.IntN(9)
		switch kind := d.IntN(3); {
		case kind == 0:
			c.entries[key] = nil
			methods = append(methods, fmt.Sprintf(`{"name":[%s],"timeout":"1s"}`, name))
		case kind == 1 && hedges:
			c.entries[key] = []modelOption{
				{on: true, do: setting("attempts", fmt.Sprint(n))},
				{on: true, do: setting("hedging", fmt.Sprint(HedgeAfter(time.Duration(after)*time.Second)))},
				{do: setting("backoff", "0")},
				{do: setting("overload", "0")},
				{do: setting("codes", "[Aborted]")},
			}
			methods = append(methods, fmt.Sprintf(
				`{"name":[%s],"hedgingPolicy":{"maxAttempts":%d,"hedgingDelay":"%ds","nonFatalStatusCodes":["ABORTED"]}}`, name, n, after))
		default:
			b := Exponential{Base: time.Second, Max: time.Duration(after) * time.Second, Multiplier: 3, Jitter: ProportionalJitter}
			c.entries[key] = []modelOption{
				{on: true, do: setting("attempts", fmt.Sprint(n))},
				{do: setting("backoff", fmt.Sprint(b))},
				{do: setting("codes", "[DataLoss]")},
			}
			methods = append(methods, fmt.Sprintf(`{"name":[%s],"retryPolicy":{"maxAttempts":%d,"initialBackoff":"1s","maxBackoff":"%ds",`+
				`"backoffMultiplier":3,"retryableStatusCodes":["DATA_LOSS"]}}`, name, n, after))
		}
	}
	throttling := ""
	if d.IntN(2) == 0 && hedges {
		c.budget, throttling = true, `,"retryThrottling":{"maxTokens":10,"tokenRatio":0.5}`
	}
	c.json = `{"methodConfig":[` + strings.Join(methods, ",") + `]` + throttling + `}`
	return c
}

// given draws what is passed to New or to one Update.
func (d *scopeDraw) given(a *modelAll) (options []Option) {
	for range d.IntN(5) {
		switch d.IntN(10) {
		case 0, 1:
			o, m := d.one()
			options = append(options, o)
			a.say("all", m)
		case 2, 3:
			l := level(d.IntN(protos.Levels))
			o, m := d.several()
			options = append(options, WithIdempotencyLevel(l, o...))
			a.say("level "+l.String(), m)
		case 4, 5:
			service := patterns.ServiceOf(scopeMethods[d.IntN(len(scopeMethods))])
			o, m := d.several()
			options = append(options, WithMethod(service, o...))
			a.say(service, m)
		case 6, 7:
			method := scopeMethods[d.IntN(len(scopeMethods))]
			o, m := d.several()
			options = append(options, WithMethod(method, o...))
			a.say(method, m)
		case 8:
			c := d.config(true)
			options = append(options, WithServiceConfig(c.json))
			a.config, a.configUpdate = c, a.updates
		case 9:
			a.channel = d.IntN(2) == 0
			options = append(options, WithResolverServiceConfig(a.channel))
		}
	}
	if a.updates > 0 && d.IntN(4) == 0 {
		options = append(options, Disable())
		a.say("all", []modelOption{{off: true, do: modelOff}})
	}
	return options
}

// TestScopesMatchTheirModel draws histories of New and Updates, and compares the policies of all methods,
// for calls with options of their own and on channels with a service config, with a model that only
// knows the documented order of scopes.
func TestScopesMatchTheirModel(t *testing.T) {
	t.Parallel()
	seeds := rand.New(rand.NewPCG(16, 1))
	var channels []*grpc.ClientConn
	var configs []*modelConfig
	for range 8 {
		c := (&scopeDraw{Rand: seeds}).config(false)
		cc, err := grpc.NewClient("passthrough:///scopes", grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithDefaultServiceConfig(c.json), grpc.WithDisableServiceConfig(),
			grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) { return nil, errRefused }))
		if err != nil {
			t.Fatal(err)
		}
		defer cc.Close()
		channels, configs = append(channels, cc), append(configs, c)
	}
	for _, cc := range channels {
		// The call fails when there is no connection to be had; by then the channel has its config.
		if err := cc.Invoke(t.Context(), "/x/y", &emptypb.Empty{}, &emptypb.Empty{}); status.Code(err) != codes.Unavailable {
			t.Fatalf("a call to nobody: %v, want UNAVAILABLE", err)
		}
	}
	compared := 0
	for range *scopeDraws {
		seed := seeds.Uint64()
		compared += checkScopes(t, seed, channels, configs)
		if t.Failed() {
			t.Fatalf("seed %d", seed)
		}
	}
	t.Logf("%d policies compared", compared)
}

func checkScopes(t *testing.T, seed uint64, channels []*grpc.ClientConn, configs []*modelConfig) (compared int) {
	d := &scopeDraw{Rand: rand.New(rand.NewPCG(seed, 0)), names: map[Budget]string{}}
	for i := range 2 {
		b, err := NewConcurrencyBudget(i + 1)
		if err != nil {
			t.Fatal(err)
		}
		d.budgets, d.names[b] = append(d.budgets, b), fmt.Sprint("budget ", i)
	}
	var a modelAll
	r := retrierOf(t, d.given(&a)...)
	for {
		for _, method := range scopeMethods {
			at := d.IntN(len(channels) + 1)
			var cc *grpc.ClientConn
			var channel *modelConfig
			if at < len(channels) {
				cc, channel = channels[at], configs[at]
			}
			var own []*policyOption
			var ownModel []modelOption
			if d.IntN(2) == 0 {
				o, m := d.several()
				for _, one := range o {
					own = append(own, one.callOption())
				}
				ownModel = m
			}
			ch := channelOf(r, cc, method)
			err := firstError(own)
			p := r.settings.current().withOwn(r.settings.current().on(&ch, method), own)
			if err != nil {
				t.Fatal(err)
			}
			got, want := modelOf(p, d.names, r.settings.fallback.retries).String(), a.policy(method, channel, ownModel).String()
			compared++
			if got != want {
				t.Errorf("%s after %d updates:\n%s\nwant\n%s\nconfig %v\nchannel %v", method, a.updates, got, want, a.config, channel)
				return compared
			}
		}
		if d.IntN(6) == 0 {
			return compared
		}
		a.updates++
		if err := r.Update(d.given(&a)...); err != nil {
			t.Fatal(err)
		}
	}
}
