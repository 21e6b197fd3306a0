package grpcretry

import (
	"bytes"
	"context"
	"log/slog"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"

	"github.com/grpcretry/grpcretry/internal/inside"
	"github.com/grpcretry/grpcretry/internal/replay"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// wantUsage compares a Retrier's usage, apart from its limit.
func wantUsage(t *testing.T, when string, r *Retrier, want inside.Usage) {
	t.Helper()
	got := r.usage.now()
	want.ReplayLimit = got.ReplayLimit
	if got != want {
		t.Errorf("Usage %s = %+v, want %+v", when, got, want)
	}
}

// weightOf is what a sent message counts with.
func weightOf(message string) int64 {
	size, _ := replay.Size(&echov1.EchoRequest{Message: message})
	return int64(size)
}

// Of two streams that together exceed the limit of their Retrier, the second commits, on whatever
// ClientConn it is.
func TestReplayMemoryIsShared(t *testing.T) {
	bubble(t, func(t *testing.T) {
		one := weightOf("aaa")
		var logs bytes.Buffer
		r := retrierOf(t, steady, withReplayMemory(3*one), WithLogger(slog.New(slog.NewTextHandler(&logs, nil))))
		server := serveScripts(t, "recv aaa; recv bbb; hang", "recv aaa; recv bbb; hang", "recv aaa; send 1", "recv ccc; send 2")
		first := openOn(t, server.conn(t, r.DialOptions()...), bidiStream)
		first.play(t, "send aaa; send bbb")
		synctest.Wait() // the server has seen the first stream
		wantUsage(t, "with one stream", r, inside.Usage{OpenStreams: 1, ReplayMemory: 2 * one})

		second := openOn(t, server.conn(t, r.DialOptions()...), bidiStream)
		second.play(t, "send aaa")
		synctest.Wait()
		wantUsage(t, "with two", r, inside.Usage{OpenStreams: 2, ReplayMemory: 3 * one})
		second.play(t, "send bbb; send ccc")
		wantUsage(t, "when the second has committed", r, inside.Usage{OpenStreams: 2, ReplayMemory: 2 * one, CommittedStreams: 1})
		second.cancel()
		second.play(t, "recv CANCELLED")
		wantUsage(t, "when it has ended", r, inside.Usage{OpenStreams: 1, ReplayMemory: 2 * one, CommittedStreams: 1})

		third := openOn(t, server.conn(t, r.DialOptions()...), bidiStream)
		third.play(t, "send aaa; recv 1")
		wantUsage(t, "when a third has committed by itself", r, inside.Usage{OpenStreams: 2, ReplayMemory: 2 * one, CommittedStreams: 1})
		first.cancel()
		first.play(t, "recv CANCELLED")
		third.play(t, "recv EOF")
		wantUsage(t, "in the end", r, inside.Usage{CommittedStreams: 1})
		if n := strings.Count(logs.String(), "replay memory is full, streams commit early"); n != 1 {
			t.Errorf("%d lines about the replay memory, want 1:\n%s", n, &logs)
		}
	})
}

// Waiting calls and open streams are counted as long as they wait and are open.
func TestUsageCountsCallsAndStreams(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := retrierOf(t, steady)
		server := serve(t, script(unavailable(), ok()))
		client := newEchoClient(t, server, r)
		done := make(chan error)
		go func() { _, err := client.Echo(t.Context(), request()); done <- err }()
		time.Sleep(second / 2)
		wantUsage(t, "in a backoff", r, inside.Usage{WaitingCalls: 1})
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		wantUsage(t, "after the call", r, inside.Usage{})

		started := make(chan bool)
		go func() {
			err := r.Do(t.Context(), "/work", func(ctx context.Context) error {
				if a, _ := AttemptFromContext(ctx); a.Number == 1 {
					return errUnavailable
				}
				started <- true
				<-started
				return nil
			})
			done <- err
		}()
		time.Sleep(second / 2)
		wantUsage(t, "in a function's backoff", r, inside.Usage{WaitingCalls: 1})
		<-started
		wantUsage(t, "in a function's second attempt", r, inside.Usage{})
		started <- true
		<-done
	})
}

