package grpcretry

import (
	"bytes"
	"context"
	"errors"
	"math/rand/v2"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding/gzip"
	"google.golang.org/grpc/status"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// An attemptCounter is chained below the interceptor, so it also sees attempts that do not reach a
// server.
type attemptCounter struct {
	made int
	last error
}

func (c *attemptCounter) intercept(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn,
	invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	c.made++
	c.last = invoker(ctx, method, req, reply, cc, opts...)
	return c.last
}

// counted dials f with opts, and returns a counter of the attempts.
func (f *fixture) counted(t *testing.T, opts ...Option) (echov1.EchoServiceClient, *attemptCounter) {
	t.Helper()
	count := &attemptCounter{}
	cc := f.conn(t, append(DialOptions(opts...), grpc.WithChainUnaryInterceptor(count.intercept))...)
	return echov1.NewEchoServiceClient(cc), count
}

// noise cannot be compressed, so it is over a limit with and without compression.
func noise(n int) []byte {
	b := make([]byte, n)
	random := rand.New(rand.NewPCG(1, 2))
	for i := range b {
		b[i] = byte(random.Uint32())
	}
	return b
}

// Only the wording distinguishes a message over a size limit from overload. These tests take the
// wording from go.mod's version of grpc.
func TestSizeErrorsAreNotRetried(t *testing.T) {
	const limit = 1000
	zeros, random := bytes.Repeat([]byte{0}, 100*limit), noise(2*limit)
	for _, tt := range []struct {
		name    string
		payload []byte
		server  grpc.ServerOption
		call    grpc.CallOption
		seen    int // attempts that reach the handler
	}{
		{"the client may not send it", random, nil, grpc.MaxCallSendMsgSize(limit), 0},
		{"the client may not receive it", random, nil, grpc.MaxCallRecvMsgSize(limit), 1},
		{"the client may not receive it, by far", zeros, nil, grpc.MaxCallRecvMsgSize(limit), 1},
		{"the server may not receive it", random, grpc.MaxRecvMsgSize(limit), nil, 0},
		{"the server may not receive it, by far", zeros, grpc.MaxRecvMsgSize(limit), nil, 0},
		{"the server may not send it", random, grpc.MaxSendMsgSize(limit), nil, 1},
	} {
		for _, compressor := range []string{"", gzip.Name} {
			name := tt.name
			if compressor != "" {
				name += ", compressed"
			}
			t.Run(name, func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					var serverOpts []grpc.ServerOption
					if tt.server != nil {
						serverOpts = append(serverOpts, tt.server)
					}
					server := serve(t, always(ok()), serverOpts...)
					cc, count := server.counted(t, steady)
					var opts []grpc.CallOption
					if tt.call != nil {
						opts = append(opts, tt.call)
					}
					if compressor != "" {
						opts = append(opts, grpc.UseCompressor(compressor))
					}
					_, err := cc.Echo(t.Context(), &echov1.EchoRequest{Message: "m", Payload: tt.payload}, opts...)
					if status.Code(err) != codes.ResourceExhausted {
						t.Fatalf("Echo = %v, want RESOURCE_EXHAUSTED, else this row tests nothing", err)
					}
					if count.made != 1 || err != count.last {
						t.Errorf("%d attempts and error %v (%T), want 1 and what gRPC returned: %v", count.made, err, err, count.last)
					}
					if got := len(server.attempts()); got != tt.seen {
						t.Errorf("the handler saw %d attempts, want %d", got, tt.seen)
					}
				})
			})
		}
	}
}

