package grpcretry

import (
	"cmp"
	"fmt"
	"math"
	"time"

	"github.com/grpcretry/grpcretry/internal/inside"
)

// A Backoff computes the wait before a retry. Use [Exponential] unless you have a reason not to;
// [Decorrelated] and [Constant] are the alternatives.
//
// Delay is a pure function: it keeps no state, reads no clock and draws no random number of its
// own. It must be safe for concurrent use.
//
// retry counts the call's retries since the backoff was last restarted, from 1. prev is the
// previous wait, 0 at first. u is uniform in [0, 1). retry and prev belong to the call, even if a
// failure with another status code selects another Backoff. A server's pushback or RetryInfo
// restarts them at 1 and 0 (gRFC A6 #pushback).
//
// A negative result counts as 0.
type Backoff interface {
	Delay(retry int, prev time.Duration, u float64) time.Duration
}

// The defaults for zero fields of [Exponential] and [Decorrelated], and for the overload backoff.
const (
	defaultBase       = 100 * time.Millisecond
	defaultMax        = 5 * time.Second
	defaultMultiplier = 2.0

	overloadBase = time.Second
	overloadMax  = 20 * time.Second
)

// Jitter says how [Exponential] spreads the clients that failed together.
type Jitter int

// The kinds of jitter, for a computed backoff d.
const (
	// FullJitter waits between 0 and d. It spreads the clients best, and is the default.
	FullJitter Jitter = iota
	// EqualJitter waits between d/2 and d.
	EqualJitter
	// ProportionalJitter waits between 0.8 d and 1.2 d, as gRFC A6
	// #exponential-backoff specifies. The wait may exceed Max by up to 20%.
	ProportionalJitter
	// NoJitter waits exactly d. Clients that failed together retry together.
	NoJitter
)

// Exponential waits d = min(Max, Base × Multiplier^(retry−1)), spread by Jitter.
// It never overflows, whatever the retry number.
type Exponential struct {
	Base       time.Duration // the first d; 0 means 100 ms
	Max        time.Duration // the largest d, not below Base; 0 means 5 s
	Multiplier float64       // growth per retry, at least 1; 0 means 2
	Jitter     Jitter        // the zero value is FullJitter
}

// Delay implements [Backoff]. It ignores prev.
func (e Exponential) Delay(retry int, _ time.Duration, u float64) time.Duration {
	e = e.withDefaults()
	d := e.computed(retry)
	u = unit(u)
	switch e.Jitter {
	case EqualJitter:
		half := float64(d) / 2
		return min(d, duration(half+u*half))
	case ProportionalJitter:
		return duration(float64(d) * (0.8 + 0.4*u))
	case NoJitter:
		return d
	default:
		return duration(u * float64(d))
	}
}

// computed returns d, the backoff before jitter. In a service config Base may exceed Max, and
// Multiplier may be below 1.
func (e Exponential) computed(retry int) time.Duration {
	grown := float64(e.Base) * math.Pow(e.Multiplier, float64(max(retry, 1)-1))
	if grown >= float64(e.Max) {
		return e.Max
	}
	return duration(grown)
}

// withDefaults replaces the fields that are zero.
func (e Exponential) withDefaults() Exponential {
	e.Base = cmp.Or(e.Base, defaultBase)
	e.Max = cmp.Or(e.Max, defaultMax)
	e.Multiplier = cmp.Or(e.Multiplier, defaultMultiplier)
	return e
}

func (e Exponential) check() error {
	if err := checkSpan("Exponential", e.Base, e.Max); err != nil {
		return err
	}
	if m := e.Multiplier; m != 0 && !(m >= 1) || math.IsInf(m, 0) { // !(m >= 1) holds for NaN too
		return fmt.Errorf("Exponential.Multiplier is %v, want a finite number of at least 1, or 0 for the default", m)
	}
	if e.Jitter < FullJitter || e.Jitter > NoJitter {
		return fmt.Errorf("Exponential.Jitter is %d, want FullJitter, EqualJitter, ProportionalJitter or NoJitter", int(e.Jitter))
	}
	return nil
}

// Decorrelated waits min(Max, Base + u·(3·max(prev, Base) − Base)): each wait is
// drawn between Base and three times the one before, so clients drift apart even
// when they draw the same numbers later.
type Decorrelated struct {
	Base time.Duration // the smallest wait; 0 means 100 ms
	Max  time.Duration // the largest wait, not below Base; 0 means 5 s
}

