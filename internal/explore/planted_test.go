package explore

import (
	"context"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/grpcretrytest"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// An exploration finds faults that are planted below the Retrier's interceptors, or in what a policy consists of.
func TestExploreFindsPlantedFaults(t *testing.T) {
	below := func(unary grpc.UnaryClientInterceptor, stream grpc.StreamClientInterceptor) []grpc.DialOption {
		var opts []grpc.DialOption
		if unary != nil {
			opts = append(opts, grpc.WithChainUnaryInterceptor(unary))
		}
		if stream != nil {
			opts = append(opts, grpc.WithChainStreamInterceptor(stream))
		}
		return opts
	}
	wrapped := func(wrap func(grpc.ClientStream) grpc.ClientStream) []grpc.DialOption {
		return below(nil, func(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, streamer grpc.Streamer,
			opts ...grpc.CallOption) (grpc.ClientStream, error) {
			stream, err := streamer(ctx, desc, cc, method, opts...)
			if err != nil {
				return nil, err
			}
			return wrap(stream), nil
		})
	}
	// The judge does not know what the channel's call options say.
	with := func(o grpc.CallOption) []grpc.DialOption { return []grpc.DialOption{grpc.WithDefaultCallOptions(o)} }
	impatient := with(grpcretry.WithPatience(0))
	seeds := map[string]uint64{"a retry can learn nothing": 34, "waits are not spread": 40} // of a program in which this is the only fault
	for _, tt := range []struct {
		name   string
		dial   []grpc.DialOption
		policy []grpcretry.Option
		report string // a part of it
	}{
		{"an attempt is sent twice",
			below(func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker,
				opts ...grpc.CallOption) error {
				if err := invoker(ctx, method, req, reply, cc, opts...); err == nil {
					return nil
				}
				return invoker(ctx, method, req, reply, cc, opts...)
			}, nil), nil, "reached the server twice"},
		{"an attempt is late",
			below(func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker,
				opts ...grpc.CallOption) error {
				if a, ok := grpcretry.AttemptFromContext(ctx); ok && a.Number > 1 {
					<-time.After(time.Millisecond)
				}
				return invoker(ctx, method, req, reply, cc, opts...)
			}, nil), nil, "was answered with a pushback"},
		{"a failure is hidden",
			below(func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker,
				opts ...grpc.CallOption) error {
				invoker(ctx, method, req, reply, cc, opts...)
				return nil
			}, nil), nil, `reply 1 is "", which is no reply to this call`},
		{"the trailer is lost",
			below(func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker,
				opts ...grpc.CallOption) error {
				var kept []grpc.CallOption
				for _, o := range opts {
					if _, ok := o.(grpc.TrailerCallOption); !ok {
						kept = append(kept, o)
					}
				}
				return invoker(ctx, method, req, reply, cc, kept...)
			}, nil), nil, `was answered with`},
		{"a message is doubled", wrapped(func(s grpc.ClientStream) grpc.ClientStream {
			return &faulty{ClientStream: s, doubles: true}
		}), nil, "the server received"},
		{"a message is lost", wrapped(func(s grpc.ClientStream) grpc.ClientStream {
			return &faulty{ClientStream: s, loses: true}
		}), nil, "the server received"},
		{"a reply is lost", wrapped(func(s grpc.ClientStream) grpc.ClientStream {
			return &faulty{ClientStream: s, losesReply: true}
		}), nil, "reply"},
		{"an attempt is not the Retrier's",
			below(func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker,
				opts ...grpc.CallOption) error {
				ctx = metadata.AppendToOutgoingContext(ctx, "grpc-previous-rpc-attempts", "7")
				return invoker(ctx, method, req, reply, cc, opts...)
			}, nil), nil, "which never started"},
		{"a call hangs", below(func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker,
			opts ...grpc.CallOption) error {
			err := invoker(ctx, method, req, reply, cc, opts...)
			if status.Code(err) == codes.ResourceExhausted {
				<-time.After(10 * time.Minute)
			}
			return err
		}, nil), nil, "after its deadline or cancellation"},
		{"a call never returns",
			below(func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker,
				opts ...grpc.CallOption) error {
				err := invoker(ctx, method, req, reply, cc, opts...)
				if status.Code(err) == codes.ResourceExhausted {
					select {}
				}
				return err
			}, nil), nil, "has not ended an hour after the start"},
		{"a call panics", below(func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker,
			opts ...grpc.CallOption) error {
			err := invoker(ctx, method, req, reply, cc, opts...)
			if status.Code(err) == codes.ResourceExhausted {
				panic("planted")
			}
			return err
		}, nil), nil, "panic: planted"},
		{"a goroutine is left",
			below(func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker,
				opts ...grpc.CallOption) error {
				go func() { select {} }()
				return invoker(ctx, method, req, reply, cc, opts...)
			}, nil), nil, "goroutines are left"},
		{"the end of a stream is lost", wrapped(func(s grpc.ClientStream) grpc.ClientStream {
			return neverClosed{s}
		}), nil, "because it waited for messages"},
		{"a retry can learn nothing", impatient, nil, "attempt 2 could learn nothing"},
		{"waits are not spread", impatient, nil, "with 0 repetitions, want an attempt after"},
		{"a call does not wait for a token", impatient, nil, "after its last attempt, because of budget"},
		{"a wait outlasts patience", with(grpcretry.WithPatience(time.Hour)),
			[]grpcretry.Option{grpcretry.WithPatience(time.Second), grpcretry.WithBudget(grpcretry.Unlimited)}, "and Patience at"},
		{"the budget keeps what is returned", nil, []grpcretry.Option{grpcretry.WithBudget(miserly{mustRatioBudget()})},
			"after one Withdraw and its return"},
		{"the budget refuses what it has", nil, []grpcretry.Option{grpcretry.WithBudget(refusing{mustRatioBudget()})}, "and refuses a retry"},
		{"the backoff draws numbers of its own", nil, []grpcretry.Option{grpcretry.WithBackoff(moody{})}, "the wait before attempt"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			e := Exploration{Service: &echov1.EchoService_ServiceDesc, DialOptions: tt.dial, Seed: seeds[tt.name],
				Policy: func() []grpcretry.Option { return tt.policy }}
			report := e.explore(t)
			t.Log(report)
			if report == "" || !strings.Contains(report, tt.report) {
				t.Errorf("the report is %q, want one with %q", report, tt.report)
			}
		})
	}
}

