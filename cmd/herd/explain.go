package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/cmd/herd/internal/sim"
)

// The files explain*.go are the command "herd explain": one page on what a call experiences under a
// policy, and on the load that a server gets. It is a part of herd, because it is made of the same
// things: the flags of strategies, the reader of service configs and the simulator.
//
// No rule of the library is implemented here. Timelines come from driving a drive.Plan with
// chosen or drawn random numbers (explain_timeline.go), budgets from driving Plans until they refuse
// (explain_budget.go), and everything else from simulations.

// A question is a policy and the circumstances in which calls are made under it.
type question struct {
	strategy   sim.Strategy
	base       sim.Strategy // before flags changed it: that of a service config, or the zero Strategy
	unsentOnly bool         // calls are retried only if they have certainly run nowhere

	rate      float64       // calls per second of all processes together
	processes int           // client processes, each with a budget of its own
	deadline  time.Duration // of each call; 0: none
	headroom  float64       // how much more than the normal load the server can serve, as a share of it
	latency   sim.Distribution
	seed      uint64

	effort effort

	method  string   // as the command line names it; "" for a placeholder
	asGiven []string // the command line, for the foot of the page
}

// An effort says how much is simulated.
type effort struct {
	rate    float64 // about the calls per second of the simulated processes together
	stories int     // calls with drawn random numbers
}

// explainOptions are the settings of a command line of "herd explain".
type explainOptions struct {
	question
	policy  string
	changes []change
}

const explainUsage = `Herd explain prints, on one page, whether to keep a policy or which one to use instead, what a call
experiences under it, what its budget allows, and what to beware of.

    herd explain [flags]

Without flags it explains the library's defaults. A policy is read from a service config (-policy), or
is described by flags as in Go options; flags change what a service config says.

`

// runExplain runs "herd explain". It returns the exit status, as run does.
func runExplain(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	o, err := parseExplain(args, stderr)
	switch {
	case errors.Is(err, flag.ErrHelp):
		return 0
	case err != nil:
		return 2 // parseExplain has printed the reason
	}
	if err := o.do(ctx, stdout); err != nil {
		fmt.Fprintln(stderr, "herd explain:", err)
		return 1
	}
	return 0
}

func (o *explainOptions) do(ctx context.Context, stdout io.Writer) error {
	if err := o.read(); err != nil {
		return err
	}
	page, err := o.explain(ctx)
	if err != nil {
		return err
	}
	out := &report{w: stdout}
	page.print(out)
	return out.err
}

// parseExplain reads the command line. It prints its errors to stderr before it returns them.
func parseExplain(args []string, stderr io.Writer) (*explainOptions, error) {
	o := &explainOptions{question: question{asGiven: args, effort: effort{rate: 200, stories: 4000}}}
	latency, headroom := "lognormal:20ms±20ms", "100%"
	flags := flag.NewFlagSet("herd explain", flag.ContinueOnError)
	flags.StringVar(
		&o.policy, "policy", "",
		"explain the retryPolicy or hedgingPolicy of the gRPC service config in this `file`, as WithServiceConfig obeys it",
	)
	flags.StringVar(&o.method, "method", "", "the `method`, /pkg.Service/Method; with -policy, the one whose config is explained")
	flags.Float64Var(&o.rate, "rate", 1000, "the `number` of calls per second, of all processes together")
	flags.IntVar(&o.processes, "processes", 10, "the `number` of client processes, each with a budget of its own")
	flags.DurationVar(&o.deadline, "deadline", 10*time.Second, "the `time` that a call may take, over all attempts; 0: no limit")
	flags.StringVar(&headroom, "headroom", headroom, "how much more than the normal load the server can serve, a `share` such as 25% or 0.25")
	flags.StringVar(
		&latency,
		"latency",
		latency,
		"how long the server works on a call: a `distribution` such as 20ms, lognormal:20ms±20ms, pareto:10ms^1.5",
	)
	flags.BoolVar(&o.unsentOnly, "unsent-only", false, "retry only calls that have certainly run nowhere, as WithUnsentOnly does")
	flags.Uint64Var(&o.seed, "seed", 0, "start the random numbers with this `number`")
	for _, p := range explainParameters() {
		flags.Func(p.name, p.usage, func(value string) error {
			o.changes = append(o.changes, change{p.name, value, p.do})
			return p.do(&sim.Scenario{}, value) // so that a bad value is reported immediately
		})
	}
	return o, parseFlags(flags, explainUsage, args, stderr, func() error { return o.check(latency, headroom) })
}

