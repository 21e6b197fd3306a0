package grpcretry

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry/internal/reasons"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// The tests here are of WithUnsentOnly. cmd/soak proves it over real connections.

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
					e := wantStop(t, err, status.Code(tt.script[0].err), ErrMayHaveRun, 1)
					if !errors.Is(err, ErrNotRetryable) || reasons.Of(e.Reason).Word != "may_have_run" {
						t.Errorf("the reason %v is called %s, want a kind of ErrNotRetryable, may_have_run", e.Reason, reasons.Of(e.Reason).Word)
					}
					wantMessage(t, err, tt.err)
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

const onceMore = "recv hello; send done" // a script of a server that succeeds

// A call that reached no server waits for its connection, counts for nothing and is charged nothing.
func TestARestartIsSurvivedByWhatMustNotRunTwice(t *testing.T) {
	everyKind(t, func(t *testing.T, kind callKind) {
		server := serveScripts(t, onceMore)
		budget := &tally{}
		link, cc := server.linked(t, DialOptions(unsentOnly, WithBackoff(Constant(second)), WithBudget(budget))...)
		link.cut()
		synctest.Wait()
		time.AfterFunc(2*second, link.mend) // gRPC dials at 0, 1 and 2.6 s
		if err := kind.call(t.Context(), cc, anyMethod); err != nil {
			t.Error(err)
		}
		wantTimes(t, server, 3600*time.Millisecond)
		if want := (counts{told: [5]int{Succeeded: 1}, highest: 1}); budget.counts != want {
			t.Errorf("budget is %+v, want %+v", budget.counts, want)
		}
	})
}

// As soon as there was a stream, the method may have run: with a connection that is lost later, and
// with one on which the server fails.
func TestWhatHadAStreamIsNotRetried(t *testing.T) {
	for name, opts := range map[string][]Option{"": nil, ", without patience": {WithPatience(0)}} {
		t.Run("the connection is lost"+name, func(t *testing.T) {
			everyKind(t, func(t *testing.T, kind callKind) {
				server := serveScripts(t, "recv hello; hang", onceMore)
				link, cc := server.linked(t, DialOptions(append(opts, unsentOnly)...)...)
				time.AfterFunc(second, func() { link.cut(); link.mend() })
				if err := kind.call(t.Context(), cc, anyMethod); status.Code(err) != codes.Unavailable || !errors.Is(err, ErrMayHaveRun) {
					t.Errorf("err = %v, want UNAVAILABLE and ErrMayHaveRun", err)
				}
				time.Sleep(time.Minute)
				wantTimes(t, server, 0)
			})
		})
	}
	everyKind(t, func(t *testing.T, kind callKind) {
		server := serveScripts(t, "recv hello; fail UNAVAILABLE", onceMore)
		err := kind.call(t.Context(), server.conn(t, DialOptions(unsentOnly)...), anyMethod)
		wantStop(t, err, codes.Unavailable, ErrMayHaveRun, 1)
		wantMessage(t, err, "failed in attempt 1")
		wantTimes(t, server, 0)
	})
}

// An interceptor below that removes an option, here the one by which gRPC reports the peer, does not hide that there was a
// stream. Nor may it find room behind the options, which another one could fill at the same time.
func TestAPeerThatIsDroppedBelowIsKnown(t *testing.T) {
	withoutPeer := func(opts []grpc.CallOption) []grpc.CallOption {
		if len(opts) != cap(opts) {
			t.Errorf("there is room for %d options behind the %d", cap(opts)-len(opts), len(opts))
		}
		return slices.DeleteFunc(slices.Clone(opts), func(o grpc.CallOption) bool { return isA[grpc.PeerCallOption](o) })
	}
	everyKind(t, func(t *testing.T, kind callKind) {
		server := serveScripts(t, "recv hello; fail UNAVAILABLE", onceMore)
		cc := server.conn(t, append(DialOptions(unsentOnly),
			grpc.WithChainUnaryInterceptor(func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn,
				invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
				return invoker(ctx, method, req, reply, cc, withoutPeer(opts)...)
			}),
			grpc.WithChainStreamInterceptor(func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string,
				streamer grpc.Streamer, opts ...grpc.CallOption) (grpc.ClientStream, error) {
				return streamer(ctx, desc, cc, method, withoutPeer(opts)...)
			}))...)
		wantStop(t, kind.call(t.Context(), cc, anyMethod), codes.Unavailable, ErrMayHaveRun, 1)
		wantTimes(t, server, 0)
	})
}

