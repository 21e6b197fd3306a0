package grpcretry

import (
	"io"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

func TestStreamSendsWhileTheReceiverRetries(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var got []string
		server := serveStreams(t, func(n int, stream grpc.ServerStream) error {
			if n < 3 {
				return playServer(t, n, "recv 0; recv 1; fail UNAVAILABLE", stream)
			}
			got = nil
			for {
				var m echov1.EchoRequest
				if err := stream.RecvMsg(&m); err == io.EOF {
					return stream.SendMsg(&echov1.EchoResponse{Message: "done"})
				} else if err != nil {
					return err
				}
				got = append(got, m.GetMessage())
			}
		})
		app, err := server.openStream(t, bidiStream, nil)
		if err != nil {
			t.Fatal(err)
		}
		var want []string
		var group sync.WaitGroup
		group.Go(func() { // one message each 50 ms for 5 s: through two failures and their waits
			for i := range 100 {
				want = append(want, strconv.Itoa(i))
				app.play(t, "send "+strconv.Itoa(i)+"; wait 50ms")
			}
			app.play(t, "close")
		})
		app.play(t, "recv done; recv EOF")
		group.Wait()
		if !slices.Equal(got, want) {
			t.Errorf("the server that answered got %v, want 0 to 99 in order", got)
		}
	})
}

// slowStream is a stream whose SendMsg takes its time to say that it failed.
type slowStream struct {
	grpc.ClientStream
	delay time.Duration
}

func (s slowStream) SendMsg(m any) error {
	err := s.ClientStream.SendMsg(m)
	if err != nil {
		time.Sleep(s.delay)
	}
	return err
}

// A SendMsg that fails while another goroutine is retrying, or has done so, has done its
// work: the message is in the buffer.
func TestSendThatFailsWhileTheReceiverRetriesSaysNothing(t *testing.T) {
	for _, tt := range []struct {
		name  string
		delay time.Duration
	}{
		{"in the wait", second / 2},
		{"in the next attempt", 3 * second / 2},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				scripts := []string{"wait 1s; fail UNAVAILABLE", "recv " + big + "; recv " + big + "; recv c; recv EOF; send 1"}
				server := serveStreams(t, func(n int, stream grpc.ServerStream) error { return playServer(t, n, scripts[n-1], stream) })
				cc := server.conn(t, append(DialOptions(steady, WithBufferLimit(1<<20)),
					below(func(s grpc.ClientStream) grpc.ClientStream { return slowStream{s, tt.delay} }))...)
				app := openOn(t, cc, bidiStream)
				var group sync.WaitGroup
				group.Go(func() {
					app.play(t, "send "+big+"; send "+big)
					if got, want := time.Since(server.start), second+tt.delay; got != want {
						t.Errorf("SendMsg returned after %v, want %v", got, want)
					}
					app.play(t, "send c; close")
				})
				app.play(t, "recv 1; recv EOF")
				group.Wait()
				wantTimes(t, server, 0, 2*second)
			})
		})
	}
}

func TestSendHeldUpByFlowControlWhileTheReceiverRetries(t *testing.T) {
	bubble(t, func(t *testing.T) {
		scripts := []string{"wait 3s; fail UNAVAILABLE", "recv " + big + "; recv " + big + "; recv b; recv EOF; send 1"}
		server := serveStreams(t, func(n int, stream grpc.ServerStream) error { return playServer(t, n, scripts[n-1], stream) })
		app, err := server.openStream(t, bidiStream, []Option{WithBufferLimit(1 << 20)})
		if err != nil {
			t.Fatal(err)
		}
		var group sync.WaitGroup
		group.Go(func() {
			app.play(t, "send "+big+"; send "+big)
			if got := time.Since(server.start); got != 3*second {
				t.Errorf("SendMsg returned after %v, want 3s, when its attempt failed", got)
			}
			app.play(t, "send b; close")
		})
		app.play(t, "recv 1; recv EOF")
		group.Wait()
		wantTimes(t, server, 0, 4*second)
	})
}

func TestSendHeldUpByFlowControlWhileTheReceiverCommits(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serveStreams(t, func(n int, stream grpc.ServerStream) error {
			return playServer(t, n, "wait 1s; send 1; wait 1s; fail UNAVAILABLE", stream)
		})
		app, err := server.openStream(t, bidiStream, []Option{WithBufferLimit(1 << 20)})
		if err != nil {
			t.Fatal(err)
		}
		var group sync.WaitGroup
		group.Go(func() { app.play(t, "send "+big+"; sendeof "+big) })
		app.play(t, "recv 1; recv UNAVAILABLE")
		group.Wait()
		wantTimes(t, server, 0)
	})
}