// explainParameters are the flags for the fields of strategies. The others of herd are about
// scenarios, or about several strategies.
func explainParameters() (all []parameter) {
	names := []string{
		"attempts",
		"base",
		"max",
		"multiplier",
		"jitter",
		"codes",
		"attempt-timeout",
		"max-elapsed",
		"patience",
		"budget",
		"hedge",
	}
	for _, p := range parameters {
		if slices.Contains(names, p.name) {
			all = append(all, p)
		}
	}
	return append(
		all,
		forStrategies(
			"backoff",
			"the waits before retries, a `backoff`: full:100ms..5s×2 (or equal, proportional, none), decorrelated:100ms..5s or constant:1s",
			func(s *sim.Strategy, v string) (err error) {
				s.Policy.Backoff, err = parseBackoff(v)
				return err
			},
		),
		forStrategies("overload-backoff", "the waits after RESOURCE_EXHAUSTED, a `backoff` as in -backoff",
			func(s *sim.Strategy, v string) (err error) {
				s.Policy.OverloadBackoff, err = parseBackoff(v)
				return err
			}),
	)
}

// check finds mistakes in the circumstances.
func (o *explainOptions) check(latency, headroom string) (err error) {
	if o.latency, err = parseDistribution(latency); err != nil {
		return fmt.Errorf("-latency %s: %w", latency, err)
	}
	if o.headroom, err = parseShare(headroom); err != nil {
		return fmt.Errorf("-headroom %s: %w", headroom, err)
	}
	switch {
	case !(o.rate >= 0.01 && o.rate <= 10_000_000):
		return fmt.Errorf("-rate %v: want 0.01 to 10,000,000 calls per second", o.rate)
	case o.processes < 1 || o.processes > 1_000_000:
		return fmt.Errorf("-processes %d: want 1 to 1,000,000", o.processes)
	case o.each() > 100_000:
		return fmt.Errorf("-rate %v -processes %d: want at most 100,000 calls per second of each process", o.rate, o.processes)
	case o.deadline < 0 || o.deadline > 24*time.Hour:
		return fmt.Errorf("-deadline %v: want 0 (none) to 24h", o.deadline)
	case o.latency.Mean <= 0:
		return fmt.Errorf("-latency %s: want a time above 0", latency)
	case o.method != "" && !strings.HasPrefix(o.method, "/"):
		return fmt.Errorf("-method %s: want /pkg.Service/Method", o.method)
	}
	return nil
}

// parseShare reads 25% and 0.25.
func parseShare(v string) (float64, error) {
	number, percent := strings.CutSuffix(v, "%")
	share, err := strconv.ParseFloat(number, 64)
	if percent {
		share /= 100
	}
	if err != nil || !(share >= 0 && share <= 100) || math.IsNaN(share) {
		return 0, fmt.Errorf("want a share such as 25%% or 0.25, of at most 10000%%")
	}
	return share, nil
}

// wholesFirst returns the changes in an order in which none undoes another: those that set a whole
// backoff or hedging come before those of its parts.
func wholesFirst(all []change) []change {
	whole := func(c change) int {
		if slices.Contains([]string{"backoff", "overload-backoff", "hedge"}, c.name) {
			return 0
		}
		return 1
	}
	all = slices.Clone(all)
	slices.SortStableFunc(all, func(a, b change) int { return whole(a) - whole(b) })
	return all
}