func isA[T any](v any) bool {
	_, is := v.(T)
	return is
}

// reasonOf returns the Reason of an Error, nil for other errors.
func reasonOf(err error) error {
	if e := (*Error)(nil); errors.As(err, &e) {
		return e.Reason
	}
	return nil
}

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

func (s *frameServer) conn(t *testing.T, opts ...Option) *grpc.ClientConn {
	t.Helper()
	return s.dial(t, DialOptions(opts...)...)
}

func (s *frameServer) dial(t *testing.T, opts ...grpc.DialOption) *grpc.ClientConn {
	t.Helper()
	cc, err := grpc.NewClient("passthrough:///frames", append(opts, redials,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) {
			ours, theirs := net.Pipe()
			go s.serve(theirs)
			return ours, nil
		}))...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cc.Close() })
	return cc
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

// As gRPC's own retry of it would be, that of a refused stream is no matter of the policy.
func TestARefusedStreamIsRepeatedByEveryPolicy(t *testing.T) {
	never := WithClassifier(func(context.Context, Attempt) Classification { return Stop })
	for name, opts := range map[string][]Option{
		"other codes":           {WithCodes(codes.Aborted)},
		"a classifier":          {never},
		"no patience":           {WithPatience(0)},
		"an empty budget":       {WithBudget(stingy{})},
		"no patience, no token": {WithPatience(0), WithBudget(stingy{})},
		"two attempts":          {WithMaxAttempts(2)},
		"no time":               {WithMaxElapsed(second)},
		"hedged":                {WithMethod("/s/", WithPolicy(Policy{MaxAttempts: 2, Hedging: &Hedging{Delay: HedgeAfter(time.Hour)}}))},
	} {
		t.Run(name, func(t *testing.T) {
			everyKind(t, func(t *testing.T, kind callKind) {
				if kind.desc == nil {
					return // gRPC sends it again by itself
				}
				server, start := &frameServer{script: []frameStep{reset(refusedStream), reset(cancelStream)}}, time.Now()
				err := kind.call(t.Context(), server.conn(t, append(opts, WithBackoff(Constant(2*second)))...), anyMethod)
				if took := time.Since(start); status.Code(err) != codes.Canceled || server.seen() != 2 || took != 0 {
					t.Errorf("the server saw %d streams, and the call returned %v after %v; want 2, and the end of the second at once",
						server.seen(), err, took)
				}
			})
		})
	}
}

// The refusal is a failure that is retried after no backoff, for everybody who watches.
func TestARefusedStreamIsReportedAsRetried(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server, events := &frameServer{script: []frameStep{reset(refusedStream), reset(cancelStream)}}, &eventRecorder{start: time.Now()}
		_ = callKind{"", bidiStream}.call(t.Context(), server.conn(t, WithObserver(events.observe)), anyMethod)
		if want := "0s decision #1 retry after 0s by backoff"; !slices.Contains(events.lines, want) {
			t.Errorf("events are\n%s\nwant %q among them", strings.Join(events.lines, "\n"), want)
		}
	})
}

