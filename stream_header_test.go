package grpcretry

import (
	"context"
	"io"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// Hedges are due each second. Headers that the application sees decide the race.
func TestHeaderReturnsHeadersWhileHedgesRace(t *testing.T) {
	for _, tt := range []struct {
		name    string
		scripts []string
		asked   time.Duration // when Header is called
		seen    time.Duration // when it returns
		attempt string        // of the headers, and of the messages
		times   []time.Duration
	}{
		{"before a hedge is due", []string{"recv a; header; wait 5s; send 1", "recv a; hang"}, second / 2, second / 2, "1",
			[]time.Duration{0}},
		{"while a hedge has no headers", []string{"recv a; header; wait 5s; send 1", "recv a; hang"}, 3 * second / 2, 3 * second / 2, "1",
			[]time.Duration{0, second}},
		{"headers of the hedge", []string{"recv a; hang", "recv a; header; wait 5s; send 2"}, second / 2, second, "2",
			[]time.Duration{0, second}},
		{"headers that come later", []string{"recv a; wait 3s; header; wait 5s; send 1", "recv a; hang"}, 3 * second / 2, 3 * second, "1",
			[]time.Duration{0, second}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serveScripts(t, tt.scripts...)
				app := openOn(t, server.conn(t, DialOptions(steady,
					WithMethod("/streams/Expand", WithHedging(Hedging{MaxAttempts: 2, Budget: Unlimited, Delay: HedgeAfter(second)})))...),
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

// Context and Trailer never wait, whatever another goroutine is in.
func TestContextAndTrailerDoNotWaitForOtherMethods(t *testing.T) {
	for _, other := range []string{"recv 1", "header", "send " + big + "; send " + big} {
		for name, use := range map[string]func(grpc.ClientStream){
			"Context": func(s grpc.ClientStream) { s.Context() },
			"Trailer": func(s grpc.ClientStream) { s.Trailer() },
		} {
			t.Run(name+" during "+strings.SplitN(other, " ", 2)[0], func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					server := serveScripts(t, "wait 5s; recv "+big+"; recv "+big)
					if !strings.HasPrefix(other, "send") {
						server = serveScripts(t, "wait 5s; send 1; hang")
					}
					app := openOn(t, server.conn(t, DialOptions(steady, WithAttemptTimeout(time.Hour), WithBufferLimit(1<<20))...),
						bidiStream)
					var group sync.WaitGroup
					group.Go(func() { app.play(t, other) })
					time.Sleep(second)
					use(app.stream)
					if got := time.Since(server.start); got != second {
						t.Errorf("%s returned at %v, want immediately, at 1s", name, got)
					}
					group.Wait()
				})
			})
		}
	}
}

// forgetful is an interceptor below that drops the options of the call.
var forgetful = grpc.WithChainStreamInterceptor(func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string,
	streamer grpc.Streamer, _ ...grpc.CallOption) (grpc.ClientStream, error) {
	return streamer(ctx, desc, cc, method)
})

func TestPushbackIsObeyedWithoutCallOptions(t *testing.T) {
	for _, tt := range []struct {
		name    string
		kind    *grpc.StreamDesc
		scripts []string
		app     string
		trailer string
		reason  error
		times   []time.Duration
	}{
		{"do not retry", bidiStream, []string{"recv a; pushback -1; fail UNAVAILABLE"}, "send a; recv UNAVAILABLE", "1", ErrPushback,
			[]time.Duration{0}},
		{"do not retry, server stream", serverStream, []string{"recv a; pushback -1; fail UNAVAILABLE"}, "send a; close; recv UNAVAILABLE",
			"1", ErrPushback, []time.Duration{0}},
		{"do not retry, client stream", clientStream, []string{"recv a; recv EOF; pushback -1; fail UNAVAILABLE"},
			"send a; close; recv UNAVAILABLE", "1", ErrPushback, []time.Duration{0}},
		{"do not retry, after headers", bidiStream, []string{"recv a; header; pushback -1; fail UNAVAILABLE"}, "send a; recv UNAVAILABLE",
			"1", ErrPushback, []time.Duration{0}},
		// committed: SendMsg cannot know the status
		{"do not retry, found by SendMsg", bidiStream, []string{"recv a; pushback -1; fail UNAVAILABLE"},
			"send a; wait 1s; sendeof b; recv UNAVAILABLE", "1", nil, []time.Duration{0}},
		{"do not retry, found by Header", bidiStream, []string{"recv a; pushback -1; fail UNAVAILABLE"},
			"send a; no header; recv UNAVAILABLE", "1", ErrPushback, []time.Duration{0}},
		{"a longer wait", bidiStream, []string{"recv a; pushback 7000; fail UNAVAILABLE", "recv a; send 1"}, "send a; recv 1; recv EOF", "",
			nil, []time.Duration{0, 7 * second}},
		{"not retryable", bidiStream, []string{"recv a; fail NOT_FOUND"}, "send a; recv NOT_FOUND; trailer 1", "1", nil,
			[]time.Duration{0}},
		{"committed", bidiStream, []string{"recv a; send 1; fail UNAVAILABLE"}, "send a; recv 1; recv UNAVAILABLE; trailer 1", "1", nil,
			[]time.Duration{0}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server, reported := serveScripts(t, tt.scripts...), &record{}
				var trailer metadata.MD
				app := openOn(t, server.conn(t, append(DialOptions(append(reported.options(), steady)...), forgetful)...), tt.kind,
					grpc.Trailer(&trailer), reported.onFinish())
				app.play(t, tt.app)
				if tt.reason != nil {
					wantStop(t, app.err, codes.Unavailable, tt.reason, 1)
				}
				if first(trailer["attempt"]) != tt.trailer {
					t.Errorf("trailer is %v, want that of attempt %q", trailer, tt.trailer)
				}
				wantTimes(t, server, tt.times...)
				reported.want(t, app.err)
			})
		})
	}
}

