package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/cmd/herd/internal/sim"
)

// options are the settings of a command line.
type options struct {
	name           string
	policy, method string
	part, only     string
	list, verbose  bool
	runs           int
	png            string
	docs           string
	changes        []change
}

const usage = `Herd simulates many clients that retry against a server that fails, on the engine of grpcretry.

    herd [flags]
    herd explain [flags]   one page on what calls experience under a policy: see herd explain -h

Without flags it runs the study "classic" and prints what the server sees under each strategy.

`

// parse reads the command line. It prints its errors to stderr before it returns them.
func parse(args []string, stderr io.Writer) (*options, error) {
	o := &options{}
	flags := flag.NewFlagSet("herd", flag.ContinueOnError)
	flags.StringVar(&o.name, "study", "classic", "run the shipped study of this `name`; see -list")
	flags.BoolVar(&o.list, "list", false, "list the shipped studies, and what each of them shows")
	flags.StringVar(&o.policy, "policy", "", "also compare the retryPolicy or hedgingPolicy of the gRPC service config in this `file`")
	flags.StringVar(&o.method, "method", "", "with -policy, use only the config of this method, /pkg.Service/`Method`")
	flags.StringVar(&o.part, "part", "", "run only the scenarios with these `names`, separated by commas")
	flags.StringVar(&o.only, "strategy", "", "run only strategies whose names contain one of these `words`, separated by commas")
	flags.IntVar(&o.runs, "runs", 1, "average over this `number` of seeds")
	flags.BoolVar(&o.verbose, "v", false, "print all figures")
	flags.StringVar(&o.png, "png", "", "draw what the server sees in each second into this PNG `file`")
	flags.StringVar(&o.docs, "docs", "", "write the pictures and figures of herd.md in this `folder` again")
	for _, p := range parameters {
		usage := p.usage + " (in every " + p.of + ")"
		set := func(value string) error {
			o.changes = append(o.changes, change{p.name, value, p.do})
			return p.do(&sim.Scenario{}, value) // so that a bad value is reported immediately
		}
		if p.isSwitch {
			flags.BoolFunc(p.name, usage, set)
		} else {
			flags.Func(p.name, usage, set)
		}
	}
	return o, parseFlags(flags, usage, args, stderr, func() error {
		if o.runs < 1 {
			return fmt.Errorf("-runs %d: want at least 1", o.runs)
		}
		return nil
	})
}

// parseFlags parses a command line, and checks it. It prints the usage if that is asked for, and any error.
func parseFlags(flags *flag.FlagSet, usage string, args []string, stderr io.Writer, check func() error) error {
	flags.SetOutput(io.Discard)
	err := flags.Parse(args)
	switch {
	case errors.Is(err, flag.ErrHelp):
		fmt.Fprint(stderr, usage)
		flags.SetOutput(stderr)
		flags.PrintDefaults()
		return err
	case err == nil && flags.NArg() > 0:
		err = fmt.Errorf("unexpected argument %q", flags.Arg(0))
	case err == nil:
		err = check()
	}
	if err != nil {
		fmt.Fprintf(stderr, "%s: %v; %s -h lists the flags\n", flags.Name(), err, flags.Name())
	}
	return err
}

// A parameter is a flag for a field of a scenario.
type parameter struct {
	name, of, usage string
	isSwitch        bool
	do              func(s *sim.Scenario, value string) error
}

