package sim

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/grpcretry/grpcretry"
)

func TestSamplersHaveTheirMean(t *testing.T) {
	for _, d := range []Distribution{
		{Mean: sec},
		{Shape: UniformShape, Mean: sec, Spread: 400 * ms},
		{Shape: NormalShape, Mean: sec, Spread: 200 * ms},
		{Shape: ExponentialShape, Mean: sec},
		{Shape: LogNormalShape, Mean: sec, Spread: 700 * ms},
		{Shape: ParetoShape, Mean: sec, Tail: 3},
	} {
		s := newSampler(d, newRandom(1, forWork))
		var sum, squares float64
		const n = 200_000
		for range n {
			v := s.draw() / 1e9
			if v < 0 {
				t.Fatalf("%+v: drew %v", d, v)
			}
			sum += v
			squares += v * v
		}
		mean := sum / n
		if !near(mean, 1, 0.01) {
			t.Errorf("%+v: mean %v, want 1", d, mean)
		}
		deviation := math.Sqrt(squares/n - mean*mean)
		want := map[Shape]float64{
			UniformShape: 0.4 / math.Sqrt(3), NormalShape: 0.2, ExponentialShape: 1,
			LogNormalShape: 0.7, ParetoShape: math.Sqrt(1.0 / 3),
		}[d.Shape]
		if math.Abs(deviation-want) > 0.05*want+1e-6 {
			t.Errorf("%+v: standard deviation %v, want %v", d, deviation, want)
		}
	}
	if s := newSampler(Distribution{}, nil); !s.always0() || s.draw() != 0 {
		t.Error("the zero distribution is not always 0")
	}
}

// randomScenario is any scenario whose calls all come to an end.
func randomScenario(seed uint64) Scenario {
	r := rand.New(rand.NewPCG(seed, 99))
	maybe := func(d time.Duration) time.Duration {
		if r.IntN(2) == 0 {
			return 0
		}
		return 1 + time.Duration(r.Int64N(int64(d)))
	}
	latency := func(most time.Duration) Distribution {
		switch r.IntN(4) {
		case 0:
			return Distribution{}
		case 1:
			return Distribution{Mean: 1 + time.Duration(r.Int64N(int64(most)))}
		default:
			return Distribution{Shape: ExponentialShape, Mean: 1 + time.Duration(r.Int64N(int64(most)))}
		}
	}
	strategy := func() Strategy {
		return Strategy{
			Policy: grpcretry.Policy{
				MaxAttempts:    1 + r.IntN(6),
				Backoff:        grpcretry.Exponential{Base: 1 + time.Duration(r.Int64N(1e9))},
				Codes:          []codes.Code{codes.Unavailable, codes.ResourceExhausted, codes.Aborted},
				AttemptTimeout: maybe(2 * sec),
				MaxElapsed:     maybe(10 * sec),
				Patience:       maybe(5*sec) - maybe(ms), // none, or the default
			},
			Budget: []Budget{{}, {Kind: UnlimitedBudget}, {Kind: ConcurrencyBudget, Limit: 3},
				{Kind: ThrottleBudget, MaxTokens: 10, TokenRatio: 0.5}}[r.IntN(4)],
			IgnorePushback: r.IntN(4) == 0,
			Hedging: []*Hedging{nil, nil, {Kind: HedgeAfter, Delay: maybe(300 * ms)},
				{Kind: HedgeAfter, Delay: maybe(sec)},
				{Kind: HedgeAtQuantile, Quantile: 0.5, AtMost: maybe(sec)}}[r.IntN(5)],
		}
	}
	s := Scenario{
		Name:       fmt.Sprintf("random-%d", seed),
		Seed:       seed,
		Network:    latency(50 * ms),
		Strategies: []Strategy{strategy()},
	}
	count := 1 + r.IntN(4)
	for i := range count {
		one := Server{
			Name:          fmt.Sprintf("s%d", i),
			Latency:       latency(300 * ms),
			IgnoresCancel: r.IntN(2) == 0,
			RejectCost:    float64(r.IntN(3)) / 4,
			Pushback:      Pushback{Kind: []PushbackKind{NoPushback, FixedPushback, ExactPushback, StopPushback}[r.IntN(4)]},
		}
		switch r.IntN(4) {
		case 0:
			one.Capacity, one.Window = 1+100*r.Float64(), sec
		case 1:
			one.Capacity, one.Queue = 1+100*r.Float64(), r.IntN(50)-1
		case 2:
			one.Capacity, one.Queue = 1+100*r.Float64(), 1000
		}
		one.Replicas = r.IntN(4)
		if i+1 < count && r.IntN(3) > 0 {
			own := strategy()
			one.Calls = &Downstream{
				Target:      fmt.Sprintf("s%d", i+1),
				Deadline:    maybe(2 * sec),
				Strategy:    &own,
				StopCallers: r.IntN(2) == 0,
				OneAttempt:  r.IntN(2) == 0,
			}
		}
		at := time.Duration(0)
		for range r.IntN(3) {
			o := Outage{From: at + maybe(2*sec), For: 1 + time.Duration(r.Int64N(4e9)), SlowStart: maybe(2 * sec)}
			if one.Capacity > 0 && r.IntN(2) == 0 {
				o.Left, o.Errors = r.Float64(), []float64{0, r.Float64()}[r.IntN(2)]
			} else {
				o.Silent = r.IntN(2) == 0
			}
			one.Outages = append(one.Outages, o)
			at = o.From + o.For + o.SlowStart
		}
		s.Servers = append(s.Servers, one)
	}
	for range 1 + r.IntN(2) {
		g := Group{Deadline: 1 + time.Duration(r.Int64N(10e9)), Processes: 1 + r.IntN(3), Start: maybe(2 * sec),
			Target: fmt.Sprintf("s%d", r.IntN(count))}
		if r.IntN(2) == 0 {
			g.Clients, g.Spread = 1+r.IntN(300), maybe(5*sec)
		} else {
			g.Rate, g.Stop, g.Even = 1+100*r.Float64(), g.Start+1+time.Duration(r.Int64N(5e9)), r.IntN(2) == 0
		}
		s.Groups = append(s.Groups, g)
	}
	return s
}
