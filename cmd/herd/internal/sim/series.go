package sim

// A series is a row of buckets, each of the same width in time.
type series[T any] struct {
	items []T
	width int64
	carry func(next, last *T) // copies the fields that a bucket inherits from the last one

	from, to int64 // the bucket that was used last
	last     int
}

func newSeries[T any](width int64, carry func(next, last *T)) series[T] {
	return series[T]{width: width, carry: carry}
}

// at returns the bucket of a time. The pointer is valid until at is called with a later time.
func (s *series[T]) at(now int64) *T {
	if now < s.from || now >= s.to {
		s.find(now)
	}
	return &s.items[s.last]
}

func (s *series[T]) find(now int64) {
	s.last = int(now / s.width)
	s.from = int64(s.last) * s.width
	s.to = s.from + s.width
	for len(s.items) <= s.last {
		var next T
		if n := len(s.items); n > 0 {
			s.carry(&next, &s.items[n-1])
		}
		s.items = append(s.items, next)
	}
}
