package grpcretry

import (
	"io"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// Hedges are due each second. Header waits for the attempt whose message is the first.
func TestHeaderOfAHedgedStreamWaitsForTheWinner(t *testing.T) {
	for _, tt := range []struct {
		name    string
		scripts []string
		asked   time.Duration // when Header is called
		seen    time.Duration // when it returns
		attempt string        // of the headers, and of the messages
		times   []time.Duration
	}{
		{"before a hedge is due", []string{"recv a; header; wait 5s; send 1", "recv a; hang"}, second / 2, 5 * second, "1",
			[]time.Duration{0, second}},
		{"while a hedge has no headers", []string{"recv a; header; wait 5s; send 1", "recv a; hang"}, 3 * second / 2, 5 * second, "1",
			[]time.Duration{0, second}},
		{"headers of the hedge", []string{"recv a; hang", "recv a; header; wait 5s; send 2"}, second / 2, 6 * second, "2",
			[]time.Duration{0, second}},
		{"headers that come later", []string{"recv a; wait 3s; header; wait 5s; send 1", "recv a; hang"}, 3 * second / 2, 8 * second, "1",
			[]time.Duration{0, second}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serveScripts(t, tt.scripts...)
				app := openOn(t, server.conn(t, DialOptions(steady,
					WithMethod("/streams/Expand",
						WithPolicy(Policy{MaxAttempts: 2, Hedging: &Hedging{Budget: Unlimited, Delay: HedgeAfter(second)}})))...),
					serverStream)
				app.play(t, "send a; close")
				var group sync.WaitGroup
				group.Go(func() { app.play(t, "recv "+tt.attempt+"; recv EOF") })
				time.Sleep(tt.asked)
				md, err := app.stream.Header()
				if got := time.Since(server.start); err != nil || first(md["attempt"]) != tt.attempt || got != tt.seen {
					t.Errorf("Header = %v, %v after %v, want those of attempt %s after %v", md, err, got, tt.attempt, tt.seen)
				}
				group.Wait()
				wantTimes(t, server, tt.times...)
			})
		})
	}
}

// A goroutine that receives is in a backoff from 0 s to 1 s. What becomes of the call is open: it
// ends with the failure, or goes on with the next attempt.
func TestContextAndTrailerDoNotWaitForABackoff(t *testing.T) {
	for name, use := range map[string]func(grpc.ClientStream) any{
		"Context": func(s grpc.ClientStream) any { return s.Context().Err() },
		"Trailer": func(s grpc.ClientStream) any { return s.Trailer()["attempt"] },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server, reported := serveScripts(t, "recv a; fail UNAVAILABLE", "recv a; send 1"), &record{}
				app := openOn(t, server.conn(t, DialOptions(append(reported.options(), steady)...)...), bidiStream, reported.onFinish())
				app.play(t, "send a")
				var received error
				var group sync.WaitGroup
				group.Go(func() {
					for received == nil {
						received = app.stream.RecvMsg(new(echov1.EchoResponse))
					}
				})
				time.Sleep(second / 2)
				use(app.stream)
				if got := time.Since(server.start); got != second/2 {
					t.Errorf("%s returned at %v, want immediately, at 500ms", name, got)
				}
				group.Wait()
				if received == io.EOF {
					received = nil
				} else if code := status.Code(received); code != codes.Unavailable {
					t.Errorf("RecvMsg = %v, want io.EOF or UNAVAILABLE", received)
				}
				reported.want(t, received)
			})
		})
	}
}