// parameters are the flags for the fields of scenarios. Each sets its field in every group,
// server or strategy.
var parameters = []parameter{
	forScenario("seed", "start the random numbers with this `number`", setUint(func(s *sim.Scenario) *uint64 { return &s.Seed })),
	forScenario("duration", "stop after this simulated `time`", setTime(func(s *sim.Scenario) *time.Duration { return &s.Duration })),
	forScenario("bucket", "the `time` that one bar covers", setTime(func(s *sim.Scenario) *time.Duration { return &s.Bucket })),
	forScenario(
		"network",
		"the latency in each direction: a `distribution` such as 10ms, 10ms±2ms, uniform:10ms±5ms, exponential:10ms, lognormal:10ms±20ms, "+
			"pareto:10ms^1.5",
		func(s *sim.Scenario, v string) (err error) {
			s.Network, err = parseDistribution(v)
			return err
		},
	),

	forGroups("clients", "the `number` of clients, which make one call each", func(g *sim.Group, v string) (err error) {
		g.Rate = 0
		g.Clients, err = strconv.Atoi(v)
		return err
	}),
	forGroups(
		"rate",
		"the `number` of calls that arrive per second, regardless of how earlier ones end",
		func(g *sim.Group, v string) (err error) {
			g.Clients, g.Spread = 0, 0
			g.Rate, err = strconv.ParseFloat(v, 64)
			return err
		},
	),
	switchOf(
		forGroups("even", "space the arrivals of -rate evenly instead of at random", setBool(func(g *sim.Group) *bool { return &g.Even })),
	),
	forGroups("spread", "clients start within this `time`", setTime(func(g *sim.Group) *time.Duration { return &g.Spread })),
	forGroups("start", "the `time` at which clients start", setTime(func(g *sim.Group) *time.Duration { return &g.Start })),
	forGroups("stop", "the `time` at which the arrivals of -rate end", setTime(func(g *sim.Group) *time.Duration { return &g.Stop })),
	forGroups("deadline", "the `time` that a call may take", setTime(func(g *sim.Group) *time.Duration { return &g.Deadline })),
	forGroups("processes", "the `number` of client processes, each with a budget of its own", func(g *sim.Group, v string) (err error) {
		g.Processes, err = strconv.Atoi(v)
		return err
	}),

	forServers(
		"replicas",
		"the `number` of server processes, which take turns; all other settings apply to each",
		func(s *sim.Server, v string) (err error) {
			s.Replicas, err = strconv.Atoi(v)
			return err
		},
	),
	forServers(
		"capacity",
		"the `number` of calls per second that it can serve",
		setFloat(func(s *sim.Server) *float64 { return &s.Capacity }),
	),
	forServers(
		"window",
		"count calls in windows of this `time`, and queue none",
		setTime(func(s *sim.Server) *time.Duration { return &s.Window }),
	),
	forServers("queue", "the `number` of calls that may wait for a worker; -1: no limit", func(s *sim.Server, v string) (err error) {
		s.Window = 0
		s.Queue, err = strconv.Atoi(v)
		return err
	}),
	forServers("latency", "the service time, a `distribution` as in -network", func(s *sim.Server, v string) (err error) {
		s.Latency, err = parseDistribution(v)
		return err
	}),
	forServers(
		"reject-cost",
		"the cost of a rejection, as a `share` of the cost of a call",
		setFloat(func(s *sim.Server) *float64 { return &s.RejectCost }),
	),
	forServers("reject-code", "the status `code` of a rejection", func(s *sim.Server, v string) (err error) {
		s.RejectCode, err = parseCode(v)
		return err
	}),
	switchOf(
		forServers(
			"ignore-cancel",
			"keep working on calls whose clients have given up",
			setBool(func(s *sim.Server) *bool { return &s.IgnoresCancel }),
		),
	),
	forServers("outage", "`when` it is down: from+for, or from+for:share to keep that share of the capacity; separate several by commas",
		func(s *sim.Server, v string) (err error) {
			s.Outages, err = parseOutages(v)
			return err
		}),
	forServers("outage-code", "the status `code` when it is down", func(s *sim.Server, v string) error {
		c, err := parseCode(v)
		for i := range s.Outages {
			if s.Outages[i].Left == 0 {
				s.Outages[i].Code = c
			}
		}
		return err
	}),
	forServers("slow-start", "the `time` that the capacity takes to grow back after an outage", func(s *sim.Server, v string) error {
		d, err := time.ParseDuration(v)
		for i := range s.Outages {
			s.Outages[i].SlowStart = d
		}
		return err
	}),
	switchOf(forServers("silent", "send no response at all during an outage", func(s *sim.Server, v string) error {
		silent, err := strconv.ParseBool(v)
		for i := range s.Outages {
			s.Outages[i].Silent = silent && s.Outages[i].Left == 0
		}
		return err
	})),
	forServers("pushback", "the pushback it sends with a failure: `kind` is none, fixed:5s, exact, spread, spread:150 (a second) or stop",
		func(s *sim.Server, v string) (err error) {
			s.Pushback, err = parsePushback(v)
			return err
		}),

	forStrategies(
		"attempts",
		"make at most this `number` of attempts; strategies without retries are not changed",
		func(s *sim.Strategy, v string) error {
			n, err := strconv.Atoi(v)
			if s.Policy.MaxAttempts != 1 { // the others are compared with strategies without retries
				s.Policy.MaxAttempts = n
			}
			return err
		},
	),
	forStrategies(
		"base",
		"the first `wait` of exponential and decorrelated backoffs",
		setBackoff(func(b *backoffFields) *time.Duration { return b.base }),
	),
	forStrategies(
		"max",
		"the longest `wait` of exponential and decorrelated backoffs",
		setBackoff(func(b *backoffFields) *time.Duration { return b.most }),
	),
	forStrategies("multiplier", "the `number` by which exponential backoffs grow", func(s *sim.Strategy, v string) error {
		m, err := strconv.ParseFloat(v, 64)
		if e, ok := s.Policy.Backoff.(grpcretry.Exponential); ok {
			e.Multiplier = m
			s.Policy.Backoff = e
		}
		return err
	}),
	forStrategies(
		"jitter",
		"the `kind` of jitter of exponential backoffs: full, equal, proportional or none",
		func(s *sim.Strategy, v string) error {
			j, ok := jitters[v]
			if !ok {
				return fmt.Errorf("want full, equal, proportional or none")
			}
			if e, ok := s.Policy.Backoff.(grpcretry.Exponential); ok {
				e.Jitter = j
				s.Policy.Backoff = e
			}
			return nil
		},
	),
	forStrategies("codes", "the status `codes` that are retried, separated by commas", func(s *sim.Strategy, v string) error {
		s.Policy.Codes = nil
		for _, one := range strings.Split(v, ",") {
			c, err := parseCode(one)
			if err != nil {
				return err
			}
			s.Policy.Codes = append(s.Policy.Codes, c)
		}
		return nil
	}),
	forStrategies(
		"max-server-delay",
		"the longest pushback that is followed, a `time`; a longer one ends the call",
		setTime(func(s *sim.Strategy) *time.Duration { return &s.Policy.MaxServerDelay }),
	),
	forStrategies(
		"attempt-timeout",
		"the `time` that one attempt may take",
		setTime(func(s *sim.Strategy) *time.Duration { return &s.Policy.AttemptTimeout }),
	),
	forStrategies(
		"patience",
		"the `time` for which calls wait for a target that fails; -1s: they do not",
		setTime(func(s *sim.Strategy) *time.Duration { return &s.Policy.Patience }),
	),
	forStrategies(
		"max-elapsed",
		"start no attempt after this `time`",
		setTime(func(s *sim.Strategy) *time.Duration { return &s.Policy.MaxElapsed }),
	),
	forStrategies(
		"budget",
		"`kind` is default, unlimited, ratio:0.2,0,10s,reserve=3 (share, per second, window, reserve), finagle:0.2,10,10s, throttle:10,0.1, "+
			"rate:100,10 or concurrency:50",
		func(s *sim.Strategy, v string) (err error) {
			s.Budget, err = parseBudget(v)
			return err
		},
	),
	forStrategies(
		"hedge",
		"send another attempt while the first is slow, `when` is after:50ms, quantile:0.95, quantile:0.95,5ms..1s (the bounds) or none",
		func(s *sim.Strategy, v string) error {
			h, err := parseHedging(v)
			s.Hedging = h
			return err
		},
	),
	{
		name: "also",
		of:   "scenario",
		usage: "also compare this `backoff`: full:100ms..5s×2 (or equal, proportional, none), decorrelated:100ms..5s or constant:1s; " +
			"otherwise like the first strategy",
		do: func(s *sim.Scenario, v string) error {
			b, err := parseBackoff(v)
			if err != nil || len(s.Strategies) == 0 {
				return err
			}
			also := s.Strategies[0]
			also.Name, also.Policy.Backoff, also.Policy.OverloadBackoff = v, b, nil
			s.Strategies = append(slices.Clip(s.Strategies), also)
			return nil
		},
	},
	switchOf(
		forStrategies(
			"untried",
			"attempts go to replicas that the call has not tried",
			setBool(func(s *sim.Strategy) *bool { return &s.Untried }),
		),
	),
	switchOf(
		forStrategies(
			"stop-callers",
			"servers whose downstream call gave up say \"do not retry\"",
			setBool(func(s *sim.Strategy) *bool { return &s.StopCallers }),
		),
	),
	switchOf(
		forStrategies(
			"one-attempt",
			"servers make one attempt downstream for requests that are retries",
			setBool(func(s *sim.Strategy) *bool { return &s.OneAttempt }),
		),
	),
	switchOf(forStrategies("ignore-pushback", "clients ignore pushback", setBool(func(s *sim.Strategy) *bool { return &s.IgnorePushback }))),
}

