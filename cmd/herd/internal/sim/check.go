package sim

import (
	"fmt"
	"reflect"
	"slices"
	"time"

	"google.golang.org/grpc/codes"
)

// This file finds the mistakes in a scenario. Every error names the field, the value, and the values
// that are valid.

// Limits of a simulation, so that a typing mistake does not fill the memory.
const (
	mostCalls     = 100_000_000 // of a group
	mostRate      = 10_000_000  // calls per second
	mostBuckets   = 10_000_000  // entries of a series
	mostProcesses = 1_000_000
	mostReplicas  = 10_000
	mostThings    = 1_000 // groups, servers, strategies, outages
	mostInFlight  = 1_000 // attempts of a call
)

// Check finds mistakes: its error names the field and the value. [Run] checks too.
func (s *Scenario) Check() error {
	for i := range s.Strategies {
		if err := s.Strategies[i].check(fmt.Sprintf("strategies[%d]", i)); err != nil {
			return err
		}
	}
	return s.check(&Strategy{})
}

func (s *Scenario) check(strategy *Strategy) error {
	return firstOf(
		strategy.check("strategy"),
		s.checkTime(),
		s.Network.check("network"),
		checkCount("groups", len(s.Groups)),
		checkCount("servers", len(s.Servers)),
		s.checkServers(),
		s.checkGroups(),
		s.checkCircles(),
	)
}

func (s *Scenario) checkTime() error {
	bucket := timeOr(s.Bucket, time.Second)
	return firstOf(
		checkSpan("duration", s.Duration, 0, longest),
		checkSpan("bucket", bucket, time.Millisecond, longest),
		check(longest/bucket <= mostBuckets || s.Duration > 0 && s.Duration/bucket <= mostBuckets,
			"bucket", s.Bucket, "longer ones, or a duration"),
	)
}

func (s *Scenario) checkServers() error {
	var names []string
	for i := range s.Servers {
		path := fmt.Sprintf("servers[%d]", i)
		one := &s.Servers[i]
		err := firstOf(
			check(one.Name != "" || len(s.Servers) == 1, path+".name", one.Name, "a name"),
			check(!slices.Contains(names, one.Name), path+".name", one.Name, "a name of its own"),
			one.check(path),
		)
		if err != nil {
			return err
		}
		names = append(names, one.Name)
	}
	return nil
}

func (s *Scenario) checkGroups() error {
	for i := range s.Groups {
		if err := s.Groups[i].check(fmt.Sprintf("groups[%d]", i), s); err != nil {
			return err
		}
	}
	return nil
}

func (s *Scenario) hasServer(name string) bool {
	return name == "" || slices.ContainsFunc(s.Servers, func(one Server) bool { return one.Name == name })
}

// hasGroupBefore reports whether the group that g shares processes with comes before it.
func (s *Scenario) hasGroupBefore(g *Group) bool {
	for i := range s.Groups {
		switch one := &s.Groups[i]; {
		case one == g:
			return false
		case one.Name == g.With:
			return one.With == ""
		}
	}
	return false
}

// checkCircles follows the downstream calls of each server to their end.
func (s *Scenario) checkCircles() error {
	calls := map[string]string{}
	for i, one := range s.Servers {
		if one.Calls == nil {
			continue
		}
		path := fmt.Sprintf("servers[%d].calls", i)
		err := firstOf(
			check(one.Calls.Target != "" && s.hasServer(one.Calls.Target), path+".target", one.Calls.Target, "the name of a server"),
			checkSpan(path+".deadline", one.Calls.Deadline, 0, longest),
			one.Calls.Strategy.check(path+".strategy"),
		)
		if err != nil {
			return err
		}
		calls[one.Name] = one.Calls.Target
	}
	for i, one := range s.Servers {
		at := one.Name
		for range s.Servers {
			at = calls[at]
			if at == "" {
				break
			}
			if at == one.Name {
				return invalid(fmt.Sprintf("servers[%d].calls.target", i), one.Calls.Target, "no call that comes back to the server")
			}
		}
	}
	return nil
}

func (g *Group) check(path string, s *Scenario) error {
	endless := g.Rate > 0 && g.Stop == 0 && s.Duration == 0
	return firstOf(
		checkNumber(path+".rate", g.Rate, 0, mostRate),
		check(g.Clients >= 0 && g.Clients <= mostCalls, path+".clients", g.Clients, fmt.Sprintf("0 to %d", mostCalls)),
		check(g.Clients > 0 || g.Rate > 0, path+".clients", g.Clients, "clients that call once, or a rate"),
		check(g.Clients == 0 || g.Rate == 0, path+".rate", g.Rate, "either clients that call once or a rate"),
		check(g.Rate == 0 || g.Spread == 0, path+".spread", g.Spread, "0 with a rate"),
		checkSpan(path+".spread", g.Spread, 0, longest),
		checkSpan(path+".start", g.Start, 0, longest),
		checkSpan(path+".stop", g.Stop, 0, longest),
		check(g.Stop == 0 || g.Stop > g.Start, path+".stop", g.Stop, "later than start"),
		check(!endless, path+".stop", g.Stop, "an end of the arrivals, as the scenario has no duration"),
		checkSpan(path+".deadline", g.Deadline, 0, longest),
		check(s.hasServer(g.Target), path+".target", g.Target, "the name of a server"),
		check(g.Processes >= 0 && g.Processes <= mostProcesses, path+".processes", g.Processes, fmt.Sprintf("0 to %d", mostProcesses)),
		g.Strategy.check(path+".strategy"),
		check(g.With == "" || s.hasGroupBefore(g), path+".with", g.With, "the name of an earlier group with processes of its own"),
		check(g.With == "" || g.Processes == 0 && g.Strategy == nil, path+".with", g.With, `"" where the group has processes or a strategy`),
	)
}

