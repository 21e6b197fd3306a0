package grpcretry

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// The tests here are of WithUnsentOnly. unsent_faults_test.go proves it over real connections.

var unsentOnly = WithUnsentOnly(true)

// A failure after which the method may have run is returned as gRPC returns it, unless the server asks
// for another attempt.
func TestWhatMayHaveRunIsRetriedOnlyIfTheServerAsks(t *testing.T) {
	retry := WithClassifier(func(context.Context, Attempt) Classification { return Retry })
	for _, tt := range []struct {
		name   string
		opts   []Option
		script []answer
		want   []time.Duration // attempts
		err    string          // gRPC's own message; empty for a success
	}{
		{"UNAVAILABLE", nil, []answer{unavailable()}, []time.Duration{0}, "db-down"},
		{"RESOURCE_EXHAUSTED", nil, []answer{overloaded()}, []time.Duration{0}, "queue full"},
		{"a classifier says retry", []Option{retry}, []answer{fail(codes.Internal, "oops")}, []time.Duration{0}, "oops"},
		{"pushback", nil, []answer{unavailable().pushback("2000"), ok()}, []time.Duration{0, 2 * second}, ""},
		{"pushback of zero", nil, []answer{unavailable().pushback("0"), ok()}, []time.Duration{0, 0}, ""},
		{"RetryInfo", nil, []answer{fail(codes.Unavailable, "busy", retryInfoOf(3*second)), ok()}, []time.Duration{0, 3 * second}, ""},
		{"RetryInfo of zero", nil, []answer{fail(codes.Unavailable, "busy", retryInfoOf(0))}, []time.Duration{0}, "busy"},
		{"a server that asks twice", nil, []answer{unavailable().pushback("1000"), fail(codes.Unavailable, "x", retryInfoOf(second)), ok()},
			[]time.Duration{0, second, 2 * second}, ""},
		{"off again", []Option{WithMethod(echoMethod, WithUnsentOnly(false))}, []answer{unavailable(), ok()}, []time.Duration{0, second}, ""},
		{"on for the service", []Option{WithUnsentOnly(false), WithMethod("/grpcretry.test.v1.EchoService/", WithUnsentOnly(true))},
			[]answer{unavailable()}, []time.Duration{0}, "db-down"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, script(tt.script...))
				budget := &tally{}
				client := server.fixed(t, 0, append([]Option{steady, unsentOnly, WithBudget(budget)}, tt.opts...)...)
				_, err := client.Echo(t.Context(), request())
				if tt.err == "" && err != nil {
					t.Error(err)
				}
				if tt.err != "" {
					wantUntouched(t, err, status.Code(tt.script[0].err), tt.err)
				}
				wantTimes(t, server, tt.want...)
				want := counts{withdrawn: len(tt.want) - 1, highest: len(tt.want)}
				want.told[Failed] = len(tt.want)
				if tt.err == "" {
					want.told[Failed]--
					want.told[Succeeded]++
				}
				if budget.counts != want {
					t.Errorf("budget is %+v, want %+v", budget.counts, want)
				}
			})
		})
	}
}

// After a retry the call returns an Error. The reason is a kind of ErrNotRetryable with a name of its
// own.
func TestTheReasonForNotRunningTwiceIsShown(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(unavailable().pushback("1000"), unavailable()))
		recorder := &eventRecorder{start: server.start}
		_, err := server.client(t, unsentOnly, WithObserver(recorder.observe)).Echo(t.Context(), request())
		e := wantStop(t, err, codes.Unavailable, ErrNotRetryable, 2)
		if got := ReasonName(e.Reason); got != "may_have_run" {
			t.Errorf("ReasonName = %q, want may_have_run", got)
		}
		const want = "failure is not retryable: the method may have run, and it must not run twice: rpc error"
		if !strings.Contains(err.Error(), want) {
			t.Errorf("err = %v, want it to contain %q", err, want)
		}
		if got, want := recorder.lines[len(recorder.lines)-1], "1s call_end #2 may_have_run after 1s, attempts #1 UNAVAILABLE #2 UNAVAILABLE"; got != want {
			t.Errorf("the last event is %q, want %q", got, want)
		}
		if errors.Is(errUnavailable, ErrNotRetryable) || ReasonName(ErrNotRetryable) != "not_retryable" {
			t.Error("other failures have changed their name")
		}
	})
}

// kindsOfCalls make one call each, and return its error.
var kindsOfCalls = []struct {
	name string
	call func(context.Context, *grpc.ClientConn) error
}{
	{"unary", func(ctx context.Context, cc *grpc.ClientConn) error {
		return cc.Invoke(ctx, "/streams/Unary", request(), new(echov1.EchoResponse))
	}},
	{"server stream", callStream(serverStream)},
	{"client stream", callStream(clientStream)},
	{"bidirectional stream", callStream(bidiStream)},
}