// Header on a third goroutine, while another waits for a message.
func TestHeaderWhileReceiving(t *testing.T) {
	for _, tt := range []struct{ name, second, recv string }{
		{"with headers", "header; recv go; send 1", "recv 1"},
		{"in vain", "fail NOT_FOUND", "recv NOT_FOUND"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				scripts := []string{"wait 1s; fail UNAVAILABLE", tt.second}
				server := serveStreams(t, func(n int, stream grpc.ServerStream) error { return playServer(t, n, scripts[n-1], stream) })
				app, err := server.openStream(t, bidiStream, nil)
				if err != nil {
					t.Fatal(err)
				}
				var group sync.WaitGroup
				group.Go(func() { app.play(t, tt.recv) })
				synctest.Wait()
				md, err := app.stream.Header()
				if hasHeader := tt.name == "with headers"; (md != nil) != hasHeader || err != nil {
					t.Errorf("Header = %v, %v", md, err)
				} else if hasHeader {
					app.play(t, "send go")
				}
				group.Wait()
				wantTimes(t, server, 0, 2*second)
			})
		})
	}
}

// alone is a stream that finds out if two goroutines are in RecvMsg.
type alone struct {
	grpc.ClientStream
	t      *testing.T
	inside atomic.Int32
}

func (s *alone) RecvMsg(m any) error {
	if s.inside.Add(1) > 1 {
		s.t.Error("two goroutines in RecvMsg of one stream")
	}
	defer s.inside.Add(-1)
	err := s.ClientStream.RecvMsg(m)
	time.Sleep(second / 2) // for another goroutine to learn of the failure first
	return err
}

// gRPC forbids two RecvMsg of one stream at once: while one goroutine receives, another
// that sees an attempt fail leaves it to the first to find out why.
func TestNobodyElseReceivesWhileTheApplicationDoes(t *testing.T) {
	for _, tt := range []struct{ name, other string }{
		{"Header", "header"},
		{"SendMsg", "wait 1s; send a"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				scripts := []string{"wait 1s; fail UNAVAILABLE", "header; wait 5s; send 1"}
				server := serveStreams(t, func(n int, stream grpc.ServerStream) error { return playServer(t, n, scripts[n-1], stream) })
				cc := server.conn(t, append(DialOptions(steady),
					below(func(s grpc.ClientStream) grpc.ClientStream { return &alone{ClientStream: s, t: t} }))...)
				app := openOn(t, cc, bidiStream)
				var group sync.WaitGroup
				group.Go(func() { app.play(t, "recv 1; recv EOF") })
				app.play(t, tt.other)
				group.Wait()
				wantTimes(t, server, 0, 2*second+second/2)
			})
		})
	}
}

// slowRelease is a budget that takes its time to take back the place of a committed retry.
type slowRelease struct {
	tally
	released int
}

func (b *slowRelease) release() { time.Sleep(second); b.released++ }

func (b *slowRelease) depositReleased(Outcome) { b.released++ }

// The end of a stream may be seen by one goroutine while another one commits the stream: the plan is
// then used by one after the other, and the retry's place is given back once.
func TestACommitAndTheEndShareThePlan(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serveScripts(t, "recv a; fail UNAVAILABLE", "recv a; header; wait 500ms; send 1")
		budget := &slowRelease{}
		app := openOn(t, server.conn(t, DialOptions(steady, WithBudget(budget))...), serverStream)
		app.play(t, "send a; close")
		var group sync.WaitGroup
		group.Go(func() { app.play(t, "header") })
		app.play(t, "recv 1; recv EOF")
		group.Wait()
		if want := (counts{withdrawn: 1, told: [4]int{Failed: 1}, highest: 1}); budget.released != 2 || budget.counts != want {
			t.Errorf("budget is %+v and heard %d times of the place released, want %+v and twice", budget.counts, budget.released, want)
		}
	})
}

// gRPC may return io.EOF from SendMsg although it still retries the stream transparently in RecvMsg: it has
// kept that message, and needs the others. A keptMessage is the stream of a second attempt that does so.
type keptMessage struct {
	grpc.ClientStream
	kept bool
}

func (s *keptMessage) SendMsg(m any) error {
	err := s.ClientStream.SendMsg(m)
	if err == nil && !s.kept {
		s.kept = true
		return io.EOF
	}
	return err
}

// A committed stream that is replayed is sent everything, too, while the application receives.
func TestACommittedStreamThatGRPCRetriesIsSentEverything(t *testing.T) {
	for name, commits := range map[string]bool{"open": false, "committed": true} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serveScripts(t, "recv a; recv b; recv c; recv EOF; fail UNAVAILABLE", "recv a; recv b; recv c; recv EOF; send x")
				attempts := 0
				keep := below(func(stream grpc.ClientStream) grpc.ClientStream {
					if attempts++; attempts == 2 {
						return &keptMessage{ClientStream: stream}
					}
					return stream
				})
				app := openOn(t, server.conn(t, append(DialOptions(steady), keep)...), bidiStream)
				app.play(t, "send a; send b; send c; close")
				if commits {
					time.AfterFunc(second/2, func() { app.stream.Context() }) // in the wait for the retry
				}
				app.play(t, "recv x; recv EOF")
				wantTimes(t, server, 0, second)
			})
		})
	}
}
