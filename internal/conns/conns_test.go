package conns

import (
	"testing"

	"google.golang.org/grpc"
)

func TestShortWaitsAreNotWatched(t *testing.T) {
	c := New()
	closed, unwatch := c.Watch(&grpc.ClientConn{}, ShortWait)
	defer unwatch()
	if closed != nil || len(c.watchers) != 0 {
		t.Error("a short wait is watched")
	}
}