// callStream returns a function that sends a message and receives until the end.
func callStream(desc *grpc.StreamDesc) func(context.Context, *grpc.ClientConn) error {
	return func(ctx context.Context, cc *grpc.ClientConn) error {
		stream, err := cc.NewStream(ctx, desc, "/streams/"+desc.StreamName)
		if err != nil {
			return err
		}
		if err := stream.SendMsg(request()); err != nil && err != io.EOF {
			return err
		}
		if err := stream.CloseSend(); err != nil {
			return err
		}
		for {
			switch err := stream.RecvMsg(new(echov1.EchoResponse)); {
			case err == io.EOF, err == nil && !desc.ServerStreams:
				return nil
			case err != nil:
				return err
			}
		}
	}
}

// everyKind runs a test for unary calls and all kinds of streams.
func everyKind(t *testing.T, f func(t *testing.T, call func(context.Context, *grpc.ClientConn) error)) {
	t.Helper()
	for _, kind := range kindsOfCalls {
		t.Run(kind.name, func(t *testing.T) { bubble(t, func(t *testing.T) { f(t, kind.call) }) })
	}
}

const onceMore = "recv hello; send done" // a script of a server that succeeds

// A call that reached no server waits for its connection, counts for nothing and is charged nothing.
func TestARestartIsSurvivedByWhatMustNotRunTwice(t *testing.T) {
	everyKind(t, func(t *testing.T, call func(context.Context, *grpc.ClientConn) error) {
		server := serveScripts(t, onceMore)
		budget := &tally{}
		link, cc := server.linked(t, DialOptions(unsentOnly, WithBackoff(Constant(second)), WithBudget(budget))...)
		link.cut()
		synctest.Wait()
		time.AfterFunc(2*second, link.mend) // gRPC dials at 0, 1 and 2.6 s
		if err := call(t.Context(), cc); err != nil {
			t.Error(err)
		}
		wantTimes(t, server, 3600*time.Millisecond)
		if want := (counts{told: [4]int{Succeeded: 1}, highest: 1}); budget.counts != want {
			t.Errorf("budget is %+v, want %+v", budget.counts, want)
		}
	})
}

// Without ConnectWait the same call is retried, but each attempt counts and is charged.
func TestUnsentAttemptsWithoutConnectWaitAreRetried(t *testing.T) {
	everyKind(t, func(t *testing.T, call func(context.Context, *grpc.ClientConn) error) {
		server := serveScripts(t, onceMore)
		budget := &tally{}
		link, cc := server.linked(t, DialOptions(unsentOnly, WithConnectWait(0), WithBackoff(Constant(2*second)), WithBudget(budget))...)
		link.cut()
		synctest.Wait()
		time.AfterFunc(5*second/2, link.mend)
		if err := call(t.Context(), cc); err != nil {
			t.Error(err)
		}
		wantTimes(t, server, 4*second)
		if want := (counts{withdrawn: 2, told: [4]int{Failed: 2, Succeeded: 1}, highest: 3}); budget.counts != want {
			t.Errorf("budget is %+v, want %+v", budget.counts, want)
		}
	})
}

// As soon as there was a stream, the method may have run: with a connection that is lost later, and
// with one on which the server fails.
func TestWhatHadAStreamIsNotRetried(t *testing.T) {
	for name, opts := range map[string][]Option{"": nil, ", without ConnectWait": {WithConnectWait(0)}} {
		t.Run("the connection is lost"+name, func(t *testing.T) {
			everyKind(t, func(t *testing.T, call func(context.Context, *grpc.ClientConn) error) {
				server := serveScripts(t, "recv hello; hang", onceMore)
				link, cc := server.linked(t, DialOptions(append(opts, unsentOnly)...)...)
				time.AfterFunc(second, func() { link.cut(); link.mend() })
				if err := call(t.Context(), cc); status.Code(err) != codes.Unavailable || ReasonName(reasonOf(err)) != "cancelled" {
					t.Errorf("err = %v, want gRPC's own UNAVAILABLE", err)
				}
				time.Sleep(time.Minute)
				wantTimes(t, server, 0)
			})
		})
	}
	everyKind(t, func(t *testing.T, call func(context.Context, *grpc.ClientConn) error) {
		server := serveScripts(t, "recv hello; fail UNAVAILABLE", onceMore)
		err := call(t.Context(), server.conn(t, DialOptions(unsentOnly)...))
		wantUntouched(t, err, codes.Unavailable, "failed in attempt 1")
		wantTimes(t, server, 0)
	})
}

// reasonOf returns the Reason of an Error, nil for other errors.
func reasonOf(err error) error {
	if e := (*Error)(nil); errors.As(err, &e) {
		return e.Reason
	}
	return nil
}

func TestStreamsAreRetriedIfTheServerAsks(t *testing.T) {
	everyKind(t, func(t *testing.T, call func(context.Context, *grpc.ClientConn) error) {
		server := serveScripts(t, "recv hello; pushback 2000; fail UNAVAILABLE", onceMore)
		if err := call(t.Context(), server.conn(t, DialOptions(unsentOnly)...)); err != nil {
			t.Error(err)
		}
		wantTimes(t, server, 0, 2*second)
	})
}