func forScenario(name, usage string, set func(*sim.Scenario, string) error) parameter {
	return parameter{name: name, of: "scenario", usage: usage, do: set}
}

func forGroups(name, usage string, set func(*sim.Group, string) error) parameter {
	return parameter{name: name, of: "group", usage: usage, do: func(s *sim.Scenario, v string) error {
		err := set(&sim.Group{}, v)
		for i := range s.Groups {
			err = set(&s.Groups[i], v)
		}
		return err
	}}
}

func forServers(name, usage string, set func(*sim.Server, string) error) parameter {
	return parameter{name: name, of: "server", usage: usage, do: func(s *sim.Scenario, v string) error {
		err := set(&sim.Server{}, v)
		for i := range s.Servers {
			err = set(&s.Servers[i], v)
		}
		return err
	}}
}

// forStrategies sets a field of the strategies that are compared. The own strategies of groups and
// downstream calls are not changed.
func forStrategies(name, usage string, set func(*sim.Strategy, string) error) parameter {
	return parameter{name: name, of: "strategy", usage: usage, do: func(s *sim.Scenario, v string) error {
		err := set(&sim.Strategy{}, v)
		for i := range s.Strategies {
			err = set(&s.Strategies[i], v)
		}
		return err
	}}
}

func switchOf(p parameter) parameter {
	p.isSwitch = true
	return p
}