// Delay implements [Backoff]. It ignores retry.
func (d Decorrelated) Delay(_ int, prev time.Duration, u float64) time.Duration {
	d = d.withDefaults()
	lo := float64(d.Base)
	wait := lo + unit(u)*(3*math.Max(float64(prev), lo)-lo)
	return min(d.Max, max(d.Base, duration(wait))) // floats of more than 104 days are rounded
}

// withDefaults replaces the fields that are zero.
func (d Decorrelated) withDefaults() Decorrelated {
	d.Base = cmp.Or(d.Base, defaultBase)
	d.Max = cmp.Or(d.Max, defaultMax)
	return d
}

func (d Decorrelated) check() error { return checkSpan("Decorrelated", d.Base, d.Max) }

// Constant waits the same time before every retry, without jitter. It is at least 0; Constant(0)
// retries immediately.
type Constant time.Duration

// Delay implements [Backoff]. It ignores its arguments.
func (c Constant) Delay(int, time.Duration, float64) time.Duration {
	return max(0, time.Duration(c))
}

func (c Constant) check() error {
	if c < 0 {
		return fmt.Errorf("Constant is %v, want a duration of at least 0", time.Duration(c))
	}
	return nil
}

// isOurs reports whether a backoff is one of this package's, so that its waits are known. A new one belongs here, and in withDefaults.
func isOurs(b Backoff) bool {
	switch b.(type) {
	case Exponential, Decorrelated, Constant:
		return true
	default:
		return false
	}
}

// withDefaults replaces the zero fields of this package's backoffs by their defaults, for readers
// of a Policy.
func withDefaults(b Backoff) Backoff {
	switch b := b.(type) {
	case Exponential:
		return b.withDefaults()
	case Decorrelated:
		return b.withDefaults()
	default:
		return b
	}
}

// checkSpan checks the fields that [Exponential] and [Decorrelated] have in common.
func checkSpan(kind string, base, longest time.Duration) error {
	if base < 0 {
		return fmt.Errorf("%s.Base is %v, want a positive duration, or 0 for %v", kind, base, defaultBase)
	}
	if longest < 0 {
		return fmt.Errorf("%s.Max is %v, want a positive duration, or 0 for %v", kind, longest, defaultMax)
	}
	if b, m := cmp.Or(base, defaultBase), cmp.Or(longest, defaultMax); m < b {
		if longest == 0 {
			return fmt.Errorf("%s.Max is %v, the default, below Base %v", kind, m, b)
		}
		return fmt.Errorf("%s.Max is %v, below Base %v", kind, m, b)
	}
	return nil
}

// nextBackoff returns a wait from b, 0 if b returns a negative one.
func nextBackoff(b Backoff, retry int, prev time.Duration, u float64) time.Duration {
	return max(0, b.Delay(retry, prev, u))
}

// duration converts nanoseconds to a Duration, clamped to 0 and the longest one; NaN becomes 0.
func duration(ns float64) time.Duration {
	switch {
	case ns >= math.MaxInt64:
		return math.MaxInt64
	case ns > 0:
		return time.Duration(ns)
	default:
		return 0
	}
}

// unit clamps u to [0, 1), so that no random source can break a bound.
func unit(u float64) float64 {
	if !(u > 0) { // NaN too
		return 0
	}
	return min(u, 1-0x1p-53)
}

// WaitSource names the origin of the wait before an attempt. 0 stands for no wait, as before a first attempt.
type WaitSource int8

// The sources of a wait. Two more have only a String: "connect" and "hedge_delay".
const (
	waitNone       WaitSource = iota
	WaitBackoff               // the policy's [Backoff]; longer while the target is failing, see [WithPatience]
	WaitPushback              // the server's grpc-retry-pushback-ms trailer
	WaitRetryInfo             // a google.rpc.RetryInfo in the server's status
	waitHedgeDelay            // a hedged call's [HedgeDelay], which passed without a response

	waitConnect WaitSource = inside.WaitConnect // the wait for a connection, and the backoff after it
)

var waitSourceNames = [...]string{"none", "backoff", "pushback", "retry_info", "hedge_delay", "connect"}

// String returns "none", "backoff", "pushback", "retry_info", "hedge_delay" or "connect".
func (s WaitSource) String() string {
	if s < 0 || int(s) >= len(waitSourceNames) {
		return fmt.Sprintf("WaitSource(%d)", int(s))
	}
	return waitSourceNames[s]
}

// isHedge reports whether the attempt is a hedge: sent beside an earlier one in flight, and not in place of one.
func (s WaitSource) isHedge() bool { return s == waitHedgeDelay }

// isServers reports whether a server has asked for the wait.
func (s WaitSource) isServers() bool { return s == WaitPushback || s == WaitRetryInfo }