// A retry that was allowed can still be the last attempt, cost too much or come too late.
func TestUnsentOnlyAllowsNoMoreThanOtherRules(t *testing.T) {
	for _, tt := range []struct {
		name   string
		opts   []Option
		reason error
		made   int
	}{
		{"attempts", []Option{WithConnectWait(0)}, ErrAttemptsExhausted, 4},
		{"the budget", []Option{WithConnectWait(0), WithBudget(stingy{})}, ErrBudgetExhausted, 1},
		{"MaxElapsed", []Option{WithMaxElapsed(second / 10)}, ErrMaxElapsed, 1},
		{"ConnectWait", []Option{WithConnectWait(3 * second)}, ErrNotConnected, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, always(ok()))
				link, cc := server.linked(t, DialOptions(append(tt.opts, unsentOnly, WithBackoff(Constant(second/10)))...)...)
				link.cut()
				synctest.Wait()
				wantStop(t, echo(t.Context(), echov1.NewEchoServiceClient(cc)), codes.Unavailable, tt.reason, tt.made)
				wantTimes(t, server)
			})
		})
	}
}

// What gRPC refuses before it opens a stream has run nowhere, although there is a connection. It counts
// like any other failure.
func TestWhatGRPCRefusesWithAConnectionIsRetried(t *testing.T) {
	failures := 0
	flaky := flakyCreds(func() error {
		if failures++; failures < 3 {
			return status.Error(codes.Unavailable, "no token")
		}
		return nil
	})
	bubble(t, func(t *testing.T) {
		server := serve(t, always(ok()))
		budget := &tally{}
		_, cc := server.linked(t, DialOptions(unsentOnly, steady, WithBudget(budget))...)
		if _, err := echov1.NewEchoServiceClient(cc).Echo(t.Context(), request(), grpc.PerRPCCredentials(flaky)); err != nil {
			t.Error(err)
		}
		wantTimes(t, server, 3*second)
		if want := (counts{withdrawn: 2, told: [4]int{Failed: 2, Succeeded: 1}, highest: 3}); budget.counts != want {
			t.Errorf("budget is %+v, want %+v", budget.counts, want)
		}
	})
}

// flakyCreds are per-RPC credentials that may fail.
type flakyCreds func() error

func (f flakyCreds) GetRequestMetadata(context.Context, ...string) (map[string]string, error) {
	return nil, f()
}
func (flakyCreds) RequireTransportSecurity() bool { return false }

// A call that waits for its turn on a connection with too many streams has run nowhere when that
// connection is lost, and neither when the attempt timeout ends the attempt.
func TestACallThatWaitsForItsTurnIsRetried(t *testing.T) {
	for _, tt := range []struct {
		name string
		opts []Option
		cut  bool // the link
		want time.Duration
		paid int
	}{
		{"the connection is lost", nil, true, 3 * second, 0}, // gRPC dials at 1 and 2 s
		{"it is cut", []Option{WithAttemptTimeout(2 * second)}, false, 3 * second, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, script(hang(), ok()), grpc.MaxConcurrentStreams(1))
				budget := &tally{}
				link, cc := server.linked(t, DialOptions(append(tt.opts, unsentOnly, WithBackoff(Constant(second)), WithBudget(budget))...)...)
				client := echov1.NewEchoServiceClient(cc)
				var group sync.WaitGroup
				group.Go(func() {
					_, err := client.Echo(t.Context(), request(), WithAttemptTimeout(5*second/2))
					if err == nil || reasonOf(err) != nil {
						t.Errorf("the first call ended with %v, want gRPC's own error or a timeout", err)
					}
				})
				synctest.Wait()
				group.Go(func() {
					if err := echo(t.Context(), client); err != nil {
						t.Error(err)
					}
				})
				if tt.cut {
					time.AfterFunc(second, link.cut)
					time.AfterFunc(3*second/2, link.mend)
				}
				group.Wait()
				wantTimes(t, server, 0, tt.want)
				if budget.withdrawn != tt.paid {
					t.Errorf("%d retries were paid for, want %d", budget.withdrawn, tt.paid)
				}
			})
		})
	}
}

// A handshake that fails is no attempt that ran.
func TestAFailedHandshakeIsRetried(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(ok()))
		wrong := grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{MinVersion: tls.VersionTLS13}))
		_, err := echov1.NewEchoServiceClient(server.conn(t, append(DialOptions(unsentOnly, WithConnectWait(0), WithBackoff(Constant(0))), wrong)...)).
			Echo(t.Context(), request())
		wantStop(t, err, codes.Unavailable, ErrAttemptsExhausted, 4)
	})
}

// dropping is an interceptor below ours that does not pass the call options on.
func dropping(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker, _ ...grpc.CallOption) error {
	return invoker(ctx, method, req, reply, cc)
}

func droppingStream(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, streamer grpc.Streamer,
	_ ...grpc.CallOption) (grpc.ClientStream, error) {
	return streamer(ctx, desc, cc, method)
}