// A server cannot pretend to have refused a stream: what it says comes with headers or a trailer.
func TestAServersWordsAreNoRefusal(t *testing.T) {
	for name, prepare := range map[string]func(grpc.ServerStream){
		"at once":       func(grpc.ServerStream) {},
		"after headers": func(s grpc.ServerStream) { s.SendHeader(metadata.Pairs("k", "v")) },
	} {
		t.Run(name, func(t *testing.T) {
			everyKind(t, func(t *testing.T, kind callKind) {
				server := serveStreams(t, func(_ int, stream grpc.ServerStream) error {
					prepare(stream)
					return status.Error(codes.Unavailable, "stream terminated by RST_STREAM with error code: REFUSED_STREAM")
				})
				err := kind.call(t.Context(), server.conn(t, DialOptions(steady, unsentOnly)...), anyMethod)
				if n := len(server.attempts()); !errors.Is(err, ErrMayHaveRun) || n != 1 {
					t.Errorf("%d attempts, and %v; want one, and %v", n, err, ErrMayHaveRun)
				}
			})
		})
	}
}

// Another call's failure may be recorded with a later time than that of this call's decision. There is no wait in which it could
// have taught the call anything.
func TestARefusedStreamIsRepeatedAtOnceBesideOthers(t *testing.T) {
	for name, patience := range map[string]time.Duration{"patience left": time.Hour, "patience over": 15 * second} {
		t.Run(name, func(t *testing.T) {
			r := retrierOf(t, WithPatience(patience), steady)
			target, policy := r.targets.Named("x"), r.settings.current().of("").policy
			start := instantOf(noon)
			for i := range 5 {
				target.fail(start.Add(time.Duration(i)*5*second), patience)
			}
			now := start.Add(20 * second)
			var p plan
			p.begin(policy, Unlimited, nil, target, now, 0)
			p.send(now)
			target.fail(now+1, patience) // of another call
			f := failureOf(1, codes.Unavailable)
			f.Attempt.Unsent, f.NotRun, f.Refused = true, true, true
			policy.examine(t.Context(), &f)
			if v := p.failed(&f, now, 0.5); v.do != doSend {
				t.Errorf("verdict %+v, want an attempt at once", v)
			}
		})
	}
}

// Nor is it a matter of patience, although the refusal is a failure of the target.
func TestARefusedStreamIsRepeatedWithoutPatience(t *testing.T) {
	everyKind(t, func(t *testing.T, kind callKind) {
		if kind.desc == nil {
			return // gRPC sends it again by itself
		}
		calm := reset(enhanceYourCalm)
		server := &frameServer{script: []frameStep{calm, calm, reset(refusedStream), reset(cancelStream)}}
		cc := server.conn(t, WithBackoff(Constant(second)), WithPatience(3*second), WithMaxAttempts(2))
		if err := kind.call(t.Context(), cc, anyMethod); !errors.Is(err, ErrAttemptsExhausted) {
			t.Errorf("the first call returned %v, want %v", err, ErrAttemptsExhausted)
		}
		time.Sleep(2*second + second/2) // the target has been failing for longer than the patience, and not been forgotten
		if err := kind.call(t.Context(), cc, anyMethod); status.Code(err) != codes.Canceled || server.seen() != 4 {
			t.Errorf("the server saw %d streams, and the second call returned %v; want 4, and the end of the last", server.seen(), err)
		}
	})
}

