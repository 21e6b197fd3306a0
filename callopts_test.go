package grpcretry

import (
	"context"
	"reflect"
	"strings"
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
		{"a failure before a timeout", []Option{WithMaxAttempts(2), WithAttemptTimeout(second)},
			script(unavailable().withHeader("k", "one").withTrailer("k", "one"), ok().after(time.Minute)), "one", "one"},
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

func TestHeaderAndTrailerOfAFailureBeforeTheClientConnIsClosed(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(unavailable().withHeader("k", "one").withTrailer("k", "one"), ok().after(time.Minute)))
		cc := server.conn(t, DialOptions(steady)...)
		time.AfterFunc(5*second, func() { cc.Close() })
		var header, trailer metadata.MD
		_, err := echov1.NewEchoServiceClient(cc).Echo(t.Context(), request(), grpc.Header(&header), grpc.Trailer(&trailer))
		wantStop(t, err, codes.Unavailable, errConnClosed, 2)
		if first(header.Get("k")) != "one" || first(trailer.Get("k")) != "one" {
			t.Errorf("the caller sees header %v and trailer %v, want those of the failure that the call has ended with", header, trailer)
		}
	})
}

func TestAnAttemptThatReachesNoServerShowsNoneOfTheOneBefore(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(unavailable().withHeader("k", "one").withTrailer("k", "one")))
		client := server.client(t, WithBackoff(Constant(second)), WithMaxAttempts(2))
		time.AfterFunc(second/2, server.server.Stop) // after the first attempt
		var header, trailer metadata.MD
		var at peer.Peer
		_, err := client.Echo(t.Context(), request(), grpc.Header(&header), grpc.Trailer(&trailer), grpc.Peer(&at))
		e := wantStop(t, err, codes.Unavailable, ErrTargetDown, 2)
		if header != nil || trailer != nil || at.Addr != nil {
			t.Errorf("caller sees header %v, trailer %v, peer %v of an attempt whose result it does not have", header, trailer, at.Addr)
		}
		if e.Attempts[0].Peer == nil || e.Attempts[1].Peer != nil || first(e.Attempts[0].Trailer["k"]) != "one" {
			t.Errorf("attempts are %+v, want peer and trailer of the first only", e.Attempts)
		}
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

// Options that the library does not know reach gRPC in every attempt, also beside those that it handles.
func TestOtherOptionsReachGRPC(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var header metadata.MD
		client := serve(t, script(unavailable(), ok())).client(t, steady)
		_, err := client.Echo(t.Context(), request(), grpc.OnFinish(func(error) {}), grpc.Header(&header), WithMaxAttempts(3),
			grpc.MaxCallRecvMsgSize(0), grpc.UseCompressor("no such compressor"))
		if status.Code(err) != codes.Internal || !strings.Contains(err.Error(), "no such compressor") {
			t.Errorf("err = %v, want gRPC's about the compressor", err)
		}
	})
}

// If the caller's context has ended, the outputs are those of the last attempt, and not of an earlier failure.
func TestOutputsAfterTheCallersEnd(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(unavailable().withTrailer("from", "1"), hang()))
		client := server.client(t, WithBackoff(Constant(second)))
		ctx, cancel := context.WithTimeout(t.Context(), 5*second)
		defer cancel()
		var trailer metadata.MD
		_, err := client.Echo(ctx, request(), grpc.Trailer(&trailer))
		if status.Code(err) != codes.DeadlineExceeded || len(trailer.Get("from")) != 0 {
			t.Errorf("got %v with the trailer %v, want DEADLINE_EXCEEDED with nothing of attempt 1", err, trailer)
		}
	})
}