// moody is no pure function, as a Backoff is to be.
type moody struct{}

func (moody) Delay(int, time.Duration, float64) time.Duration {
	return time.Duration(rand.IntN(1000)+1) * time.Millisecond
}

// neverClosed does not tell the server that there are no more messages.
type neverClosed struct{ grpc.ClientStream }

func (neverClosed) CloseSend() error { return nil }

type miserly struct{ grpcretry.Budget }

func (b miserly) Deposit(o grpcretry.Outcome) {
	if o.Result != grpcretry.Unsent {
		b.Budget.Deposit(o)
	}
}

type refusing struct{ grpcretry.Budget }

func (refusing) Withdraw(time.Time) bool { return false }

func mustRatioBudget() grpcretry.Budget {
	b, err := grpcretry.NewRatioBudget(grpcretry.RatioBudget{})
	if err != nil {
		panic(err)
	}
	return b
}

// Calls of other tests are none of an exploration's.
func TestExploreBesideOtherCalls(t *testing.T) {
	server := grpcretrytest.NewServer(t, func(s grpc.ServiceRegistrar) {
		echov1.RegisterEchoServiceServer(s, echov1.UnimplementedEchoServiceServer{})
	})
	server.On("/", grpcretrytest.Hang())
	started := make(chan struct{})
	client := echov1.NewEchoServiceClient(server.Dial(grpcretry.WithObserver(func(_ context.Context, e grpcretry.Event) {
		if e.Kind == grpcretry.AttemptStart {
			close(started)
		}
	})))
	ctx, cancel := context.WithCancel(t.Context())
	var other sync.WaitGroup
	other.Go(func() { client.Echo(ctx, &echov1.EchoRequest{}) })
	<-started
	if report := (Exploration{Service: &echov1.EchoService_ServiceDesc, Programs: 5}).explore(t); report != "" {
		t.Error(report)
	}
	cancel()
	other.Wait()
}

// What is seen in one run only is reported as well.
func TestExploreReportsWhatHappensOnce(t *testing.T) {
	var panicked sync.Once
	e := Exploration{Service: &echov1.EchoService_ServiceDesc, DialOptions: []grpc.DialOption{grpc.WithChainUnaryInterceptor(
		func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
			panicked.Do(func() { panic("planted") })
			return invoker(ctx, method, req, reply, cc, opts...)
		})}}
	if report := e.explore(t); !strings.Contains(report, "panic: planted") || !strings.Contains(report, "Exploration.Seed = ") {
		t.Errorf("the report is %q, want one with the panic", report)
	}
}

func TestInvalidExplorations(t *testing.T) {
	for want, e := range map[string]Exploration{
		"Exploration.Service has no methods":          {},
		"Exploration.Programs is -1, want at least 0": {Service: &echov1.EchoService_ServiceDesc, Programs: -1},
	} {
		if got := e.explore(t); got != want {
			t.Errorf("the report is %q, want %q", got, want)
		}
	}
}

// A faulty stream handles messages wrongly, the second of them.
type faulty struct {
	grpc.ClientStream
	mu                         sync.Mutex
	doubles, loses, losesReply bool
	sent, received             int
}

func (f *faulty) SendMsg(m any) error {
	f.mu.Lock()
	f.sent++
	second := f.sent == 2
	f.mu.Unlock()
	if second && f.loses {
		return nil
	}
	if second && f.doubles {
		if err := f.ClientStream.SendMsg(m); err != nil {
			return err
		}
	}
	return f.ClientStream.SendMsg(m)
}

func (f *faulty) RecvMsg(m any) error {
	f.mu.Lock()
	f.received++
	second := f.received == 2
	f.mu.Unlock()
	if second && f.losesReply {
		if err := f.ClientStream.RecvMsg(m); err != nil {
			return err
		}
	}
	return f.ClientStream.RecvMsg(m)
}