// A server may refuse to process a request. gRPC itself repeats a unary call, once; whether the second was refused as
// well is not known to an interceptor. Streams are repeated by the library, which knows: if the first attempt is refused, it does not
// count, and the next is sent at once. A method may run after any of them.
func TestARefusedRequestIsRepeated(t *testing.T) {
	for _, tt := range []struct {
		name              string
		script            []frameStep
		unary, streams    int // that the server sees
		unaryIs, streamIs codes.Code
	}{
		{"refused", []frameStep{reset(refusedStream)}, 2, 5, codes.Unavailable, codes.Unavailable},
		{"refused, then cancelled", []frameStep{reset(refusedStream), reset(cancelStream)}, 2, 2, codes.Canceled, codes.Canceled},
		{"GOAWAY, then refused", []frameStep{goAway, reset(refusedStream)}, 2, 5, codes.Unavailable, codes.Unavailable},
		{"GOAWAY, then the connection is lost", []frameStep{goAway, hangUp}, 2, 2, codes.Unavailable, codes.Unavailable},
		{"the connection is lost", []frameStep{hangUp}, 1, 1, codes.Unavailable, codes.Unavailable},
		{"ENHANCE_YOUR_CALM", []frameStep{reset(enhanceYourCalm)}, 1, 1, codes.ResourceExhausted, codes.ResourceExhausted},
	} {
		t.Run(tt.name, func(t *testing.T) {
			everyKind(t, func(t *testing.T, kind callKind) {
				server := &frameServer{script: tt.script}
				retry := WithClassifier(func(context.Context, Attempt) Classification { return Retry })
				budget := &tally{}
				err := kind.call(t.Context(), server.conn(t, unsentOnly, retry, WithBudget(budget)), anyMethod)
				seen, code, reason := tt.streams, tt.streamIs, ErrMayHaveRun
				switch {
				case kind.desc == nil && len(tt.script) == 2 && status.Convert(err).Message() == status.Convert(errConnLost).Message():
					return // gRPC's second stream had ended before the request was written, see internal/judges
				case kind.desc == nil:
					seen, code = tt.unary, tt.unaryIs
				case seen == 5:
					reason = ErrAttemptsExhausted
				}
				if status.Code(err) != code || !errors.Is(err, reason) {
					t.Errorf("err = %v, want %v, and the reason %v", err, code, reason)
				}
				if got := server.seen(); got != seen {
					t.Errorf("the server saw %d streams, want %d", got, seen)
				}
				if paid := max(0, seen-2); budget.withdrawn != paid {
					t.Errorf("%d retries were paid for, want %d: the first attempt reached no server, and the second is free",
						budget.withdrawn, paid)
				}
			})
		})
	}
}