func TestSizeErrorsInTheWordsOfOthers(t *testing.T) {
	for _, tt := range []struct {
		name, message string
		size          bool
	}{
		{"grpc-go receives", "grpc: received message larger than max (2048 vs. 1000)", true},
		{"grpc-go receives, compressed", "grpc: received message after decompression larger than max 1000", true},
		{"grpc-go sends", "trying to send message larger than max (2048 vs. 1000)", true},
		{"grpc-go sends, before 1.60", "grpc: trying to send message larger than max (2048 vs. 1000)", true},
		{"grpc-go sends over 4 GiB", "grpc: message too large (4294967296 bytes)", true},
		{"gRPC core receives", "Received message larger than max (2048 vs. 1000)", true},
		{"gRPC core sends", "Sent message larger than max (2048 vs. 1000)", true},
		{"grpc-java receives", "gRPC message exceeds maximum size 1000: 2048", true},
		{"grpc-js receives", "Received message larger than max (2048 vs 1000)", true},
		{"grpc-js receives, compressed", "Received message that decompresses to a size larger than 1000", true},
		{"grpc-js sends", "Attempted to send message with a size larger than 1000", true},
		{"grpc-dotnet receives", "Received message exceeds the maximum configured message size.", true},
		{"grpc-dotnet sends", "Sending message exceeds the maximum configured message size.", true},
		{"tonic receives", "Error, message length too large: found 2048 bytes, the limit is: 1000 bytes", true},
		{"tonic sends", "Error, encoded message length too large: found 2048 bytes, the limit is: 1000 bytes", true},
		{"connect-go receives", "message size 2048 is larger than configured max 1000", true},
		{"connect-go sends", "message size 2048 exceeds sendMaxBytes 1000", true},
		{"grpc-swift receives", "Message has exceeded the configured maximum payload size (max: 1000, actual: 2048)", true},
		{"grpc-java receives, compressed", "Decompressed gRPC message exceeds maximum size 1000", true},
		{"wrapped by a proxy", "upstream: grpc: received message larger than max (2048 vs. 1000): giving up", true},

		{"overload", "queue full", false},
		{"a quota", "Quota exceeded for quota metric 'Read requests' and limit 'Read requests per minute'", false},
		{"a busy server", "max concurrent streams exceeded", false},
		{"nothing", "", false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			for _, code := range []codes.Code{codes.ResourceExhausted, codes.Unavailable} {
				p := policyOf(t)
				f := failure{Attempt: Attempt{Number: 1, Err: status.Error(code, tt.message)}}
				// The same words with another code are about something else.
				if got, want := p.retryable(t.Context(), &f, f.Attempt.Code()), !tt.size || code != codes.ResourceExhausted; got != want {
					t.Errorf("%v %q: retryable = %t, want %t", code, tt.message, got, want)
				}
			}
		})
	}
}

// No code set and no classifier makes the end of the caller's own context retryable.
func TestClassifierIsNotAskedAboutTheCallersContext(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(hang()))
		cc := server.client(t, steady, WithClassifier(func(context.Context, Attempt) Classification {
			t.Error("classifier was asked")
			return Retry
		}))
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		_, err := cc.Echo(ctx, request())
		wantStop(t, err, codes.DeadlineExceeded, context.DeadlineExceeded, 1)

		ctx, cancel = context.WithCancel(t.Context())
		time.AfterFunc(time.Second, cancel)
		_, err = cc.Echo(ctx, request())
		wantStop(t, err, codes.Canceled, context.Canceled, 1)
	})
}

func TestClassifierIsNotAskedAboutACommittedStream(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serveScripts(t, "recv a; send 1; fail UNAVAILABLE")
		cc := server.conn(t, DialOptions(WithClassifier(func(context.Context, Attempt) Classification {
			t.Error("classifier was asked")
			return Default
		}))...)
		openOn(t, cc, serverStream).play(t, "send a; close; recv 1; recv UNAVAILABLE")
	})
}

// What an interceptor below returns instead of a status is UNKNOWN, unlike a function's error, which is retried.
func TestAnRPCsErrorWithoutAStatusIsUnknown(t *testing.T) {
	for _, tt := range []struct {
		opts     []Option
		attempts int
	}{{nil, 1}, {[]Option{WithCodes(codes.Unknown)}, 4}} {
		bubble(t, func(t *testing.T) {
			attempts, plain := 0, errors.New("plain")
			err := invokeEcho(t.Context(), UnaryClientInterceptor(append(tt.opts, WithBudget(Unlimited))...), func(context.Context, int) error {
				attempts++
				return plain
			})
			if attempts != tt.attempts || !errors.Is(err, plain) {
				t.Errorf("%d attempts and %v, want %d and the plain error", attempts, err, tt.attempts)
			}
		})
	}
}