// Without the options gRPC cannot report whether there was a stream: the request ran, the peer is
// unknown, and there is no connection, but that proves nothing.
func TestWithoutItsOptionsAnAttemptMayHaveRun(t *testing.T) {
	for _, tt := range []struct {
		name string
		opts []Option
		runs int // of the unary handler
	}{
		{"by default it runs twice", nil, 2},
		{"with UnsentOnly it does not", []Option{unsentOnly}, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			everyKind(t, func(t *testing.T, call func(context.Context, *grpc.ClientConn) error) {
				server := serveScripts(t, "recv hello; hang", onceMore)
				dial := append(DialOptions(append(tt.opts, WithBackoff(Constant(second)))...),
					grpc.WithChainUnaryInterceptor(dropping), grpc.WithChainStreamInterceptor(droppingStream))
				link, cc := server.linked(t, dial...)
				time.AfterFunc(second, link.cut)
				time.AfterFunc(3*second/2, link.mend)
				err := call(t.Context(), cc)
				if runs := len(server.attempts()); runs != tt.runs || (err == nil) != (runs == 2) {
					t.Errorf("the handler ran %d times, and the call ended with %v, want %d runs", runs, err, tt.runs)
				}
			})
		})
	}
	t.Run("not even if it ran nowhere", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			server := serve(t, always(ok()))
			link, cc := server.linked(t, append(DialOptions(unsentOnly), grpc.WithChainUnaryInterceptor(dropping))...)
			link.cut()
			synctest.Wait()
			budget := &tally{}
			err := cc.Invoke(t.Context(), echoMethod, request(), new(echov1.EchoResponse), WithBudget(budget))
			if status.Code(err) != codes.Unavailable || reasonOf(err) != nil {
				t.Errorf("err = %v, want gRPC's own UNAVAILABLE", err)
			}
			if want := (counts{told: [4]int{Failed: 1}, highest: 1}); budget.counts != want {
				t.Errorf("budget is %+v, want %+v", budget.counts, want)
			}
		})
	})
}

// What an interceptor below does instead of the attempt is no proof that nothing ran.
func TestInterceptorsBelowProveNothing(t *testing.T) {
	down := status.Error(codes.Unavailable, "below")
	for _, tt := range []struct {
		name string
		do   func(ctx context.Context, next func(context.Context) error) error
		runs int
	}{
		{"an error of its own", func(context.Context, func(context.Context) error) error { return down }, 0},
		{"an error instead of a success", func(ctx context.Context, next func(context.Context) error) error {
			return errors.Join(next(ctx), down)
		}, 1},
		{"two attempts of its own", func(ctx context.Context, next func(context.Context) error) error {
			_ = next(ctx)
			ended, cancel := context.WithCancel(ctx)
			cancel()
			return errors.Join(next(ended), down)
		}, 1},
		{"two attempts of its own, in the other order", func(ctx context.Context, next func(context.Context) error) error {
			ended, cancel := context.WithCancel(ctx)
			cancel()
			return errors.Join(next(ended), next(ctx), down)
		}, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, always(ok()))
				attempts := 0
				below := belowUnary(func(ctx context.Context, next func(context.Context) error) error {
					attempts++
					return tt.do(ctx, next)
				})
				retry := WithClassifier(func(context.Context, Attempt) Classification { return Retry })
				_, cc := server.linked(t, append(DialOptions(unsentOnly, retry), below)...)
				if err := echo(t.Context(), echov1.NewEchoServiceClient(cc)); err == nil || reasonOf(err) != nil {
					t.Errorf("err = %v, want the interceptor's own", err)
				}
				if runs := len(server.attempts()); attempts != 1 || runs != tt.runs {
					t.Errorf("%d attempts, and the handler ran %d times, want 1 and %d", attempts, runs, tt.runs)
				}
			})
		})
	}
}

// An interceptor may return while gRPC is still in the attempt. (For a unary call that would be a
// mistake, because gRPC then writes the reply while the application reads it.)
func TestAnAttemptThatGoesOnBelowMayHaveRun(t *testing.T) {
	for _, reached := range []bool{true, false} {
		bubble(t, func(t *testing.T) {
			server := serveScripts(t, "hang")
			attempts := 0
			below := belowStream(func(ctx context.Context, next streamOpener) (grpc.ClientStream, error) {
				attempts++
				go next(ctx)
				synctest.Wait()
				return nil, status.Error(codes.Unavailable, "below")
			})
			dial := append(DialOptions(unsentOnly), below)
			if !reached { // it waits inside gRPC
				dial = append(dial, grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
					<-ctx.Done()
					return nil, ctx.Err()
				}))
			}
			cc := server.conn(t, dial...)
			if err := callStream(bidiStream)(t.Context(), cc); attempts != 1 || err == nil || reasonOf(err) != nil {
				t.Errorf("%d attempts, then %v, want one, and the interceptor's own error", attempts, err)
			}
			if runs := len(server.attempts()); (runs == 1) != reached {
				t.Errorf("the handler ran %d times, want it to run: %v", runs, reached)
			}
		})
	}
}

