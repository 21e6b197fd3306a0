// Package replay counts the memory that is kept to send a stream's messages again.
package replay

import (
	"math"
	"sync/atomic"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/protoadapt"
)

// A Memory counts what the streams of a client keep for replay. It is safe for concurrent use.
type Memory struct {
	Limit int64 // in bytes; set before the first use

	inUse atomic.Int64
}

// Reserve counts size more bytes, if they fit.
func (m *Memory) Reserve(size int) bool {
	for {
		used := m.inUse.Load()
		if int64(size) > m.Limit-used {
			return false
		}
		if m.inUse.CompareAndSwap(used, used+int64(size)) {
			return true
		}
	}
}

// Release gives back size bytes that were reserved.
func (m *Memory) Release(size int) { m.inUse.Add(-int64(size)) }

// InUse returns how many bytes are reserved.
func (m *Memory) InUse() int64 { return m.inUse.Load() }

// prefixSize is what gRPC adds to each message of a stream.
const prefixSize = 5

// Size returns what a message counts with: its encoded size and gRPC's prefix, as in gRPC's own buffer; known is
// false if the message cannot tell.
func Size(m any) (size int, known bool) {
	switch m := m.(type) {
	case proto.Message:
		return prefixSize + proto.Size(m), true
	case interface{ Size() int }:
		n, ok := sizeBy(m)
		return prefixSize + max(0, min(n, math.MaxInt32-prefixSize)), ok
	case protoadapt.MessageV1:
		return prefixSize + proto.Size(protoadapt.MessageV2Of(m)), true
	default:
		return prefixSize, false
	}
}

// sizeBy asks a message for its size; ok is false if it panics. gRPC would never ask, so that a program
// need not be prepared for that.
func sizeBy(m interface{ Size() int }) (n int, ok bool) {
	defer func() {
		if !ok {
			_ = recover()
		}
	}()
	return m.Size(), true
}