// An attempt in flight is not replaced. Without a deadline it is cut, and then judged.
func TestATimeoutReplacesNoAttemptThatMayRun(t *testing.T) {
	slow := "recv hello; wait 5s; send done"
	t.Run("with a deadline it goes on", func(t *testing.T) {
		everyKind(t, func(t *testing.T, kind callKind) {
			server := serveScripts(t, slow)
			budget := &tally{}
			ctx, cancel := context.WithTimeout(t.Context(), 20*second)
			defer cancel()
			cc := server.conn(t, DialOptions(unsentOnly, WithAttemptTimeout(2*second), WithBudget(budget))...)
			if err := kind.call(ctx, cc, anyMethod); err != nil {
				t.Error(err)
			}
			wantTimes(t, server, 0)
			if got := time.Since(server.start); got != 5*second || budget.counts != (counts{told: [5]int{Succeeded: 1}, highest: 1}) {
				t.Errorf("the call took %v and the budget is %+v, want 5s and one success", got, budget.counts)
			}
		})
	})
	t.Run("without a deadline it is cut", func(t *testing.T) {
		everyKind(t, func(t *testing.T, kind callKind) {
			server := serveScripts(t, slow)
			recorder := &eventRecorder{start: server.start}
			cc := server.conn(t, DialOptions(unsentOnly, WithAttemptTimeout(2*second), WithObserver(recorder.observe))...)
			err := kind.call(t.Context(), cc, anyMethod)
			if !errors.Is(err, ErrAttemptTimeout) || !errors.Is(err, ErrMayHaveRun) || !errors.Is(recorder.last.Reason, ErrMayHaveRun) {
				t.Errorf("err = %v, the observer's reason %v, want the timeout, and ErrMayHaveRun twice", err, recorder.last.Reason)
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

// gRPC's own retries would not ask whether a method may run twice, so such a method is not left to
// them.
func TestUnsentOnlyIsNotLeftToGRPC(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(unavailable()))
		client := echov1.NewEchoServiceClient(server.conn(t, grpc.WithDefaultServiceConfig(builtInPolicy),
			grpc.WithChainUnaryInterceptor(UnaryClientInterceptor(WithUnsentOnly(true)))))
		for range 2 { // the first on a fresh channel
			_, err := client.Echo(t.Context(), request())
			wantStop(t, err, codes.Unavailable, ErrMayHaveRun, 1)
		}
		wantTimes(t, server, 0, 0)
	})
}

// A method whose retryPolicy comes with the connection is gRPC's from the first attempt on that could reach a server.
func TestACallIsLeftToGRPCAfterAnUnsentAttempt(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(unavailable()))
		found := manual.NewBuilderWithScheme("late")
		found.BuildCallback = func(_ resolver.Target, cc resolver.ClientConn, _ resolver.BuildOptions) {
			cc.ReportError(errors.New("no such host"))
			time.AfterFunc(second, func() {
				_ = cc.UpdateState(resolver.State{Addresses: []resolver.Address{{Addr: "echo"}}, ServiceConfig: cc.ParseServiceConfig(builtInPolicy)})
			})
		}
		cc := server.connTo(t, "late:///echo", grpc.WithResolvers(found), grpc.WithChainUnaryInterceptor(
			UnaryClientInterceptor(unmoved, WithBackoff(Constant(second)), WithMaxAttempts(5), WithBudget(Unlimited))))
		err := echo(t.Context(), echov1.NewEchoServiceClient(cc))
		if !strings.HasSuffix(err.Error(), "db-down") { // newer versions of grpc-go say first how many attempts they have made
			t.Errorf("err = %v, want the server's", err)
		}
		wantUntouched(t, err, codes.Unavailable, status.Convert(err).Message())
		if got := len(server.attempts()); got != 3 {
			t.Errorf("%d attempts, want the 3 of gRPC's policy", got)
		}
	})
}

// A later refusal counts, and costs a token: servers shed load like that. The first is no step of the backoff.
func TestALaterRefusalCounts(t *testing.T) {
	calm, refused, cancelled := reset(enhanceYourCalm), reset(refusedStream), reset(cancelStream)
	for _, tt := range []struct {
		name   string
		script []frameStep
		paid   int
		want   []time.Duration // when the server sees a stream
		reason error
	}{
		{"after a failure", []frameStep{calm, refused}, 1, []time.Duration{0, second}, ErrAttemptsExhausted},
		{"always", []frameStep{refused}, 1, []time.Duration{0, 0, second}, ErrAttemptsExhausted},
		{"the first", []frameStep{refused, calm, cancelled}, 1, []time.Duration{0, 0, second}, ErrNotRetryable},
	} {
		t.Run(tt.name, func(t *testing.T) {
			everyKind(t, func(t *testing.T, kind callKind) {
				if kind.desc == nil {
					return // an interceptor does not learn of it
				}
				var times []time.Duration
				start, budget := time.Now(), &tally{}
				server := &frameServer{script: tt.script}
				backoff := Exponential{Base: second, Max: time.Minute, Multiplier: 2, Jitter: NoJitter}
				options := DialOptions(WithBackoff(backoff), unmoved, WithMaxAttempts(2), WithBudget(budget))
				cc := server.dial(t, append(options, belowStream(func(ctx context.Context, next streamOpener) (grpc.ClientStream, error) {
					times = append(times, time.Since(start))
					return next(ctx)
				}))...)
				err := kind.call(t.Context(), cc, anyMethod)
				if !slices.Equal(times, tt.want) || !errors.Is(err, tt.reason) || budget.withdrawn != tt.paid {
					t.Errorf("streams at %v, %d paid for, and %v; want %v, %d and %v", times, budget.withdrawn, err, tt.want, tt.paid, tt.reason)
				}
			})
		})
	}
}
