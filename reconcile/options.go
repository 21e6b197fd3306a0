package reconcile

import (
	"fmt"
	"log/slog"
	"strings"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/metric"
	"golang.org/x/time/rate"

	"github.com/grpcretry/grpcretry"
)

// An Option configures [NewRateLimiter].
type Option interface{ apply(*config) }

type option func(*config)

func (o option) apply(c *config) { o(c) }

type config struct {
	target    string
	slowLane  SlowLane
	retention time.Duration
	logger    *slog.Logger
	meters    metric.MeterProvider
}

// A SlowLane says how often keys return for which the budget does not pay. A zero field means its
// default.
type SlowLane struct {
	// Rate is the number of keys per second that return from the slow lane, all keys together. The
	// default is 1, and 10 as long as the limiter knows no queue: then keys cannot be brought
	// forward, see [NewQueue]. [rate.Inf] means no limit; less than one key per day counts as one.
	Rate rate.Limit
	// Backoff is the shortest wait of a key; its retry number is how often in a row the key has come
	// to the slow lane. The default is 1 s, doubling up to 5 min, with equal jitter.
	Backoff grpcretry.Backoff
}

const (
	defaultRate         = 1
	defaultRateNoQueue  = 10
	longestSlot         = 24 * time.Hour
	defaultRetention    = 10 * time.Minute
	forwardedPerSuccess = 2
)

var defaultBackoff grpcretry.Backoff = grpcretry.Exponential{
	Base: time.Second, Max: 5 * time.Minute, Multiplier: 2, Jitter: grpcretry.EqualJitter,
}

// WithSlowLane sets the rate and the backoff of the slow lane. [NewRateLimiter] panics if the rate is
// negative or NaN, or if [grpcretry.WithBackoff] would reject the backoff. A later WithSlowLane replaces an earlier one.
func WithSlowLane(l SlowLane) Option { return option(func(c *config) { c.slowLane = l }) }

// WithTarget names the backend whose budget pays for retries, if there is a budget for each, see
// [grpcretry.PerTarget]. For a backend that is called by gRPC it is the canonical form of what the
// client dials, such as "dns:///orders:443", so that calls and keys share a budget. The default is
// the name up to its second slash, "/reconcile". A later WithTarget replaces an earlier one.
func WithTarget(target string) Option { return option(func(c *config) { c.target = target }) }

// WithRetention sets how long after its next attempt is due a key is remembered that neither fails
// again nor is forgotten, because the program has dropped it. Its failures are then no longer
// counted, and what was paid for its attempt is refunded, as soon as another key fails or is forgotten.
// d is above 0; [NewRateLimiter] panics for other values. The default is 10 minutes; it should be longer
// than a key ever waits for a worker and keeps it busy. A later WithRetention replaces an earlier one.
func WithRetention(d time.Duration) Option { return option(func(c *config) { c.retention = d }) }

// WithLogger writes a bounded number of lines about failing keys to l, see docs/reconcile.md. By
// default, and with nil, there are none. A later WithLogger replaces an earlier one.
func WithLogger(l *slog.Logger) Option { return option(func(c *config) { c.logger = l }) }

// WithMeterProvider records metrics with the provider; nil means the global one. Without this option
// there are no metrics. A later WithMeterProvider replaces an earlier one.
func WithMeterProvider(mp metric.MeterProvider) Option {
	return option(func(c *config) {
		c.meters = mp
		if mp == nil {
			c.meters = otel.GetMeterProvider()
		}
	})
}

func newConfig(name string, opts []Option) (*config, error) {
	c := &config{target: name, retention: defaultRetention}
	if second := strings.IndexByte(strings.TrimPrefix(name, "/"), '/'); second > 0 {
		c.target = name[:second+1]
	}
	for i, o := range opts {
		if o == nil {
			return nil, fmt.Errorf("option number %d is nil", i+1)
		}
		o.apply(c)
	}
	if c.slowLane.Backoff == nil {
		c.slowLane.Backoff = defaultBackoff
	}
	_, wrong := grpcretry.New(grpcretry.WithBackoff(c.slowLane.Backoff))
	switch {
	case wrong != nil:
		return nil, fmt.Errorf("WithSlowLane: Backoff: %w", wrong)
	case len(name) < 2 || name[0] != '/' || name[1] == '/':
		return nil, fmt.Errorf(`name is %q, want words with a leading slash, such as "/reconcile/orders"`, name)
	case !(c.slowLane.Rate >= 0): // or NaN
		return nil, fmt.Errorf("WithSlowLane: Rate is %v, want at least 0", float64(c.slowLane.Rate))
	case c.retention <= 0:
		return nil, fmt.Errorf("WithRetention: %v, want more than 0", c.retention)
	default:
		return c, nil
	}
}