// fits rejects a change that would have no effect on a strategy.
func (c change) fits(s *sim.Strategy) error {
	switch _, exponential := s.Policy.Backoff.(grpcretry.Exponential); {
	case c.name == "attempts" && c.value == "0":
		return errors.New("want at least 1")
	case (c.name == "multiplier" || c.name == "jitter") && !exponential:
		return errors.New("the backoff is not exponential")
	default:
		return nil
	}
}

// read reads the service config, if there is one, and applies the flags.
func (o *explainOptions) read() error {
	if o.policy != "" {
		found, err := readPolicy(o.policy, o.method)
		if err != nil {
			return err
		}
		if len(found) > 1 {
			var names []string
			for _, one := range found {
				names = append(names, strings.TrimPrefix(one.Name, "policy "))
			}
			return fmt.Errorf(
				"-policy %s has %d policies (%s): choose one with -method /pkg.Service/Method",
				o.policy,
				len(found),
				strings.Join(names, ", "),
			)
		}
		o.base = inLibrary(found[0])
	}
	s := sim.Scenario{Strategies: []sim.Strategy{o.base}}
	changesBackoff := func(c change) bool {
		return slices.Contains([]string{"base", "max", "multiplier", "jitter"}, c.name)
	}
	if slices.ContainsFunc(o.changes, changesBackoff) && s.Strategies[0].Policy.Backoff == nil {
		s.Strategies[0].Policy.Backoff = grpcretry.Exponential{}
	}
	s.Groups, s.Servers = []sim.Group{{Clients: 1}}, []sim.Server{{Latency: o.latency}}
	if err := s.Check(); err != nil {
		return fmt.Errorf("-latency: %w", err) // a service config has been checked
	}
	var wrong error // since the flag that culprit is
	var culprit change
	for _, c := range wholesFirst(o.changes) {
		err := c.fits(&s.Strategies[0])
		if err == nil {
			err = c.do(&s, c.value)
		}
		if err != nil {
			return fmt.Errorf("%v: %w", c, err)
		}
		if err := s.Check(); err == nil || wrong == nil {
			wrong, culprit = err, c
		}
	}
	if wrong != nil {
		return fmt.Errorf("%v: %w", culprit, wrong)
	}
	o.strategy = s.Strategies[0]
	o.strategy.Name = "this policy"
	if o.unsentOnly {
		o.strategy.Policy.UnsentOnly = true
		o.strategy.Hedging = nil // as in the library
	}
	return nil
}

// resolved returns the policy with every default filled in.
func (q *question) resolved() (grpcretry.Policy, error) {
	r, err := q.strategy.Retrier()
	if err != nil {
		return grpcretry.Policy{}, err
	}
	return r.Policy(""), nil
}

// origin says where a part of the policy comes from.
func (q *question) origin(part func(sim.Strategy) any) string {
	now := part(q.strategy)
	switch {
	case !reflect.DeepEqual(now, part(q.base)):
		return "your flags"
	case now == nil, reflect.ValueOf(now).IsZero() && now != any(grpcretry.Constant(0)):
		return "default"
	default:
		return "service config"
	}
}

// explain answers the question.
func (q *question) explain(ctx context.Context) (*explainPage, error) {
	e, err := newExplanation(ctx, q)
	if err != nil {
		return nil, err
	}
	calls := "calls"
	if q.method != "" {
		calls += " to " + q.method
	}
	r, err := e.recommend(ctx)
	if err != nil {
		return nil, err
	}
	page := &explainPage{Title: fmt.Sprintf("What %s experience under this policy", calls),
		Command: strings.Join(append([]string{"herd explain"}, q.asGiven...), " ")}
	page.Sections = []explainSection{e.verdict(r), e.words(), e.timelines(), e.allowance(), e.warnings()}
	if r != nil {
		page.Sections = append(page.Sections, e.comparison(r))
	}
	page.Sections = append(page.Sections, e.method())
	return page, nil
}

