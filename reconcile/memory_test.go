package reconcile_test

import (
	"errors"
	"runtime"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/grpcretry/grpcretry/reconcile"
)

// A key in the slow lane costs less than 512 bytes, and nothing once it is forgotten.
func TestMemory(t *testing.T) {
	t.Run("backoff", func(t *testing.T) { testMemory(t, errors.New("down")) })
	t.Run("server's wait", func(t *testing.T) { testMemory(t, statusError(codes.Unavailable, time.Second)) })
}

func testMemory(t *testing.T, err error) {
	const keys = 20000
	limiter := reconcile.NewRateLimiter[int](newRetrier(t), name)
	before := heap()
	for item := range keys {
		limiter.Failed(item, err)
	}
	full := heap()
	for item := range keys {
		limiter.Drop(item)
	}
	after := heap()
	each := float64(full-before) / keys
	t.Logf("%.0f bytes per key, %d bytes for all afterwards", each, after-before)
	if each > 512 {
		t.Errorf("%.0f bytes per key, want at most 512", each)
	}
	if left := after - before; left > (full-before)/2 { // the maps keep their size
		t.Errorf("%d of %d bytes are left when all keys are gone", left, full-before)
	}
	runtime.KeepAlive(limiter)
}

func heap() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}