func (s *Server) check(path string) error {
	err := firstOf(
		check(s.Replicas >= 0 && s.Replicas <= mostReplicas, path+".replicas", s.Replicas, fmt.Sprintf("0 to %d", mostReplicas)),
		checkNumber(path+".capacity", s.Capacity, 0, mostRate),
		checkSpan(path+".window", s.Window, 0, longest),
		check(s.Window == 0 || s.Capacity > 0, path+".window", s.Window, "a capacity to count"),
		check(s.Queue >= -1, path+".queue", s.Queue, "-1 (no limit), 0 (none) or more"),
		check(s.Queue == 0 || s.Capacity > 0 && s.Window == 0, path+".queue", s.Queue, "0 without workers, which need a capacity and no window"),
		s.Latency.check(path+".latency"),
		checkNumber(path+".rejectCost", s.RejectCost, 0, 1),
		checkFailure(path+".rejectCode", s.RejectCode),
		s.Pushback.check(path+".pushback", s),
		check(len(s.Outages) <= mostThings, path+".outages", len(s.Outages), fmt.Sprintf("at most %d", mostThings)),
	)
	if err != nil {
		return err
	}
	after := make([]time.Duration, s.replicas()+1) // the end of each replica's last outage, at 0 of all replicas' last one
	for i, o := range s.Outages {
		at := fmt.Sprintf("%s.outages[%d]", path, i)
		err := firstOf(
			check(o.Replica >= 0 && o.Replica <= s.replicas(), at+".replica", o.Replica, fmt.Sprintf("0 (all) to %d", s.replicas())),
		)
		if err != nil {
			return err
		}
		least := max(after[0], after[o.Replica])
		if o.Replica == 0 {
			least = slices.Max(after)
		}
		err = firstOf(
			checkSpan(at+".from", o.From, least, longest),
			checkSpan(at+".for", o.For, 1, longest),
			checkSpan(at+".slowStart", o.SlowStart, 0, longest),
			checkNumber(at+".left", o.Left, 0, 1),
			checkFailure(at+".code", o.Code),
			check(!o.Silent || o.Left == 0, at+".silent", o.Silent, "false where some capacity is left"),
			checkNumber(at+".errors", o.Errors, 0, 1),
			check(o.Errors == 0 || o.Left > 0, at+".errors", o.Errors, "0 where the server is down"),
			check(o.Left == 0 || s.Capacity > 0 || o.Errors > 0, at+".left", o.Left, "0 where the server has no capacity to lose a share of"),
		)
		if err != nil {
			return err
		}
		after[o.Replica] = o.From + o.For + o.SlowStart
	}
	return nil
}

func (p *Pushback) check(path string, s *Server) error {
	kinds := []PushbackKind{NoPushback, FixedPushback, ExactPushback, SpreadPushback, StopPushback}
	return firstOf(
		checkOneOf(path+".kind", p.Kind, kinds),
		checkSpan(path+".delay", p.Delay, 0, longest),
		check(p.Delay == 0 || p.Kind == FixedPushback, path+".delay", p.Delay, `0 unless the kind is "fixed"`),
		checkNumber(path+".rate", p.Rate, 0, mostRate),
		check(p.Rate == 0 || p.Kind == SpreadPushback, path+".rate", p.Rate, `0 unless the kind is "spread"`),
		check(p.Kind != SpreadPushback || p.Rate > 0 || s.Capacity > 0, path+".rate", p.Rate, "a rate where the server has no capacity"),
	)
}

func (d *Distribution) check(path string) error {
	shapes := []Shape{ConstantShape, UniformShape, NormalShape, ExponentialShape, LogNormalShape, ParetoShape}
	spread := d.Shape == UniformShape || d.Shape == NormalShape || d.Shape == LogNormalShape
	return firstOf(
		checkOneOf(path+".shape", d.Shape, shapes),
		checkSpan(path+".mean", d.Mean, 0, longest),
		check(d.Shape == ConstantShape || d.Mean > 0, path+".mean", d.Mean, "a time above 0"),
		checkSpan(path+".spread", d.Spread, 0, longest),
		check(spread || d.Spread == 0, path+".spread", d.Spread, "0 with this shape"),
		check(d.Shape != UniformShape || d.Spread <= d.Mean, path+".spread", d.Spread, "at most the mean"),
		check(d.Shape == ParetoShape || d.Tail == 0, path+".tail", d.Tail, "0 with this shape"),
		check(d.Shape != ParetoShape || d.Tail > 1 && d.Tail <= 1000, path+".tail", d.Tail, "above 1, at most 1000"),
	)
}

