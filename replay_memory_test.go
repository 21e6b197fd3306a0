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
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// wantUsage compares a Retrier's usage, apart from its limit.
func wantUsage(t *testing.T, when string, r *Retrier, want Usage) {
	t.Helper()
	got := r.Usage()
	want.ReplayLimit = got.ReplayLimit
	if got != want {
		t.Errorf("Usage %s = %+v, want %+v", when, got, want)
	}
}

// weightOf is what a sent message of a client stream or a bidi stream counts with.
func weightOf(message string) int64 {
	return int64((&retryStream{desc: bidiStream}).weigh(&echov1.EchoRequest{Message: message}).size)
}

// Of two streams that together exceed the limit of their Retrier, the second commits, on whatever
// ClientConn it is.
func TestReplayMemoryIsShared(t *testing.T) {
	bubble(t, func(t *testing.T) {
		one := weightOf("aaa")
		var logs bytes.Buffer
		r := retrierOf(t, steady, WithReplayMemory(int(3*one)), WithLogger(slog.New(slog.NewTextHandler(&logs, nil))))
		server := serveScripts(t, "recv aaa; recv bbb; hang", "recv aaa; recv bbb; hang", "recv aaa; send 1", "recv ccc; send 2")
		first := openOn(t, server.conn(t, r.DialOptions()...), bidiStream)
		first.play(t, "send aaa; send bbb")
		synctest.Wait() // the server has seen the first stream
		wantUsage(t, "with one stream", r, Usage{OpenStreams: 1, ReplayMemory: 2 * one})

		second := openOn(t, server.conn(t, r.DialOptions()...), bidiStream)
		second.play(t, "send aaa")
		synctest.Wait()
		wantUsage(t, "with two", r, Usage{OpenStreams: 2, ReplayMemory: 3 * one})
		second.play(t, "send bbb; send ccc")
		wantUsage(t, "when the second has committed", r, Usage{OpenStreams: 2, ReplayMemory: 2 * one, CommittedStreams: 1})
		second.cancel()
		second.play(t, "recv CANCELLED")
		wantUsage(t, "when it has ended", r, Usage{OpenStreams: 1, ReplayMemory: 2 * one, CommittedStreams: 1})

		third := openOn(t, server.conn(t, r.DialOptions()...), bidiStream)
		third.play(t, "send aaa; recv 1")
		wantUsage(t, "when a third has committed by itself", r, Usage{OpenStreams: 2, ReplayMemory: 2 * one, CommittedStreams: 1})
		first.cancel()
		first.play(t, "recv CANCELLED")
		third.play(t, "recv EOF")
		wantUsage(t, "in the end", r, Usage{CommittedStreams: 1})
		if n := strings.Count(logs.String(), "replay memory is full, streams commit early"); n != 1 {
			t.Errorf("%d lines about the replay memory, want 1:\n%s", n, &logs)
		}
	})
}