// An interceptor below may make the call on another ClientConn, whose own Retrier ends with an attempt
// that reached no server, after one that did.
func TestARetrierBelowProvesNothing(t *testing.T) {
	for name, desc := range map[string]*grpc.StreamDesc{"unary": nil, "stream": serverStream} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serveScripts(t, "recv hello; hang")
				link, elsewhere := server.linked(t, DialOptions(WithMaxAttempts(2), WithConnectWait(0), WithBackoff(Constant(0)))...)
				time.AfterFunc(second, link.cut)
				attempts := 0
				_, cc := server.linked(t, append(DialOptions(unsentOnly),
					grpc.WithChainUnaryInterceptor(func(ctx context.Context, method string, req, reply any, _ *grpc.ClientConn,
						_ grpc.UnaryInvoker, opts ...grpc.CallOption) error {
						attempts++
						return elsewhere.Invoke(ctx, method, req, reply, opts...)
					}),
					grpc.WithChainStreamInterceptor(func(ctx context.Context, desc *grpc.StreamDesc, _ *grpc.ClientConn, method string,
						_ grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
						attempts++
						return elsewhere.NewStream(ctx, desc, method, opts...)
					}))...)
				call := kindsOfCalls[0].call
				if desc != nil {
					call = callStream(desc)
				}
				if err := call(t.Context(), cc); !errors.Is(err, ErrAttemptsExhausted) || attempts != 1 {
					t.Errorf("%d attempts, then %v, want one, and the other Retrier's error", attempts, err)
				}
			})
		})
	}
}

// A connection whose addresses and credentials are unknown leaves the peer empty.
func TestAnEmptyPeerProvesNothing(t *testing.T) {
	for _, tt := range []struct {
		name string
		opts []Option
		runs int
	}{
		{"by default it runs twice", nil, 2},
		{"with UnsentOnly it does not", []Option{unsentOnly}, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			everyKind(t, func(t *testing.T, call func(context.Context, *grpc.ClientConn) error) {
				server := serveScripts(t, "recv hello; hang", onceMore)
				l := &link{listener: server.listener}
				cc := server.conn(t, append(DialOptions(append(tt.opts, WithBackoff(Constant(second)))...), redials,
					grpc.WithTransportCredentials(speechless{insecure.NewCredentials()}),
					grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) {
						conn, err := l.dial(ctx, addr)
						return nowhere{conn}, err
					}))...)
				connect(t, cc)
				time.AfterFunc(second, l.cut)
				time.AfterFunc(3*second/2, l.mend)
				err := call(t.Context(), cc)
				if runs := len(server.attempts()); runs != tt.runs || (err == nil) != (runs == 2) {
					t.Errorf("the handler ran %d times, and the call ended with %v, want %d runs", runs, err, tt.runs)
				}
			})
		})
	}
}

// nowhere is a connection without addresses.
type nowhere struct{ net.Conn }

func (nowhere) LocalAddr() net.Addr  { return nil }
func (nowhere) RemoteAddr() net.Addr { return nil }

// speechless are credentials that say nothing about a connection.
type speechless struct {
	credentials.TransportCredentials
}

func (s speechless) ClientHandshake(ctx context.Context, name string, conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, _, err := s.TransportCredentials.ClientHandshake(ctx, name, conn)
	return conn, nil, err
}
func (s speechless) Clone() credentials.TransportCredentials { return s }

// A frameServer speaks just enough HTTP/2 to treat streams as gRPC's own server does not: what it does
// with stream n of all its connections is in its script.
type frameServer struct {
	script []frameStep

	mu      sync.Mutex
	streams int // guarded by mu; seen so far
}

// A frameStep is what the server does with a stream.
type frameStep func(conn net.Conn, stream uint32)

// The types of frames, and error codes.
const (
	frameHeaders, frameReset, frameSettings, frameGoAway = 1, 3, 4, 7
	refusedStream, cancelStream, enhanceYourCalm         = 7, 8, 11
)