// An explanation holds what the sections of the page share.
type explanation struct {
	*question
	policy   grpcretry.Policy // with every default filled in
	hedges   time.Duration    // the delay between attempts, in good times; -1 if calls are not hedged
	calm     *sim.Result      // good times
	unhedged *sim.Result      // the same without hedging; nil if calls are not hedged
	stories  []failureStories // by the kind of failure
	budget   budgetFigures
}

func newExplanation(ctx context.Context, q *question) (*explanation, error) {
	e := &explanation{question: q, hedges: -1}
	var err error
	if e.policy, err = q.resolved(); err != nil {
		return nil, err
	}
	if err := e.goodTimes(ctx); err != nil {
		return nil, err
	}
	if err := e.tellAll(); err != nil {
		return nil, err
	}
	return e, e.measureBudget()
}

// method is the foot of the page.
func (e *explanation) method() explainSection {
	rate, simulated := e.fleet(e.effort.rate)
	text := "Timelines and budgets are decisions of the library's own engine; everything else is simulated on it, with fixed random " +
		"numbers (-seed). "
	if simulated != e.processes {
		text += fmt.Sprintf("Simulated are %s instead of %s, with %s calls/s, because it is the calls of each process that matter. ",
			processes(simulated), grouped(float64(e.processes)), grouped(rate))
	}
	text += fmt.Sprintf("A message takes %s in each direction. Connections and streams are not simulated.", shortTime(oneWay))
	return explainSection{Title: "How this was found", Parts: []explainPart{{Text: text}}}
}

// explainWidth is the number of characters in a line of the page.
const explainWidth = 92

// An explainPage is a title and sections.
type explainPage struct {
	Title    string
	Command  string // that makes the page again
	Sections []explainSection
}

// An explainSection is a part of the page with a heading.
type explainSection struct {
	Title string
	Parts []explainPart
}

// An explainPart is one of its fields.
type explainPart struct {
	Text   string     // a paragraph
	Table  [][]string // lines of cells, the first one being the heading
	Left   []int      // columns of the table that are aligned left, beside the first
	Points []string   // a list
	Code   string     // lines to copy
}

// print prints the page as text.
func (p *explainPage) print(out *report) {
	out.printf("%s\n%s\n", p.Title, strings.Repeat("=", len([]rune(p.Title))))
	out.printf("%s\n", fill(p.Command, explainWidth))
	for _, s := range p.Sections {
		out.printf("\n%s\n", strings.ToUpper(s.Title))
		for i, part := range s.Parts {
			if tableOfText := part.Table != nil && i > 0 && s.Parts[i-1].Text != ""; i > 0 && !tableOfText {
				out.printf("\n")
			}
			part.print(out)
		}
	}
}

func (p *explainPart) print(out *report) {
	switch {
	case p.Text != "":
		out.printf("%s\n", indent(fillUnits(p.Text, explainWidth-2), "  "))
	case p.Table != nil:
		out.table(p.Table, p.Left...)
	case p.Points != nil:
		for _, one := range p.Points {
			out.printf("  - %s\n", strings.TrimSpace(indent(fillUnits(one, explainWidth-4), "    ")))
		}
	case p.Code != "":
		out.printf("%s\n", indent(p.Code, "    "))
	}
}

// fillUnits is fill, without a break between a number and its unit.
func fillUnits(text string, width int) string {
	const joint = "\u2060" // a word joiner, which is no space to fill
	return strings.ReplaceAll(fill(unit.ReplaceAllString(text, "$1"+joint+"$2"), width), joint, " ")
}

var unit = regexp.MustCompile(`([0-9]) (s|ms|µs|calls/s|attempts|processes|layers)\b`)
