package balancer_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/balancer"
	"github.com/grpcretry/grpcretry/grpcretrytest"
	"github.com/grpcretry/grpcretry/internal/goroutines"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// This file has the real gRPC servers that the tests call, over bufconn and in virtual time.

// TestMain fails if a test outside a bubble leaves a goroutine behind; a bubble checks that itself.
func TestMain(m *testing.M) { goroutines.Main(m) }

// The policies that tests compare.
const (
	ours  = balancer.Name
	plain = "round_robin"
)

var errDown = status.Error(codes.Unavailable, "db-down")

// A cluster is a set of backends, each named by its address.
type cluster struct {
	dialing sync.Mutex

	mu      sync.Mutex
	running map[string]*backend                                                 // guarded by mu
	dials   map[string]func(context.Context) (net.Conn, error)                  // guarded by mu; for an address without a backend
	visits  map[string][]string                                                 // guarded by mu; the backends that saw a message, in order
	seen    map[string][]metadata.MD                                            // guarded by mu; the metadata of each of these
	script  func(ctx context.Context, backend, message string, visit int) error // guarded by mu; visits of one message count from 1
}

type backend struct {
	echov1.UnimplementedEchoServiceServer
	*cluster
	name   string
	server *grpcretrytest.Server
	health *health.Server
}

// bubble runs f in virtual time, with backends that succeed.
func bubble(t *testing.T, f func(t *testing.T, c *cluster), backends ...string) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		c := &cluster{
			running: map[string]*backend{}, dials: map[string]func(context.Context) (net.Conn, error){},
			visits: map[string][]string{}, seen: map[string][]metadata.MD{},
		}
		c.behave(func(context.Context, string, string, int) error { return nil })
		c.start(t, backends...)
		f(t, c)
	})
}

// withBoth runs f in virtual time with this policy and with round_robin, which must behave the same.
func withBoth(t *testing.T, f func(t *testing.T, c *cluster, policy string), backends ...string) {
	t.Helper()
	for _, policy := range []string{ours, plain} {
		t.Run(policy, func(t *testing.T) {
			bubble(t, func(t *testing.T, c *cluster) { f(t, c, policy) }, backends...)
		})
	}
}

func (c *cluster) start(t *testing.T, names ...string) {
	t.Helper()
	for _, name := range names {
		c.startWith(t, name)
	}
}

func (c *cluster) startWith(t *testing.T, name string, opts ...grpc.ServerOption) *backend {
	t.Helper()
	b := &backend{cluster: c, name: name, health: health.NewServer()}
	b.server = grpcretrytest.NewServer(t, func(s grpc.ServiceRegistrar) {
		echov1.RegisterEchoServiceServer(s, b)
		healthpb.RegisterHealthServer(s, b.health)
	}, opts...)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.running[name] = b
	return b
}

// stop stops backends, and returns when clients have noticed.
func (c *cluster) stop(names ...string) {
	for _, name := range names {
		c.mu.Lock()
		b := c.running[name]
		delete(c.running, name)
		c.mu.Unlock()
		b.server.Down()
	}
	synctest.Wait()
}

// dialAs sets how connections to an address are made that no backend has.
func (c *cluster) dialAs(address string, dial func(context.Context) (net.Conn, error)) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.dials[address] = dial
}

// hanging is a dial that takes forever.
func hanging(ctx context.Context) (net.Conn, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

func (c *cluster) dial(ctx context.Context, address string) (net.Conn, error) {
	c.mu.Lock()
	b, dial := c.running[address], c.dials[address]
	c.mu.Unlock()
	switch {
	case b != nil:
		// bufconn makes timers that fire immediately. In a bubble, goroutines that do so at the same time
		// crash the race detector of Go 1.26.
		c.dialing.Lock()
		defer c.dialing.Unlock()
		return b.server.DialContext(ctx)
	case dial != nil:
		return dial(ctx)
	default:
		return nil, fmt.Errorf("nothing listens on %s", address)
	}
}

// behave sets what backends do.
func (c *cluster) behave(script func(ctx context.Context, backend, message string, visit int) error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.script = script
}

// fail makes all calls of some backends fail.
func (c *cluster) fail(names ...string) {
	c.behave(func(_ context.Context, backend, _ string, _ int) error {
		if slices.Contains(names, backend) {
			return errDown
		}
		return nil
	})
}

// handle is what a backend does with a message.
func (b *backend) handle(ctx context.Context, message string) error {
	md, _ := metadata.FromIncomingContext(ctx)
	b.mu.Lock()
	b.visits[message] = append(b.visits[message], b.name)
	b.seen[message] = append(b.seen[message], md)
	visit, script := len(b.visits[message]), b.script
	b.mu.Unlock()
	return script(ctx, b.name, message, visit)
}

func (b *backend) Echo(ctx context.Context, req *echov1.EchoRequest) (*echov1.EchoResponse, error) {
	return &echov1.EchoResponse{Message: b.name}, b.handle(ctx, req.GetMessage())
}

func (b *backend) Put(ctx context.Context, req *echov1.EchoRequest) (*echov1.EchoResponse, error) {
	return b.Echo(ctx, req)
}

func (b *backend) Expand(req *echov1.EchoRequest, stream grpc.ServerStreamingServer[echov1.EchoResponse]) error {
	if err := b.handle(stream.Context(), req.GetMessage()); err != nil {
		return err
	}
	return stream.Send(&echov1.EchoResponse{Message: b.name})
}

func (b *backend) Collect(stream grpc.ClientStreamingServer[echov1.EchoRequest, echov1.EchoResponse]) error {
	req, err := stream.Recv()
	if err == nil {
		err = b.handle(stream.Context(), req.GetMessage())
	}
	if err != nil {
		return err
	}
	return stream.SendAndClose(&echov1.EchoResponse{Message: b.name})
}

func (b *backend) Chat(stream grpc.BidiStreamingServer[echov1.EchoRequest, echov1.EchoResponse]) error {
	req, err := stream.Recv()
	if err == nil {
		err = b.handle(stream.Context(), req.GetMessage())
	}
	if err != nil {
		return err
	}
	return stream.Send(&echov1.EchoResponse{Message: b.name})
}

// visited returns the backends that have seen a message, in order.
func (c *cluster) visited(message string) []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.visits[message])
}