func (s *frameServer) serve(conn net.Conn) {
	defer conn.Close()
	preface := make([]byte, len("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))
	if _, err := io.ReadFull(conn, preface); err != nil {
		return
	}
	writeFrame(conn, frameSettings, 0, 0, nil)
	head := make([]byte, 9)
	for {
		if _, err := io.ReadFull(conn, head); err != nil {
			return
		}
		length := int64(head[0])<<16 | int64(head[1])<<8 | int64(head[2])
		if _, err := io.CopyN(io.Discard, conn, length); err != nil {
			return
		}
		switch {
		case head[3] == frameSettings && head[4] == 0:
			writeFrame(conn, frameSettings, 1, 0, nil) // the acknowledgement
		case head[3] == frameHeaders:
			s.act(conn, binary.BigEndian.Uint32(head[5:]))
		}
	}
}

func (s *frameServer) act(conn net.Conn, stream uint32) {
	s.mu.Lock()
	s.streams++
	n := s.streams
	s.mu.Unlock()
	if n > len(s.script) { // one too many
		n = len(s.script)
	}
	s.script[n-1](conn, stream)
}

func (s *frameServer) seen() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.streams
}

func writeFrame(conn net.Conn, kind, flags byte, stream uint32, payload []byte) {
	frame := append(binary.BigEndian.AppendUint32([]byte{0, 0, byte(len(payload)), kind, flags}, stream), payload...)
	_, _ = conn.Write(frame)
}

// reset ends a stream with an error code.
func reset(code uint32) frameStep {
	return func(conn net.Conn, stream uint32) {
		writeFrame(conn, frameReset, 0, stream, binary.BigEndian.AppendUint32(nil, code))
	}
}

// goAway says that no stream was processed.
func goAway(conn net.Conn, _ uint32) { writeFrame(conn, frameGoAway, 0, 0, make([]byte, 8)) }

func hangUp(conn net.Conn, _ uint32) { conn.Close() }

// gRPC itself repeats a request, once, that a server has refused to process. Whether the second was
// refused as well is not known to an interceptor.
func TestGRPCRepeatsWhatWasNotProcessed(t *testing.T) {
	for _, tt := range []struct {
		name   string
		script []frameStep
		want   int // streams
		code   codes.Code
	}{
		{"refused twice", []frameStep{reset(refusedStream), reset(refusedStream)}, 2, codes.Unavailable},
		{"refused, then cancelled", []frameStep{reset(refusedStream), reset(cancelStream)}, 2, codes.Canceled},
		{"GOAWAY, then refused", []frameStep{goAway, reset(refusedStream)}, 2, codes.Unavailable},
		{"GOAWAY, then the connection is lost", []frameStep{goAway, hangUp}, 2, codes.Unavailable},
		{"the connection is lost", []frameStep{hangUp}, 1, codes.Unavailable},
		{"ENHANCE_YOUR_CALM", []frameStep{reset(enhanceYourCalm)}, 1, codes.ResourceExhausted},
	} {
		t.Run(tt.name, func(t *testing.T) {
			everyKind(t, func(t *testing.T, call func(context.Context, *grpc.ClientConn) error) {
				server := &frameServer{script: tt.script}
				retry := WithClassifier(func(context.Context, Attempt) Classification { return Retry })
				cc, err := grpc.NewClient("passthrough:///frames", append(DialOptions(unsentOnly, retry), redials,
					grpc.WithTransportCredentials(insecure.NewCredentials()),
					grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) {
						ours, theirs := net.Pipe()
						go server.serve(theirs)
						return ours, nil
					}))...)
				if err != nil {
					t.Fatal(err)
				}
				defer cc.Close()
				err = call(t.Context(), cc)
				lost := tt.want > 1 && (errors.Is(err, errLost) || errors.Is(err, errNoResponse)) // gRPC's false end of a call that it has repeated, see false_eof_test.go
				if status.Code(err) != tt.code && !lost || reasonOf(err) != nil {
					t.Errorf("err = %v, want gRPC's own %v", err, tt.code)
				}
				if got := server.seen(); got != tt.want {
					t.Errorf("the server saw %d streams, want %d", got, tt.want)
				}
			})
		})
	}
}

// An attempt in flight is not replaced. Without a deadline it is cut, and then judged.
func TestATimeoutReplacesNoAttemptThatMayRun(t *testing.T) {
	slow := "recv hello; wait 5s; send done"
	t.Run("with a deadline it goes on", func(t *testing.T) {
		everyKind(t, func(t *testing.T, call func(context.Context, *grpc.ClientConn) error) {
			server := serveScripts(t, slow)
			budget := &tally{}
			ctx, cancel := context.WithTimeout(t.Context(), 20*second)
			defer cancel()
			if err := call(ctx, server.conn(t, DialOptions(unsentOnly, WithAttemptTimeout(2*second), WithBudget(budget))...)); err != nil {
				t.Error(err)
			}
			wantTimes(t, server, 0)
			if got := time.Since(server.start); got != 5*second || budget.counts != (counts{told: [4]int{Succeeded: 1}, highest: 1}) {
				t.Errorf("the call took %v and the budget is %+v, want 5s and one success", got, budget.counts)
			}
		})
	})
	t.Run("without a deadline it is cut", func(t *testing.T) {
		everyKind(t, func(t *testing.T, call func(context.Context, *grpc.ClientConn) error) {
			server := serveScripts(t, slow)
			recorder := &eventRecorder{start: server.start}
			err := call(t.Context(), server.conn(t, DialOptions(unsentOnly, WithAttemptTimeout(2*second), WithObserver(recorder.observe))...))
			if !errors.Is(err, ErrAttemptTimeout) || reasonOf(err) != nil || ReasonName(recorder.last.Reason) != "may_have_run" {
				t.Errorf("err = %v with the reason %v, want the timeout itself, may_have_run", err, recorder.last.Reason)
			}
			wantTimes(t, server, 0)
			if got := time.Since(server.start); got != 2*second {
				t.Errorf("the call took %v, want 2s", got)
			}
		})
	})
	t.Run("the server's pushback comes with the cut", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			server := serve(t, script(unavailable().after(2*second).pushback("1000"), ok()))
			late := belowUnary(func(ctx context.Context, next func(context.Context) error) error {
				err := next(context.WithoutCancel(ctx))
				return err
			})
			client := echov1.NewEchoServiceClient(server.conn(t, append(DialOptions(unsentOnly, WithAttemptTimeout(second)), late)...))
			if err := echo(t.Context(), client); err != nil {
				t.Error(err)
			}
			wantTimes(t, server, 0, 3*second)
		})
	})
}