func setTime[T any](field func(*T) *time.Duration) func(*T, string) error {
	return func(t *T, v string) (err error) {
		*field(t), err = time.ParseDuration(v)
		return err
	}
}

func setFloat[T any](field func(*T) *float64) func(*T, string) error {
	return func(t *T, v string) (err error) {
		*field(t), err = strconv.ParseFloat(v, 64)
		return err
	}
}

func setUint[T any](field func(*T) *uint64) func(*T, string) error {
	return func(t *T, v string) (err error) {
		*field(t), err = strconv.ParseUint(v, 10, 64)
		return err
	}
}

func setBool[T any](field func(*T) *bool) func(*T, string) error {
	return func(t *T, v string) (err error) {
		*field(t), err = strconv.ParseBool(v)
		return err
	}
}

// backoffFields are what exponential and decorrelated backoffs have in common.
type backoffFields struct{ base, most *time.Duration }

func setBackoff(field func(*backoffFields) *time.Duration) func(*sim.Strategy, string) error {
	return func(s *sim.Strategy, v string) error {
		d, err := time.ParseDuration(v)
		switch b := s.Policy.Backoff.(type) {
		case grpcretry.Exponential:
			*field(&backoffFields{&b.Base, &b.Max}) = d
			s.Policy.Backoff = b
		case grpcretry.Decorrelated:
			*field(&backoffFields{&b.Base, &b.Max}) = d
			s.Policy.Backoff = b
		}
		return err
	}
}