// A client is a ClientConn with a resolver that the test controls.
type client struct {
	echov1.EchoServiceClient
	*grpc.ClientConn
	names *manual.Resolver
}

// dialPolicy dials addresses with a policy, and without retries. If addresses is nil, the resolver has no
// result yet.
func (c *cluster) dialPolicy(t *testing.T, policy string, addresses []string, opts ...grpc.DialOption) *client {
	t.Helper()
	config := grpc.WithDefaultServiceConfig(fmt.Sprintf(`{"loadBalancingConfig":[{%q:{}}]}`, policy))
	opts = append([]grpc.DialOption{config}, opts...)
	if addresses == nil {
		return c.dialEndpoints(t, nil, opts...)
	}
	return c.dialEndpoints(t, endpoints(addresses...), opts...)
}

// dialRetried dials addresses with this package's policy and with the interceptors.
func (c *cluster) dialRetried(t *testing.T, addresses []string, opts ...grpcretry.Option) *client {
	t.Helper()
	return c.dialPolicy(t, ours, addresses, grpcretry.DialOptions(append(fast(), opts...)...)...)
}

// fast are options for calls that make up to eight attempts without a wait.
func fast() []grpcretry.Option {
	return []grpcretry.Option{grpcretry.WithMaxAttempts(8), grpcretry.WithBackoff(grpcretry.Constant(0)),
		grpcretry.WithBudget(grpcretry.Unlimited)}
}

// dialEndpoints dials endpoints, and returns when those that can be connected are.
func (c *cluster) dialEndpoints(t *testing.T, all []resolver.Endpoint, opts ...grpc.DialOption) *client {
	t.Helper()
	names := manual.NewBuilderWithScheme("cluster")
	if all != nil {
		names.InitialState(resolver.State{Endpoints: all})
	}
	cc, err := grpc.NewClient("cluster:///echo", append([]grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithResolvers(names), grpc.WithContextDialer(c.dial),
	}, opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cc.Close() })
	cc.Connect()
	synctest.Wait()
	return &client{echov1.NewEchoServiceClient(cc), cc, names}
}

// resolve changes the addresses, and returns when all is settled.
func (c *client) resolve(addresses ...string) {
	c.set(addresses...)
	synctest.Wait()
}

// set changes the addresses.
func (c *client) set(addresses ...string) {
	c.names.UpdateState(resolver.State{Endpoints: endpoints(addresses...)})
}

// endpoints returns an endpoint for each address.
func endpoints(addresses ...string) []resolver.Endpoint {
	all := []resolver.Endpoint{}
	for _, a := range addresses {
		all = append(all, endpoint(a))
	}
	return all
}

// endpoint returns one endpoint with some addresses.
func endpoint(addresses ...string) (e resolver.Endpoint) {
	for _, a := range addresses {
		e.Addresses = append(e.Addresses, resolver.Address{Addr: a})
	}
	return e
}

// echo makes a call, and returns the backend that responded.
func (c *client) echo(ctx context.Context, message string, opts ...grpc.CallOption) (string, error) {
	reply, err := c.Echo(ctx, &echov1.EchoRequest{Message: message}, opts...)
	return reply.GetMessage(), err
}

// tally makes a number of calls, which must all succeed, and returns how many each backend got.
func (c *client) tally(t *testing.T, calls int) map[string]int {
	t.Helper()
	got := map[string]int{}
	for range calls {
		backend, err := c.echo(t.Context(), "tally")
		if err != nil {
			t.Fatalf("Echo = %v, want success", err)
		}
		got[backend]++
	}
	return got
}

// wantRotation fails the test unless calls rotate over these backends, in any order, but always the same.
func (c *client) wantRotation(t *testing.T, backends ...string) {
	t.Helper()
	var got []string
	for range 3 * len(backends) {
		backend, err := c.echo(t.Context(), "rotation")
		if err != nil {
			t.Fatalf("Echo = %v, want success", err)
		}
		got = append(got, backend)
	}
	first := slices.Sorted(slices.Values(got[:len(backends)]))
	if !slices.Equal(first, slices.Sorted(slices.Values(backends))) || !slices.Equal(got, slices.Repeat(got[:len(backends)], 3)) {
		t.Fatalf("calls went to %v, want a rotation over %v", got, backends)
	}
}

// wantDistinct fails the test unless a message has visited n backends, each once.
func (c *cluster) wantDistinct(t *testing.T, message string, n int) {
	t.Helper()
	got := c.visited(message)
	if len(got) != n || !areDistinct(got...) {
		t.Errorf("%s visited %v, want %d backends, each once", message, got, n)
	}
}

func areDistinct(names ...string) bool {
	return len(slices.Compact(slices.Sorted(slices.Values(names)))) == len(names)
}

// wantGiveUp fails the test unless the call ended with an *Error after a number of attempts.
func wantGiveUp(t *testing.T, err error, attempts int) *grpcretry.Error {
	t.Helper()
	var failed *grpcretry.Error
	if !errors.As(err, &failed) || len(failed.Attempts) != attempts {
		t.Fatalf("err = %v, want an *Error after %d attempts", err, attempts)
	}
	return failed
}

const second = time.Second