// Nothing is left over, whatever happens to streams, and the limit is never exceeded by
// what streams keep.
func TestReplayMemoryAtRandom(t *testing.T) {
	bubble(t, func(t *testing.T) {
		limit, logs := 5*weightOf("aaa"), &logRecorder{}
		r := retrierOf(t, WithBackoff(Constant(second)), WithBudget(Unlimited), withReplayMemory(limit),
			WithLogger(slog.New(onlyAbove{logs, slog.LevelInfo})),
			WithMethod("/streams/Expand", WithPolicy(Policy{MaxAttempts: 3, Hedging: &Hedging{Delay: HedgeAfter(second), Budget: Unlimited}})))
		steps := []string{"recv aaa", "send 1", "wait 1s", "wait 3s", "fail UNAVAILABLE", "fail NOT_FOUND", "header"}
		server := serveStreams(t, func(_ int, stream grpc.ServerStream) error {
			for range 4 {
				step := steps[rand.IntN(len(steps))]
				if strings.HasPrefix(step, "recv") {
					_ = stream.RecvMsg(new(echov1.EchoRequest)) // at the end of what was sent, too
				} else if err := playServer(t, 0, step, stream); err != nil {
					return err
				}
			}
			return nil
		})
		cc := server.conn(t, r.DialOptions()...)
		var all sync.WaitGroup
		for i := range 300 {
			all.Go(func() {
				desc := []*grpc.StreamDesc{serverStream, clientStream, bidiStream}[i%3]
				app := openOn(t, cc, desc)
				defer app.cancel()
				for range 1 + rand.IntN(4) {
					if app.stream.SendMsg(&echov1.EchoRequest{Message: "aaa"}) != nil || !desc.ClientStreams {
						break
					}
					time.Sleep(time.Duration(rand.IntN(3)) * second)
					if got := r.usage.now().ReplayMemory; got < 0 {
						t.Errorf("the replay memory is %d", got)
					}
				}
				app.stream.CloseSend()
				if rand.IntN(4) == 0 {
					return // abandoned
				}
				for range 5 {
					if app.stream.RecvMsg(new(echov1.EchoResponse)) != nil {
						return
					}
				}
			})
		}
		all.Wait()
		time.Sleep(time.Minute) // abandoned streams end by themselves
		u := r.usage.now()
		if u.CommittedStreams < 2 {
			t.Errorf("the limit has committed %d streams, want several", u.CommittedStreams)
		}
		if n := strings.Count(strings.Join(logs.lines(), "\n"), "replay memory is full"); n != 1 {
			t.Errorf("%d lines about the replay memory, want 1", n)
		}
		wantUsage(t, "in the end", r, inside.Usage{CommittedStreams: u.CommittedStreams})
	})
}

func TestReplayMemoryLimit(t *testing.T) {
	r := retrierOf(t)
	if got := r.usage.now().ReplayLimit; got != 64<<20 {
		t.Errorf("the default limit is %d, want 64 MiB", got)
	}
	if got := retrierOf(t, withReplayMemory(1), withReplayMemory(2)).usage.now().ReplayLimit; got != 2 {
		t.Errorf("of two options the limit is %d, want that of the later one", got)
	}
}

// A stream that commits when it cannot be sent everything any more needs no memory for a replay.
func TestACommittedStreamWhoseReplayHasEndedKeepsNoMemory(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r, opened := retrierOf(t, steady, unmoved), 0
		server := serveScripts(t, "recv a; recv b; fail UNAVAILABLE", "recv a; send 1; send 2")
		app := openOn(t, server.conn(t, append(r.DialOptions(), below(func(s grpc.ClientStream) grpc.ClientStream {
			opened++
			hooked, sent := &hookedStream{ClientStream: s}, 0
			if opened == 2 {
				hooked.send = func(m any) error {
					if sent++; sent == 2 {
						time.Sleep(second) // the stream ends meanwhile
					}
					return s.SendMsg(m)
				}
			}
			return hooked
		}))...), bidiStream)
		app.play(t, "send a; send b; wait 1s; send c; wait 9s")
		app.play(t, "recv 1")
		wantUsage(t, "when it has committed", r, inside.Usage{OpenStreams: 1})
		app.play(t, "recv 2; recv EOF")
	})
}