func parseCode(v string) (c codes.Code, err error) {
	return c, c.UnmarshalJSON([]byte(strconv.Quote(strings.ToUpper(v))))
}

var jitters = map[string]grpcretry.Jitter{
	"full": grpcretry.FullJitter, "equal": grpcretry.EqualJitter, "proportional": grpcretry.ProportionalJitter, "none": grpcretry.NoJitter,
}

// parseBackoff reads jitter:base..max×multiplier (or x), with or without the multiplier,
// decorrelated:base..max and constant:wait.
func parseBackoff(v string) (grpcretry.Backoff, error) {
	kind, rest, _ := strings.Cut(v, ":")
	if kind == "constant" {
		d, err := time.ParseDuration(rest)
		return grpcretry.Constant(d), err
	}
	rest, growth, grows := strings.Cut(strings.ReplaceAll(rest, "x", "×"), "×")
	from, to, ok := strings.Cut(rest, "..")
	jitter, exponential := jitters[kind]
	if !ok || !exponential && (kind != "decorrelated" || grows) {
		return nil, fmt.Errorf("want full:100ms..5s×2 (or equal, proportional, none), decorrelated:100ms..5s or constant:1s")
	}
	base, err := time.ParseDuration(from)
	if err != nil {
		return nil, err
	}
	most, err := time.ParseDuration(to)
	if err != nil {
		return nil, err
	}
	if kind == "decorrelated" {
		return grpcretry.Decorrelated{Base: base, Max: most}, nil
	}
	multiplier := 0.0
	if grows {
		if multiplier, err = strconv.ParseFloat(growth, 64); err != nil {
			return nil, fmt.Errorf("%q is not a number", growth)
		}
	}
	return grpcretry.Exponential{Base: base, Max: most, Multiplier: multiplier, Jitter: jitter}, nil
}

// parseDistribution reads 10ms, 10ms±2ms (or +-), shape:10ms, shape:10ms±2ms and
// pareto:10ms^1.5.
func parseDistribution(v string) (d sim.Distribution, err error) {
	rest := strings.ReplaceAll(v, "+-", "±")
	if shape, after, ok := strings.Cut(rest, ":"); ok {
		d.Shape, rest = sim.Shape(shape), after
		if shape == "constant" {
			d.Shape = sim.ConstantShape
		}
	} else if strings.Contains(rest, "±") {
		d.Shape = sim.NormalShape
	}
	if before, tail, ok := strings.Cut(rest, "^"); ok {
		rest = before
		if d.Tail, err = strconv.ParseFloat(tail, 64); err != nil {
			return d, fmt.Errorf("%q is not a number", tail)
		}
	}
	if before, spread, ok := strings.Cut(rest, "±"); ok {
		rest = before
		if d.Spread, err = time.ParseDuration(spread); err != nil {
			return d, err
		}
	}
	d.Mean, err = time.ParseDuration(rest)
	return d, err
}

// parseOutages reads from+for and from+for:share, separated by commas, and none.
func parseOutages(v string) (all []sim.Outage, err error) {
	if v == "none" {
		return nil, nil
	}
	for _, one := range strings.Split(v, ",") {
		var o sim.Outage
		span, left, partly := strings.Cut(one, ":")
		if partly {
			if o.Left, err = strconv.ParseFloat(left, 64); err != nil {
				return nil, fmt.Errorf("%q is not a share, such as 0.3", left)
			}
		}
		from, length, ok := strings.Cut(span, "+")
		if !ok {
			return nil, fmt.Errorf("%q is not an outage, such as 0s+10s or 20s+10s:0.3", one)
		}
		if o.From, err = time.ParseDuration(from); err != nil {
			return nil, err
		}
		if o.For, err = time.ParseDuration(length); err != nil {
			return nil, err
		}
		all = append(all, o)
	}
	return all, nil
}

