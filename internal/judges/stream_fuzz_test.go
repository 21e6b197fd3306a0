package judges_test

import (
	"math/rand/v2"
	"testing"
)

// FuzzStreamProgram has bytes in place of random numbers draw a program of [TestStreamPrograms], and the same
// model judge it. So the coverage of the library leads to programs that chance does not find.
func FuzzStreamProgram(f *testing.F) {
	random := rand.New(rand.NewPCG(19, 4))
	for n := range 40 {
		data := make([]byte, 10*n)
		for i := range data {
			data[i] = byte(random.Uint32())
		}
		f.Add(data)
	}
	guard(f)
	f.Fuzz(func(t *testing.T, data []byte) {
		if len(data) > 600 {
			return
		}
		p := drawFrom(&byteSource{data}, 0)
		if r, _, _ := batch(t, []*program{p}, false); r != nil {
			t.Fatal(report(t, r))
		}
	})
}

// A byteSource is a source of random numbers, each from one byte. After the last byte, all numbers are as
// large as possible, which in [drawFrom] means that nothing more happens.
type byteSource struct{ rest []byte }

// Uint64 implements [rand.Source]. A number below n comes from the lowest bits if n is a power of two, and
// otherwise from the highest 32.
func (s *byteSource) Uint64() uint64 {
	b := byte(0xff)
	if len(s.rest) > 0 {
		b, s.rest = s.rest[0], s.rest[1:]
	}
	return uint64(b)*0x01010101<<32 | 1<<32 | uint64(b)
}
