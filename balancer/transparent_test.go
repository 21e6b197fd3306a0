package balancer_test

import (
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc"

	"github.com/grpcretry/grpcretry"
)

// The backend in these tests speaks just enough HTTP/2 to refuse the streams that it is sent, so that gRPC
// makes a transparent retry: a second pick for the same attempt.

// The types of frames, and error codes, of RFC 9113.
const (
	frameHeaders, frameReset, frameSettings, frameGoAway = 1, 3, 4, 7
	refusedStream                                        = 7
)

// refuse listens on an address, and does act with each stream; seen counts the streams.
func (c *cluster) refuse(address string, act func(conn net.Conn, stream uint32)) (seen func() int) {
	streams := 0
	c.dialAs(address, func(context.Context) (net.Conn, error) {
		ours, theirs := net.Pipe()
		go serveFrames(theirs, func(conn net.Conn, stream uint32) {
			c.mu.Lock()
			streams++
			c.mu.Unlock()
			act(conn, stream)
		})
		return ours, nil
	})
	return func() int { c.mu.Lock(); defer c.mu.Unlock(); return streams }
}

func serveFrames(conn net.Conn, act func(net.Conn, uint32)) {
	defer conn.Close()
	if _, err := io.CopyN(io.Discard, conn, int64(len("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))); err != nil {
		return
	}
	writeFrame(conn, frameSettings, 0, 0, nil)
	for head := make([]byte, 9); ; {
		if _, err := io.ReadFull(conn, head); err != nil {
			return
		}
		if _, err := io.CopyN(io.Discard, conn, int64(binary.BigEndian.Uint32(append([]byte{0}, head[:3]...)))); err != nil {
			return
		}
		switch {
		case head[3] == frameSettings && head[4] == 0:
			writeFrame(conn, frameSettings, 1, 0, nil) // the acknowledgement
		case head[3] == frameHeaders:
			act(conn, binary.BigEndian.Uint32(head[5:]))
		}
	}
}

func writeFrame(conn net.Conn, kind, flags byte, stream uint32, payload []byte) {
	frame := append(binary.BigEndian.AppendUint32([]byte{0, 0, byte(len(payload)), kind, flags}, stream), payload...)
	_, _ = conn.Write(frame)
}

// A transparent retry goes to another backend than the one that refused, and the retries after it avoid both.
func TestTransparentRetries(t *testing.T) {
	for name, act := range map[string]func(net.Conn, uint32){
		"REFUSED_STREAM": func(conn net.Conn, stream uint32) {
			writeFrame(conn, frameReset, 0, stream, binary.BigEndian.AppendUint32(nil, refusedStream))
		},
		"GOAWAY": func(conn net.Conn, _ uint32) {
			writeFrame(conn, frameGoAway, 0, 0, make([]byte, 8)) // no stream was processed
		},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T, c *cluster) {
				c.behave(func(_ context.Context, _, _ string, visit int) error {
					if visit == 1 {
						return errDown
					}
					return nil
				})
				refused := c.refuse("refusing", act)
				cc := c.dialRetried(t, []string{"refusing", "a", "b"})
				before := 0
				for i := range 30 {
					message := fmt.Sprint("call ", i)
					if _, err := cc.echo(t.Context(), message); err != nil {
						t.Fatal(err)
					}
					c.wantDistinct(t, message, 2)
					if now := refused(); now > before+1 {
						t.Errorf("the refusing backend saw %d streams of one call, want at most one", now-before)
					} else {
						before = now
					}
					time.Sleep(second) // to connect again after a GOAWAY
				}
				if before == 0 {
					t.Error("no stream was refused")
				}
			}, "a", "b")
		})
	}
}

// The same without the interceptors: then a transparent retry is a pick like any other.
func TestTransparentRetriesWithoutAList(t *testing.T) {
	withBoth(t, func(t *testing.T, c *cluster, policy string) {
		c.refuse("refusing", func(conn net.Conn, stream uint32) {
			writeFrame(conn, frameReset, 0, stream, binary.BigEndian.AppendUint32(nil, refusedStream))
		})
		cc := c.dialPolicy(t, policy, []string{"refusing", "a"})
		for range 10 {
			if backend, err := cc.echo(t.Context(), "call"); err != nil || backend != "a" {
				t.Errorf("Echo = %q, %v, want a", backend, err)
			}
		}
	}, "a")
}

// A backend that takes one stream at a time makes others wait. They wait for it as under round_robin, because
// its connection is ready.
func TestMaxConcurrentStreams(t *testing.T) {
	withBoth(t, func(t *testing.T, c *cluster, policy string) {
		c.startWith(t, "narrow", grpc.MaxConcurrentStreams(1))
		c.behave(func(context.Context, string, string, int) error { time.Sleep(second); return nil })
		cc := c.dialPolicy(t, policy, []string{"narrow"}, grpcretry.DialOptions()...)
		if _, err := cc.echo(t.Context(), "first"); err != nil { // after it, the client knows the limit
			t.Fatal(err)
		}
		start, took := time.Now(), make(chan time.Duration)
		for i := range 3 {
			go func() {
				if _, err := cc.echo(t.Context(), fmt.Sprint(i)); err != nil {
					t.Error(err)
				}
				took <- time.Since(start)
			}()
		}
		got := []time.Duration{<-took, <-took, <-took}
		if want := []time.Duration{second, 2 * second, 3 * second}; !slices.Equal(got, want) {
			t.Errorf("the calls took %v, want %v", got, want)
		}
	})
}