// While gRPC connects, an attempt waits inside gRPC.
func TestATimeoutWhileGRPCConnects(t *testing.T) {
	for _, tt := range []struct {
		name  string
		limit time.Duration // the caller's deadline
		want  time.Duration
	}{
		{"with a deadline it goes on", 20 * second, 3 * second},
		{"without a deadline it is cut, and has run nowhere", time.Duration(0), 4 * second}, // and the backoff
	} {
		t.Run(tt.name, func(t *testing.T) {
			everyKind(t, func(t *testing.T, call func(context.Context, *grpc.ClientConn) error) {
				server := serveScripts(t, onceMore)
				budget := &tally{}
				cc := server.conn(t, append(DialOptions(unsentOnly, WithAttemptTimeout(2*second), WithBackoff(Constant(second)), WithBudget(budget)),
					grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
						time.Sleep(3 * second)
						return server.listener.DialContext(ctx)
					}))...)
				ctx, cancel := context.WithCancel(t.Context())
				if tt.limit > 0 {
					ctx, cancel = context.WithTimeout(t.Context(), tt.limit)
				}
				defer cancel()
				if err := call(ctx, cc); err != nil {
					t.Error(err)
				}
				wantTimes(t, server, tt.want)
				if want := (counts{told: [4]int{Succeeded: 1}, highest: 1}); budget.counts != want {
					t.Errorf("budget is %+v, want %+v", budget.counts, want)
				}
			})
		})
	}
}

// After a GOAWAY the channel has no connection for new attempts, but one in flight goes on on the old one.
func TestATimeoutAfterGOAWAY(t *testing.T) {
	for name, limit := range map[string]time.Duration{"with a deadline": 20 * second, "without one": 0} {
		t.Run(name, func(t *testing.T) {
			everyKind(t, func(t *testing.T, call func(context.Context, *grpc.ClientConn) error) {
				server := serveScripts(t, "recv hello; wait 5s; send done", onceMore)
				link, cc := server.linked(t, DialOptions(unsentOnly, WithAttemptTimeout(3*second))...)
				time.AfterFunc(second, func() {
					link.mu.Lock()
					link.down = true
					link.mu.Unlock()
					go server.server.GracefulStop()
				})
				time.AfterFunc(2*second, cc.Connect)
				states := make(chan connectivity.State, 1)
				time.AfterFunc(3*second-1, func() { states <- cc.GetState() })
				ctx, cancel := context.WithCancel(t.Context())
				if limit > 0 {
					ctx, cancel = context.WithTimeout(t.Context(), limit)
				}
				defer cancel()
				err := call(ctx, cc)
				if state := <-states; state != connectivity.TransientFailure {
					t.Errorf("the channel is %v at the timeout, want TRANSIENT_FAILURE", state)
				}
				wantTimes(t, server, 0)
				if limit > 0 && err != nil || limit == 0 && !errors.Is(err, ErrAttemptTimeout) {
					t.Errorf("err = %v with a deadline of %v", err, limit)
				}
			})
		})
	}
}

// What must not run twice is not hedged, whatever scope hedging comes from.
func TestWhatMustNotRunTwiceIsNotHedged(t *testing.T) {
	hedging := WithHedging(Hedging{Delay: HedgeAfter(second), Budget: Unlimited, AllMethodsAreSafe: true})
	for _, tt := range []struct {
		name string
		opts []Option
		call []grpc.CallOption
		want int
	}{
		{"for all methods", []Option{hedging, unsentOnly}, nil, 1},
		{"for the method", []Option{unsentOnly, WithMethod(echoMethod, hedging)}, nil, 1},
		{"for the call", []Option{unsentOnly}, []grpc.CallOption{hedging}, 1},
		{"in a policy", []Option{WithPolicy(Policy{UnsentOnly: true}), hedging}, nil, 1},
		{"with retries off", []Option{unsentOnly, Disable(), hedging}, nil, 1},
		{"off for the method", []Option{hedging, unsentOnly, WithMethod(echoMethod, WithUnsentOnly(false))}, nil, 2},
		{"off for the call", []Option{hedging, unsentOnly}, []grpc.CallOption{WithUnsentOnly(false)}, 2},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, always(ok().after(5*second)))
				if _, err := server.client(t, append(tt.opts, WithBudget(Unlimited))...).Echo(t.Context(), request(), tt.call...); err != nil {
					t.Error(err)
				}
				if got := len(server.attempts()); got != tt.want {
					t.Errorf("the server saw %d attempts, want %d", got, tt.want)
				}
			})
		})
	}
	p := policyOf(t, hedging, unsentOnly)
	if p.modeOf(nil) != modeRetried || p.hedgeBudget() != nil {
		t.Errorf("mode %v and budget %v of hedges, want retries, and no such budget", p.modeOf(nil), p.hedgeBudget())
	}
	if got := policyOf(t, hedging, unsentOnly, Disable()).modeOf(nil); got != modePassThrough {
		t.Errorf("without retries the mode is %v, want %v", got, modePassThrough)
	}
}