// A stream that the limit has committed fails as it does in gRPC; one that fits is retried.
func TestReplayMemoryDecidesAboutRetries(t *testing.T) {
	for _, tt := range []struct {
		name    string
		limit   int64
		desc    *grpc.StreamDesc
		app     string
		retried bool
	}{
		{"two messages fit", 2 * weightOf("aaa"), clientStream, "send aaa; send bbb; close; recv ", true},
		{"the second does not", 2*weightOf("aaa") - 1, clientStream, "send aaa; send bbb; close; recv ", false},
		{"a server stream's request fits", slotSize + sizeOf(&echov1.EchoRequest{Message: "aaa"}), serverStream, "send aaa; close; recv ", true},
		{"a server stream's request does not", slotSize + sizeOf(&echov1.EchoRequest{Message: "aaa"}) - 1, serverStream, "send aaa; close; recv ", false},
		{"nothing fits", 0, bidiStream, "send aaa; close; recv ", false},
		{"nothing is sent", 0, bidiStream, "close; recv ", true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				r := retrierOf(t, steady, WithReplayMemory(int(tt.limit)))
				server := serveScripts(t, "wait 1ms; fail UNAVAILABLE", "send 1")
				app := openOn(t, server.conn(t, r.DialOptions()...), tt.desc)
				want, committed := "1", int64(0)
				times := []time.Duration{0, second + time.Millisecond}
				if !tt.retried {
					want, committed, times = "UNAVAILABLE", 1, times[:1]
				}
				app.play(t, tt.app+want)
				if tt.retried {
					app.play(t, "recv EOF")
				}
				wantTimes(t, server, times...)
				wantUsage(t, "in the end", r, Usage{CommittedStreams: committed})
			})
		})
	}
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
		wantUsage(t, "in a backoff", r, Usage{WaitingCalls: 1})
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		wantUsage(t, "after the call", r, Usage{})

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
		wantUsage(t, "in a function's backoff", r, Usage{WaitingCalls: 1})
		<-started
		wantUsage(t, "in a function's second attempt", r, Usage{})
		started <- true
		<-done
	})
}

// A hedged call waits if no attempt is in flight.
func TestUsageCountsHedgedCallsThatWait(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := retrierOf(t, steady, hedged(Hedging{MaxAttempts: 3, Delay: HedgeAfter(time.Minute)}))
		server := serve(t, script(unavailable().pushback("2000"), ok().after(2*second)))
		client := newEchoClient(t, server, r)
		done := make(chan error)
		go func() { _, err := client.Echo(t.Context(), request()); done <- err }()
		time.Sleep(second)
		wantUsage(t, "after a pushback", r, Usage{WaitingCalls: 1})
		time.Sleep(2 * second)
		wantUsage(t, "in the second attempt", r, Usage{ReplayMemory: firstReplySize})
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		wantUsage(t, "after the call", r, Usage{})
	})
}

// A hedge whose reply might not fit is not sent, and is due again later.
func TestReplayMemoryLimitsHedges(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var logs bytes.Buffer
		r := retrierOf(t, steady, WithReplayMemory(firstReplySize), WithLogger(slog.New(slog.NewTextHandler(&logs, nil))),
			hedged(Hedging{MaxAttempts: 3, Delay: HedgeAfter(second)}))
		server := serve(t, always(says("slow").after(10*second)))
		client := newEchoClient(t, server, r)
		reply, err := client.Echo(t.Context(), request())
		if err != nil || reply.GetMessage() != "slow" {
			t.Fatalf("Echo = %v, %v", reply, err)
		}
		wantTimes(t, server, 0, second) // a third attempt was due at 2 s, 3 s, 5 s and 9 s
		wantUsage(t, "after the call", r, Usage{UnsentHedges: 4})
		if n := strings.Count(logs.String(), "replay memory is full, calls are not hedged"); n != 1 {
			t.Errorf("%d lines about the replay memory, want 1:\n%s", n, &logs)
		}
	})
}

// The estimate of a reply's size follows the replies of the method.
func TestHedgesCountWithTheSizeOfEarlierReplies(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := retrierOf(t, steady, hedged(Hedging{MaxAttempts: 2, Delay: HedgeAfter(second)}))
		large := strings.Repeat("x", 1<<20)
		server := serve(t, func(n int) answer { return says(large).after(time.Duration(3-2*((n-1)%2)) * second) })
		client := newEchoClient(t, server, r)
		size := sizeOf(&echov1.EchoResponse{Message: large})
		for _, estimate := range []int64{firstReplySize, size} {
			done := make(chan error)
			go func() { _, err := client.Echo(t.Context(), request()); done <- err }()
			time.Sleep(3 * second / 2)
			wantUsage(t, "with a hedge in flight", r, Usage{ReplayMemory: estimate})
			if err := <-done; err != nil {
				t.Fatal(err)
			}
			wantUsage(t, "after the call", r, Usage{})
		}
	})
}