// check accepts nil, which stands for no strategy.
func (s *Strategy) check(path string) error {
	if s == nil {
		return nil
	}
	if s.Policy.Budget != nil {
		return invalid(path+".policy.budget", "set", "none: the budget of a strategy is beside its policy")
	}
	if s.Policy.Hedging != nil {
		return invalid(path+".policy.hedging", "set", "none: the hedging of a strategy is beside its policy")
	}
	if err := firstOf(s.Budget.check(path+".budget"), s.Hedging.check(path+".hedging")); err != nil {
		return err
	}
	if s.Hedging != nil && s.Policy.MaxAttempts > mostInFlight {
		return invalid(path+".policy.maxAttempts", s.Policy.MaxAttempts, fmt.Sprintf("at most %d with hedging", mostInFlight))
	}
	if _, err := s.process(); err != nil {
		return fmt.Errorf("sim: %s: %w", path, err)
	}
	return nil
}

func (b *Budget) check(path string) error {
	kinds := []BudgetKind{DefaultBudget, UnlimitedBudget, RatioBudget, FinagleBudget, ThrottleBudget, RateBudget, ConcurrencyBudget}
	finagle, rate := b.Kind == FinagleBudget, b.Kind == RateBudget
	return firstOf(
		checkOneOf(path+".kind", b.Kind, kinds),
		check(b.New == nil || b.Kind == DefaultBudget, path+".kind", b.Kind, `"" where New makes the budget`),
		check(!finagle || b.Ratio >= 0 && b.Ratio <= mostRate, path+".ratio", b.Ratio, "at least 0"),
		check(!finagle || b.MinPerSecond >= 0 && b.MinPerSecond <= mostRate, path+".minPerSecond", b.MinPerSecond, "at least 0"),
		check(
			!finagle || b.Window == 0 || b.Window >= time.Millisecond && b.Window <= longest,
			path+".window",
			b.Window,
			"at least 1ms, or 0 for 10s",
		),
		check(!rate || b.PerSecond > 0 && b.PerSecond <= mostRate, path+".perSecond", b.PerSecond, "above 0"),
		check(!rate || b.Burst > 0, path+".burst", b.Burst, "at least 1"),
	)
}

// check accepts nil, which stands for no hedging. The library checks the rest.
func (h *Hedging) check(path string) error {
	switch {
	case h == nil:
		return nil
	case h.New != nil:
		return firstOf(
			check(h.Kind == "", path+".kind", h.Kind, `"" where New makes the delay`),
			check(h.New() != nil, path+".new", "without a delay", "one"),
			h.Budget.check(path+".budget"))
	}
	return firstOf(
		checkOneOf(path+".kind", h.Kind, []HedgingKind{HedgeAfter, HedgeAtQuantile}),
		h.Budget.check(path+".budget"),
		checkSpan(path+".delay", h.Delay, 0, longest),
		check(h.Kind != HedgeAtQuantile || h.Quantile > 0 && h.Quantile < 1, path+".quantile", h.Quantile, "between 0 and 1"),
		checkSpan(path+".atLeast", h.AtLeast, 0, longest),
		checkSpan(path+".atMost", h.AtMost, 0, longest),
		check(h.AtMost == 0 || h.AtMost >= h.AtLeast, path+".atMost", h.AtMost, "0 or at least atLeast"),
	)
}

// The checks below return nil for valid values.

func check(ok bool, path string, value any, want string) error {
	if ok {
		return nil
	}
	return invalid(path, value, want)
}

func checkCount(path string, n int) error {
	return check(n > 0 && n <= mostThings, path, n, fmt.Sprintf("1 to %d of them", mostThings))
}

func checkSpan(path string, d, least, most time.Duration) error {
	return check(d >= least && d <= most, path, d, fmt.Sprintf("%v to %v", least, most))
}

func checkNumber(path string, v, least, most float64) error {
	return check(v >= least && v <= most, path, v, fmt.Sprintf("%v to %v", least, most)) // false for NaN
}

func checkOneOf[T ~string](path string, v T, allowed []T) error {
	return check(slices.Contains(allowed, v), path, v, fmt.Sprintf("one of %q", allowed))
}

func checkFailure(path string, c codes.Code) error {
	return check(c <= codes.Unauthenticated, path, c, "a status code")
}

func invalid(path string, value any, want string) error {
	if v := reflect.ValueOf(value); v.Kind() == reflect.String {
		value = fmt.Sprintf("%q", v.String())
	}
	return fmt.Errorf("sim: %s is %v, want %s", path, value, want)
}

func firstOf(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}
