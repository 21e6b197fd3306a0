package grpcretry

import (
	"context"
	"errors"
	"reflect"
	"slices"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

func TestHeaderTrailerAndPeerAreOfTheReturnedAttempt(t *testing.T) {
	for _, tt := range []struct {
		name    string
		opts    []Option
		script  func(int) answer
		header  string // the value of k in the header, as the caller sees it
		trailer string
	}{
		{"success after a failure", nil,
			script(unavailable().withHeader("k", "one").withTrailer("k", "one"), ok().withHeader("k", "two").withTrailer("k", "two")),
			"two", "two"},
		{"success without any after a failure with", nil,
			script(unavailable().withHeader("k", "one").withTrailer("k", "one"), ok()), "", ""},
		{"the last failure", []Option{WithMaxAttempts(2)},
			script(unavailable().withHeader("k", "one").withTrailer("k", "one"), unavailable().withTrailer("k", "two")), "", "two"},
		{"at once", nil, script(ok().withHeader("k", "one").withTrailer("k", "one")), "one", "one"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, tt.script)
				client := server.client(t, append(tt.opts, steady)...)
				var header, trailer, again metadata.MD
				var at peer.Peer
				client.Echo(t.Context(), request(), grpc.Header(&header), grpc.Trailer(&trailer), grpc.Trailer(&again), grpc.Peer(&at))
				if got := first(header.Get("k")); got != tt.header {
					t.Errorf("header has %q, want %q", got, tt.header)
				}
				if got := first(trailer.Get("k")); got != tt.trailer {
					t.Errorf("trailer has %q, want %q", got, tt.trailer)
				}
				if !reflect.DeepEqual(trailer, again) {
					t.Errorf("one trailer is %v, the other %v", trailer, again)
				}
				if at.Addr == nil || at.Addr.String() != "bufconn" {
					t.Errorf("peer is %v, want bufconn", at.Addr)
				}
			})
		})
	}
}

func TestAnAttemptThatReachesNoServerShowsNoneOfTheOneBefore(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(unavailable().withHeader("k", "one").withTrailer("k", "one")))
		client := server.client(t, WithBackoff(Constant(second)), WithMaxAttempts(2))
		time.AfterFunc(second/2, server.server.Stop) // after the first attempt
		var header, trailer metadata.MD
		var at peer.Peer
		_, err := client.Echo(t.Context(), request(), grpc.Header(&header), grpc.Trailer(&trailer), grpc.Peer(&at))
		e := wantStop(t, err, codes.Unavailable, ErrNotConnected, 2)
		if header != nil || trailer != nil || at.Addr != nil {
			t.Errorf("caller sees header %v, trailer %v, peer %v of an attempt whose result it does not have", header, trailer, at.Addr)
		}
		if e.Attempts[0].Peer == nil || e.Attempts[1].Peer != nil || first(e.Attempts[0].Trailer["k"]) != "one" {
			t.Errorf("attempts are %+v, want peer and trailer of the first only", e.Attempts)
		}
	})
}

func TestPushbackIsReadAlsoWhereTheCallerTakesTheTrailer(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(unavailable().pushback("7000"), ok()))
		var trailer metadata.MD
		if _, err := server.client(t, steady).Echo(t.Context(), request(), grpc.Trailer(&trailer)); err != nil {
			t.Error(err)
		}
		wantTimes(t, server, 0, 7*second)
	})
}

func TestOnFinishRunsOnceAtTheEndOfTheCall(t *testing.T) {
	for _, tt := range []struct {
		name   string
		script func(int) answer
		opts   []Option
		want   codes.Code
		at     time.Duration
	}{
		{"success at once", script(ok()), nil, codes.OK, 0},
		{"success after retries", script(unavailable(), unavailable(), ok()), nil, codes.OK, 3 * second},
		{"gave up", always(unavailable()), []Option{WithMaxAttempts(2)}, codes.Unavailable, second},
		{"not retryable", script(fail(codes.NotFound, "x")), nil, codes.NotFound, 0},
		{"refused before anything is sent", script(), nil, codes.Internal, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, tt.script)
				client := server.client(t, append(tt.opts, steady)...)
				finished := map[string][]error{}
				note := func(name string) grpc.CallOption {
					return grpc.OnFinish(func(err error) {
						finished[name] = append(finished[name], err)
						if got := time.Since(server.start); got != tt.at {
							t.Errorf("OnFinish ran at %v, want %v", got, tt.at)
						}
					})
				}
				opts := []grpc.CallOption{note("a"), note("b")}
				if tt.want == codes.Internal {
					opts = append(opts, WithMaxAttempts(-1))
				}
				_, err := client.Echo(t.Context(), request(), opts...)
				for _, name := range []string{"a", "b"} {
					if got := finished[name]; len(got) != 1 || got[0] != err || status.Code(got[0]) != tt.want {
						t.Errorf("OnFinish %s ran with %v, want once with %v", name, got, err)
					}
				}
			})
		})
	}
}