func TestReplySizesAreForgotten(t *testing.T) {
	var s replySize
	s.learn(1 << 20)
	for range 100 {
		s.learn(1000)
	}
	if got := s.Load(); got != 1000 {
		t.Errorf("after a hundred replies of 1000 bytes, the estimate is %d", got)
	}
}

// Nothing is left over, whatever happens to streams and hedges, and the limit is never exceeded by
// what streams keep.
func TestReplayMemoryAtRandom(t *testing.T) {
	bubble(t, func(t *testing.T) {
		limit := 5 * weightOf("aaa")
		r := retrierOf(t, WithBackoff(Constant(second)), WithBudget(Unlimited), WithReplayMemory(int(limit)),
			WithMethod("/streams/Expand", WithHedging(Hedging{MaxAttempts: 3, Delay: HedgeAfter(second), Budget: Unlimited})))
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
					if got := r.Usage().ReplayMemory; got < 0 {
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
		u := r.Usage()
		if u.CommittedStreams == 0 {
			t.Error("the limit has committed no stream")
		}
		wantUsage(t, "in the end", r, Usage{CommittedStreams: u.CommittedStreams, UnsentHedges: u.UnsentHedges})
	})
}

// A panic leaves nothing over, either.
func TestReplayMemoryAfterAPanic(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := retrierOf(t, steady, WithObserver(func(_ context.Context, e Event) {
			if e.Kind == Decision {
				panic("observer")
			}
		}))
		server := serveScripts(t, "recv aaa; fail UNAVAILABLE")
		app := openOn(t, server.conn(t, r.DialOptions()...), bidiStream)
		app.play(t, "send aaa")
		func() {
			defer func() { _ = recover() }()
			_ = app.stream.RecvMsg(new(echov1.EchoResponse))
			t.Error("RecvMsg returned, want the observer's panic")
		}()
		wantUsage(t, "after the panic", r, Usage{})
	})
}

func TestReplayMemoryIsChecked(t *testing.T) {
	_, err := New(WithReplayMemory(-1))
	if err == nil || !strings.Contains(err.Error(), "WithReplayMemory: -1") {
		t.Errorf("New(WithReplayMemory(-1)) = %v", err)
	}
	r := retrierOf(t)
	if err := r.Update(WithReplayMemory(1)); err == nil || !strings.Contains(err.Error(), "WithReplayMemory is for New only") {
		t.Errorf("Update(WithReplayMemory(1)) = %v", err)
	}
	if got := r.Usage().ReplayLimit; got != 64<<20 {
		t.Errorf("the default limit is %d, want 64 MiB", got)
	}
	if got := retrierOf(t, WithReplayMemory(1), WithReplayMemory(2)).Usage().ReplayLimit; got != 2 {
		t.Errorf("of two options the limit is %d, want that of the later one", got)
	}
}

// The attempt with which a race starts receives into the caller's own reply, also if it is not the
// call's first attempt.
func TestReplayMemoryIsNotGivenBackForTheCallersReply(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := retrierOf(t, steady, WithMethod("/streams/Expand", WithHedging(Hedging{MaxAttempts: 3, Delay: HedgeAfter(second), Budget: Unlimited})))
		opened := 0
		failsFirst := func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, next grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
			if opened++; opened == 1 {
				return nil, status.Error(codes.Unavailable, "no stream")
			}
			return next(ctx, desc, cc, method, opts...)
		}
		server := serveScripts(t, "fail UNAVAILABLE", "send 1")
		app := openOn(t, server.conn(t, append(r.DialOptions(), grpc.WithChainStreamInterceptor(failsFirst))...), serverStream)
		app.play(t, "send aaa; close; recv 1; recv EOF")
		if opened != 3 {
			t.Errorf("%d attempts, want 3", opened)
		}
		wantUsage(t, "in the end", r, Usage{})
	})
}
