package grpcretrytest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"

	"google.golang.org/grpc/test/bufconn"
)

// A listener accepts connections that can be cut, and can itself go down and up again. It lies around a
// listener in memory or on a TCP port.
type listener struct {
	mu     sync.Mutex
	inner  net.Listener
	port   string        // the address of a TCP listener; "" in memory
	name   string        // to clients: the port, or a name of its own
	down   bool          // connections are refused
	change chan struct{} // closed when the listener goes up or is closed
	closed bool
	conns  map[string]net.Conn // those that are open, by their remote address
	number int

	// dialing is held while a client connects in memory: bufconn makes timers that fire immediately, and in a
	// bubble, goroutines that do so at the same time crash the race detector of Go 1.26.
	dialing sync.Mutex
}

func newListener(tcp bool) (*listener, error) {
	l := &listener{change: make(chan struct{}), conns: map[string]net.Conn{}}
	if !tcp {
		l.inner = bufconn.Listen(1 << 20)
		l.name = fmt.Sprintf("memory-%d", inMemory.Add(1))
		return l, nil
	}
	inner, err := net.Listen("tcp", "127.0.0.1:0") //nolint:noctx // it does not wait
	if err != nil {
		return nil, err
	}
	l.inner, l.port = inner, inner.Addr().String()
	l.name = l.port
	return l, nil
}

var inMemory atomic.Int64 // how many listeners in memory there are

var errRefused = errors.New("connection refused")

// dial connects a client.
func (l *listener) dial(ctx context.Context) (net.Conn, error) {
	l.mu.Lock()
	inner, down := l.inner, l.down
	l.mu.Unlock()
	if memory, ok := inner.(*bufconn.Listener); ok {
		if down {
			return nil, errRefused
		}
		l.dialing.Lock()
		defer l.dialing.Unlock()
		return memory.DialContext(ctx)
	}
	return (&net.Dialer{}).DialContext(ctx, "tcp", l.port)
}

// Accept implements [net.Listener]. While the listener is down, it waits.
func (l *listener) Accept() (net.Conn, error) {
	for {
		l.mu.Lock()
		inner, down, change, closed := l.inner, l.down, l.change, l.closed
		l.mu.Unlock()
		switch {
		case closed:
			return nil, net.ErrClosed
		case down && l.port != "":
			<-change
			continue
		}
		c, err := inner.Accept()
		if err != nil && l.isOpen() { // a TCP listener that has gone down
			continue
		}
		if err != nil {
			return nil, err
		}
		if c := l.track(c); c != nil {
			return c, nil
		}
	}
}

func (l *listener) isOpen() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return !l.closed && l.port != ""
}

// track remembers a connection; it returns nil if the listener is down.
func (l *listener) track(c net.Conn) net.Conn {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.down || l.closed {
		c.Close()
		return nil
	}
	l.number++
	t := &conn{Conn: c, l: l, remote: c.RemoteAddr()}
	if l.port == "" { // in memory all addresses are the same
		t.remote = memoryAddr(fmt.Sprintf("client-%d", l.number))
	}
	l.conns[t.remote.String()] = t
	return t
}

// cut closes the connection with a remote address; it reports whether there is one.
func (l *listener) cut(remote net.Addr) bool {
	l.mu.Lock()
	c := l.conns[remote.String()]
	l.mu.Unlock()
	if c == nil {
		return false
	}
	c.Close()
	return true
}

// goDown closes all connections and refuses new ones.
func (l *listener) goDown() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.down || l.closed {
		return
	}
	l.down = true
	if l.port != "" {
		l.inner.Close()
	}
	for _, c := range l.conns {
		c.(*conn).Conn.Close()
	}
	clear(l.conns)
}

// goUp accepts connections again.
func (l *listener) goUp() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.down || l.closed {
		return nil
	}
	if l.port != "" {
		inner, err := net.Listen("tcp", l.port) //nolint:noctx // it does not wait
		if err != nil {
			return err
		}
		l.inner = inner
	}
	l.down = false
	close(l.change)
	l.change = make(chan struct{})
	return nil
}

// Close implements [net.Listener].
func (l *listener) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil
	}
	l.closed = true
	close(l.change)
	return l.inner.Close()
}

// Addr implements [net.Listener].
func (l *listener) Addr() net.Addr {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.inner.Addr()
}

// A conn is an accepted connection.
type conn struct {
	net.Conn
	l      *listener
	remote net.Addr
}

func (c *conn) RemoteAddr() net.Addr { return c.remote }

func (c *conn) Close() error {
	c.l.mu.Lock()
	delete(c.l.conns, c.remote.String())
	c.l.mu.Unlock()
	return c.Conn.Close()
}

// A memoryAddr tells connections in memory apart.
type memoryAddr string

func (memoryAddr) Network() string  { return "memory" }
func (a memoryAddr) String() string { return string(a) }
