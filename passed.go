package grpcretry

import (
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/grpcretry/grpcretry/internal/off"
)

func init() {
	off.Methods = func(retrier any) []off.Method {
		return retrier.(*Retrier).report.observers.passed.list()
	}
}

const (
	maxPassed     = 100
	maxPassedName = 200 // bytes of a target or method
)

// passedMethods holds the methods whose calls were passed straight through.
type passedMethods struct {
	mu  sync.Mutex // held to add one; the map is replaced, never changed
	set atomic.Pointer[map[off.Method]bool]
}

// add is on the path of every such call. Methods with very long names, and those after
// maxPassed, are not remembered.
func (p *passedMethods) add(m off.Method) {
	old := p.set.Load()
	known := old != nil && ((*old)[m] || len(*old) >= maxPassed)
	if known || max(len(m.Target), len(m.Method)) > maxPassedName {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	set := map[off.Method]bool{}
	if old := p.set.Load(); old != nil {
		set = maps.Clone(*old)
	}
	if len(set) < maxPassed {
		set[off.Method{Target: m.Target, Method: strings.Clone(m.Method)}] = true // it may be a part of something long
	}
	p.set.Store(&set)
}

func (p *passedMethods) list() []off.Method {
	set := p.set.Load()
	if set == nil {
		return nil
	}
	return slices.Collect(maps.Keys(*set))
}