func parsePushback(v string) (p sim.Pushback, err error) {
	kind, argument, has := strings.Cut(v, ":")
	p.Kind = sim.PushbackKind(kind)
	switch {
	case kind == "none" && !has:
		return sim.Pushback{}, nil
	case p.Kind == sim.FixedPushback:
		p.Delay, err = time.ParseDuration(argument)
	case p.Kind == sim.SpreadPushback && has:
		p.Rate, err = strconv.ParseFloat(argument, 64)
	case has || p.Kind != sim.ExactPushback && p.Kind != sim.SpreadPushback && p.Kind != sim.StopPushback:
		err = fmt.Errorf("want none, fixed:5s, exact, spread, spread:150 or stop")
	}
	return p, err
}

// parseHedging reads none, after:delay, quantile:q and quantile:q,least..most.
func parseHedging(v string) (*sim.Hedging, error) {
	kind, argument, _ := strings.Cut(v, ":")
	switch kind {
	case "none":
		return nil, nil
	case "after":
		d, err := time.ParseDuration(argument)
		return &sim.Hedging{Kind: sim.HedgeAfter, Delay: d}, err
	case "quantile":
		h := &sim.Hedging{Kind: sim.HedgeAtQuantile}
		q, bounds, bounded := strings.Cut(argument, ",")
		var err error
		if h.Quantile, err = strconv.ParseFloat(q, 64); err != nil {
			return nil, fmt.Errorf("%q is not a number", q)
		}
		if !bounded {
			return h, nil
		}
		least, most, ok := strings.Cut(bounds, "..")
		if !ok {
			return nil, fmt.Errorf("%q are not bounds, such as 5ms..1s", bounds)
		}
		if h.AtLeast, err = time.ParseDuration(least); err != nil {
			return nil, err
		}
		h.AtMost, err = time.ParseDuration(most)
		return h, err
	default:
		return nil, fmt.Errorf("want after:50ms, quantile:0.95, quantile:0.95,5ms..1s or none")
	}
}

// parseBudget reads a kind and its numbers, in the order of the library's functions. The window
// and the reserve may be omitted.
func parseBudget(v string) (b sim.Budget, err error) {
	kind, argument, _ := strings.Cut(v, ":")
	var numbers []float64
	for i, one := range strings.Split(argument, ",") {
		if argument == "" {
			break
		}
		if reserve, ok := strings.CutPrefix(one, "reserve="); ok && kind == "ratio" {
			if b.Reserve, err = strconv.ParseFloat(reserve, 64); err != nil {
				return b, fmt.Errorf("%q is not a number", reserve)
			}
			continue
		}
		if (kind == "ratio" || kind == "finagle") && i == 2 {
			if b.Window, err = time.ParseDuration(one); err != nil {
				return b, err
			}
			continue
		}
		n, err := strconv.ParseFloat(one, 64)
		if err != nil {
			return b, fmt.Errorf("%q is not a number", one)
		}
		numbers = append(numbers, n)
	}
	want := map[string]int{"default": 0, "unlimited": 0, "ratio": 2, "finagle": 2, "throttle": 2, "rate": 2, "concurrency": 1}
	count, ok := want[kind]
	if !ok {
		return b, fmt.Errorf("want default, unlimited, ratio, finagle, throttle, rate or concurrency")
	}
	if len(numbers) != count {
		return b, fmt.Errorf("%s has %d numbers, want %d", kind, len(numbers), count)
	}
	switch kind {
	case "default":
	case "unlimited":
		b.Kind = sim.UnlimitedBudget
	case "ratio":
		b.Kind, b.Ratio, b.MinPerSecond = sim.RatioBudget, numbers[0], numbers[1]
	case "finagle":
		b.Kind, b.Ratio, b.MinPerSecond = sim.FinagleBudget, numbers[0], numbers[1]
	case "throttle":
		b.Kind, b.MaxTokens, b.TokenRatio = sim.ThrottleBudget, numbers[0], numbers[1]
	case "rate":
		b.Kind, b.PerSecond, b.Burst = sim.RateBudget, numbers[0], int(numbers[1])
	case "concurrency":
		b.Kind, b.Limit = sim.ConcurrencyBudget, int(numbers[0])
	}
	return b, nil
}