// gRPC closes the sending side of a server stream after its one request.
func TestAServerStreamIsHedgedAndReplayedWithoutCloseSend(t *testing.T) {
	hedged := WithMethod("/streams/Expand", WithHedging(Hedging{MaxAttempts: 2, Budget: Unlimited, Delay: HedgeAfter(second)}))
	for _, tt := range []struct {
		name    string
		opts    []Option
		scripts []string
		times   []time.Duration
	}{
		{"hedge", []Option{hedged}, []string{"recv a; recv EOF; hang", "recv a; recv EOF; send 1"}, []time.Duration{0, second}},
		{"hedge after a failure", []Option{hedged}, []string{"recv a; recv EOF; fail UNAVAILABLE", "recv a; recv EOF; send 1"},
			[]time.Duration{0, 0}},
		{"retry", nil, []string{"recv a; recv EOF; fail UNAVAILABLE", "recv a; recv EOF; send 1"}, []time.Duration{0, second}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serveScripts(t, tt.scripts...)
				openOn(t, server.conn(t, DialOptions(append(tt.opts, steady)...)...), serverStream).play(t, "send a; recv 1; recv EOF")
				wantTimes(t, server, tt.times...)
			})
		})
	}
}

// Headers do not commit a stream just because somebody else than the application sees them.
func TestHeadersSeenByAnObserverDoNotCommitAStream(t *testing.T) {
	bubble(t, func(t *testing.T) {
		scripts := []string{"recv a; header; fail UNAVAILABLE", "recv a; send 1"}
		server := serveStreams(t, func(n int, stream grpc.ServerStream) error { return playServer(t, n, scripts[n-1], stream) })
		var headers []string
		app, err := server.openStream(t, serverStream, []Option{WithObserver(func(_ context.Context, e Event) {
			if e.Kind == AttemptEnd {
				headers = append(headers, first(e.Attempt.Header["attempt"]))
			}
		})})
		if err != nil {
			t.Fatal(err)
		}
		app.play(t, "send a; close; recv 1; recv EOF")
		wantTimes(t, server, 0, second)
		if want := []string{"1", ""}; !slices.Equal(headers, want) {
			t.Errorf("the observer saw headers of attempts %q, want %q", headers, want)
		}
	})
}