// A Plan's driver knows what was sent.
func TestPlanOfUnsentOnly(t *testing.T) {
	hedging := WithHedging(Hedging{Delay: HedgeAfter(second), Budget: Unlimited, AllMethodsAreSafe: true})
	plan := newPlan(t, t.Context(), unsentOnly, hedging, WithBackoff(Constant(second)))
	first, _ := plan.Sent(noon)
	if due := plan.DueAt(); !due.IsZero() {
		t.Errorf("something is due at %v while the first attempt is in flight, want no hedge", due)
	}
	first = failed(first, codes.Unavailable)
	first.Unsent = true
	if got, want := plan.Ended(first, noon, 0), (Step{Connect: true}); got != want {
		t.Errorf("Ended = %+v for an unsent attempt, want %+v", got, want)
	}
	plan.Due(noon.Add(second))
	if got, want := plan.Due(plan.DueAt()), (Step{Send: true}); got != want {
		t.Errorf("Due = %+v with a connection, want %+v", got, want)
	}
	next, _ := plan.Sent(noon)
	if got := plan.Ended(failed(next, codes.Unavailable), noon, 0); !got.End || ReasonName(got.Reason) != "may_have_run" {
		t.Errorf("Ended = %+v for an attempt that was sent, want the end", got)
	}
}

func TestPlanOfUnsentOnlyReplacesNoAttempt(t *testing.T) {
	for _, limited := range []bool{true, false} {
		for _, unsent := range []bool{true, false} {
			ctx, cancel := context.WithCancel(t.Context())
			if limited {
				ctx, cancel = context.WithDeadline(ctx, noon.AddDate(1000, 0, 0))
			}
			plan := newPlan(t, ctx, unsentOnly, WithAttemptTimeout(second), WithBackoff(Constant(0)))
			first, _ := plan.Sent(noon)
			if got := plan.Overdue(first, noon.Add(second), 0); got == limited {
				t.Errorf("with a deadline: %v, Overdue = %v, want %v", limited, got, !limited)
			}
			first.Duration, first.Err, first.Unsent = second, ErrAttemptTimeout, unsent
			if limited {
				first.Err = errUnavailable
			}
			got := plan.Ended(first, noon.Add(second), 0)
			if unsent && got != (Step{Connect: true}) || !unsent && (!got.End || ReasonName(got.Reason) != "may_have_run") {
				t.Errorf("with a deadline: %v, unsent: %v, Ended = %+v", limited, unsent, got)
			}
			cancel()
		}
	}
}

// gRPC's own retries would not ask whether a method may run twice, so such a method is not left to
// them.
func TestUnsentOnlyIsNotLeftToGRPC(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(unavailable()))
		client := echov1.NewEchoServiceClient(server.conn(t, grpc.WithDefaultServiceConfig(builtInPolicy),
			grpc.WithChainUnaryInterceptor(UnaryClientInterceptor(WithUnsentOnly(true)))))
		for range 2 { // the first on a fresh channel
			_, err := client.Echo(t.Context(), request())
			wantUntouched(t, err, codes.Unavailable, "db-down")
		}
		wantTimes(t, server, 0, 0)
	})
}

// A contextReplaced is a stream of an interceptor that adds values to the context.
type contextReplaced struct {
	grpc.ClientStream
}

func (contextReplaced) Context() context.Context { return context.Background() }

// TestUnsentOnlyKeepsGRPCOffStreamsBelowWrappers: an interceptor below that replaces a stream's Context hides
// gRPC's from the library. Once the request is sent, gRPC's own retries are off all the same.
func TestUnsentOnlyKeepsGRPCOffStreamsBelowWrappers(t *testing.T) {
	for name, opts := range map[string][]Option{
		"retried":        {WithUnsentOnly(true)},
		"passes through": {WithUnsentOnly(true), Disable()},
		"no buffer":      {WithUnsentOnly(true), WithBufferLimit(0)},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var ran atomic.Int64
				f := serve(t, script(), grpc.UnknownServiceHandler(func(_ any, s grpc.ServerStream) error {
					if err := s.RecvMsg(&emptypb.Empty{}); err != nil {
						return err
					}
					ran.Add(1)
					return status.Error(codes.Unavailable, "down")
				}))
				wrap := func(ctx context.Context, d *grpc.StreamDesc, cc *grpc.ClientConn, m string, open grpc.Streamer, o ...grpc.CallOption) (grpc.ClientStream, error) {
					s, err := open(ctx, d, cc, m, o...)
					return contextReplaced{s}, err
				}
				cc := f.conn(t, grpc.WithChainStreamInterceptor(StreamClientInterceptor(opts...), wrap), grpc.WithDefaultServiceConfig(
					`{"methodConfig": [{"name": [{}], "retryPolicy": {"maxAttempts": 4, "initialBackoff": "0.01s", "maxBackoff": "0.01s",
						"backoffMultiplier": 1, "retryableStatusCodes": ["UNAVAILABLE"]}}]}`))
				for call := range 2 { // on a fresh channel, and on one that has its config
					ran.Store(0)
					s, err := cc.NewStream(t.Context(), &grpc.StreamDesc{ServerStreams: true}, "/a.Service/Stream")
					if err != nil {
						t.Fatal(err)
					}
					if err := s.SendMsg(&emptypb.Empty{}); err != nil {
						t.Fatal(err)
					}
					err = s.RecvMsg(&emptypb.Empty{})
					if n := ran.Load(); n != 1 || status.Code(err) != codes.Unavailable {
						t.Errorf("call %d: the handler ran %d times, error %v, want once and UNAVAILABLE", call, n, err)
					}
				}
			})
		})
	}
}