func TestAnInnerInterceptorCannotWriteIntoOurOptions(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(unavailable(), ok()))
		var seen []int
		below := func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker,
			opts ...grpc.CallOption) error {
			seen = append(seen, len(opts))
			if cap(opts) != len(opts) {
				t.Errorf("options have room for %d more", cap(opts)-len(opts))
			}
			return invoker(ctx, method, req, reply, cc, append(opts, grpc.WaitForReady(true))...)
		}
		cc := server.conn(t, append(DialOptions(steady), grpc.WithChainUnaryInterceptor(below))...)
		if _, err := echov1.NewEchoServiceClient(cc).Echo(t.Context(), request()); err != nil {
			t.Error(err)
		}
		if len(seen) != 2 || seen[1] != seen[0]+1 { // the number of previous attempts
			t.Errorf("attempts had %v options, want one more in the retry", seen)
		}
	})
}

func TestTheCallersOptionsAreNotChanged(t *testing.T) {
	invoker := func(context.Context, string, any, any, *grpc.ClientConn, ...grpc.CallOption) error {
		return errors.New("x")
	}
	opts := make([]grpc.CallOption, 2, 10)
	opts[0], opts[1] = grpc.OnFinish(func(error) {}), grpc.StaticMethod()
	UnaryClientInterceptor()(t.Context(), "/s/m", nil, nil, nil, invoker, opts...)
	if _, ok := opts[0].(grpc.OnFinishCallOption); !ok || opts[:3][2] != nil {
		t.Errorf("options became %v", opts[:3])
	}
}

// The rules that need the response headers have them also where the caller takes them.
func TestHeadersAreReadAlsoWhereTheCallerTakesThem(t *testing.T) {
	t.Run("to commit", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			server := serve(t, script(unavailable(), unavailable().withHeader("k", "two")))
			var header metadata.MD
			_, err := server.client(t, steady, WithCommitOnHeaders(true)).Echo(t.Context(), request(), grpc.Header(&header))
			wantStop(t, err, codes.Unavailable, ErrCommitted, 2)
			wantTimes(t, server, 0, second)
		})
	})
	t.Run("to be seen", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			server := serve(t, script(unavailable().withHeader("k", "one"), unavailable(), ok().withHeader("k", "three")))
			var seen []string
			client := server.client(t, steady, WithObserver(func(_ context.Context, e Event) {
				if e.Kind == AttemptEnd {
					seen = append(seen, first(e.Attempt.Header["k"]))
				}
			}))
			var header metadata.MD
			if _, err := client.Echo(t.Context(), request(), grpc.Header(&header)); err != nil {
				t.Error(err)
			}
			if want := []string{"one", "", "three"}; !slices.Equal(seen, want) || first(header["k"]) != "three" {
				t.Errorf("the observer saw headers %q, the caller %v, want %q, the last", seen, header, want)
			}
		})
	})
}

func TestOptionsOfAnAttemptAreNotWrittenOverByTheNext(t *testing.T) {
	var kept [][]grpc.CallOption
	err := UnaryClientInterceptor(WithBackoff(Constant(0)))(t.Context(), "/s/m", nil, nil, nil,
		func(_ context.Context, _ string, _, _ any, _ *grpc.ClientConn, opts ...grpc.CallOption) error {
			kept = append(kept, opts)
			return errUnavailable
		}, grpc.StaticMethod())
	asError(t, err)
	for i, opts := range kept {
		for j, other := range kept[:i] {
			if &opts[0] == &other[0] {
				t.Errorf("attempts %d and %d have one slice of options", j+1, i+1)
			}
		}
	}
}

// Every attempt of a stream has options of its own: gRPC reads them when it ends, which
// may be after the next has begun.
func TestAttemptsOfAStreamDoNotShareOptions(t *testing.T) {
	bubble(t, func(t *testing.T) {
		scripts := []string{"fail UNAVAILABLE", "fail UNAVAILABLE", "recv a; send 1"}
		server := serveStreams(t, func(n int, stream grpc.ServerStream) error { return playServer(t, n, scripts[n-1], stream) })
		var all [][]grpc.CallOption
		below := func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, streamer grpc.Streamer,
			opts ...grpc.CallOption) (grpc.ClientStream, error) {
			all = append(all, opts)
			return streamer(ctx, desc, cc, method, opts...)
		}
		cc := server.conn(t, append(DialOptions(steady), grpc.WithChainStreamInterceptor(below))...)
		openOn(t, cc, serverStream).play(t, "send a; close; recv 1; recv EOF")
		peers := map[*peer.Peer]int{}
		for i, opts := range all {
			for _, opt := range opts {
				if opt, ok := opt.(*attempt); ok {
					peers[opt.PeerAddr] = i + 1
				}
			}
		}
		if len(all) != 3 || len(peers) != 3 {
			t.Errorf("%d attempts write their peer to %d places, want 3 to 3", len(all), len(peers))
		}
	})
}
