package sim

import (
	"math"
	"math/rand/v2"
	"time"
)

// The purposes of random numbers. Each has a stream of its own.
const (
	forArrivals = iota
	forJitter
	forNetwork
	forWork
	forBalancing
)

func newRandom(seed uint64, purpose uint64) *rand.Rand {
	return rand.New(rand.NewPCG(seed, purpose))
}

// A sampler draws from a distribution.
type sampler struct {
	Distribution
	random *rand.Rand

	mu, sigma float64 // of the logarithm, for LogNormalShape
	least     float64 // for ParetoShape
}

func newSampler(d Distribution, random *rand.Rand) *sampler {
	s := &sampler{Distribution: d, random: random}
	switch d.Shape {
	case LogNormalShape:
		mean, spread := float64(d.Mean), float64(d.Spread)
		s.sigma = math.Sqrt(math.Log1p(spread * spread / (mean * mean)))
		s.mu = math.Log(mean) - s.sigma*s.sigma/2
	case ParetoShape:
		s.least = float64(d.Mean) * (d.Tail - 1) / d.Tail
	}
	return s
}

// always0 reports whether all draws are 0.
func (s *sampler) always0() bool { return s.Shape == ConstantShape && s.Mean == 0 }

// draw returns nanoseconds, from 0 to a day.
func (s *sampler) draw() float64 {
	mean, spread := float64(s.Mean), float64(s.Spread)
	var v float64
	switch s.Shape {
	case UniformShape:
		v = mean + spread*(2*s.random.Float64()-1)
	case NormalShape:
		v = math.Abs(mean + spread*s.random.NormFloat64())
	case ExponentialShape:
		v = mean * s.random.ExpFloat64()
	case LogNormalShape:
		v = math.Exp(s.mu + s.sigma*s.random.NormFloat64())
	case ParetoShape:
		v = s.least * math.Pow(1-s.random.Float64(), -1/s.Tail)
	default:
		return mean
	}
	return min(max(v, 0), float64(longest))
}

// longest is the longest time that can be simulated.
const longest = 24 * time.Hour
