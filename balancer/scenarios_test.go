package balancer_test

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/attributes"
	grpcbalancer "google.golang.org/grpc/balancer"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
	healthpb "google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"
	"google.golang.org/grpc/serviceconfig"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry/balancer"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// The tests in this file are the scenarios of grpc-go's tests of round_robin and of the parts that it shares
// with this policy, as of grpc-go 1.85, written anew. Each runs with both policies.
//
//	in grpc-go                                                   here
//	test/roundrobin_test.go
//	  TestRoundRobin_Basic                                       TestRotation
//	  TestRoundRobin_AddressesRemoved                            TestAddressesRemoved
//	  TestRoundRobin_NewAddressWhileBlocking                     TestNewAddressWhileACallWaits
//	  TestRoundRobin_OneServerDown                               TestOneServerDown
//	  TestRoundRobin_AllServersDown                              TestAllServersDown
//	  TestRoundRobin_UpdateAddressAttributes                     TestAddressAttributesChange
//	internal/testutils/roundrobin, for its duplicate addresses   TestDuplicateAddresses
//	balancer/endpointsharding
//	  TestEndpointShardingBasic                                  TestErrorOfTheResolver
//	  TestEndpointShardingReconnectDisabled, with reconnects on  TestSecondAddressOfAnEndpoint
//	  TestEndpointShardingExitIdle, with reconnects on           TestReconnect
//	  TestRotateEndpoints                                        TestClientsStartWithDifferentBackends
//	test/balancer_switching_test.go
//	  TestBalancerSwitch_Basic                                   TestSwitchOfPolicies
//	  TestBalancerSwitch_Graceful                                TestGracefulSwitch
//	test/creds_test.go
//	  TestFailFastRPCErrorOnBadCertificates,
//	  TestWaitForReadyRPCErrorOnBadCertificates                  TestBadCertificates
//	test/healthcheck_test.go
//	  TestHealthCheckWatchStateChange                            TestHealthChecks
//	  TestHealthCheckHealthServerNotRegistered                   TestHealthChecksWithoutAHealthServer
//	internal/idle/idle_e2e_test.go
//	  TestChannelIdleness_Enabled_NoActivity, _ExitIdleOnRPC,
//	  _Connect, _OngoingCall                                     TestIdleness
//
// The rest of these files is about other policies, or about parts of gRPC that no policy can change.

func TestRotation(t *testing.T) {
	names := []string{"a", "b", "c", "d", "e"}
	withBoth(t, func(t *testing.T, c *cluster, policy string) {
		cc := c.dialPolicy(t, policy, nil)
		cc.resolveNothingYet(t)
		cc.resolve(names...)
		cc.wantRotation(t, names...)
	}, names...)
}

// resolveNothingYet makes a call before the resolver has a result, which must wait.
func (c *client) resolveNothingYet(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), second)
	defer cancel()
	if _, err := c.echo(ctx, "early"); status.Code(err) != codes.DeadlineExceeded {
		t.Fatalf("Echo = %v before there are addresses, want DEADLINE_EXCEEDED", err)
	}
}

func TestAddressesRemoved(t *testing.T) {
	withBoth(t, func(t *testing.T, c *cluster, policy string) {
		cc := c.dialPolicy(t, policy, []string{"a", "b"})
		cc.wantRotation(t, "a", "b")
		cc.resolve()
		if got := cc.GetState(); got != connectivity.TransientFailure {
			t.Errorf("state %v, want TRANSIENT_FAILURE", got)
		}
		if _, err := cc.echo(t.Context(), "call"); !strings.Contains(status.Convert(err).Message(), "no children to pick from") {
			t.Errorf("Echo = %v, want endpointsharding's error", err)
		}
	}, "a", "b")
}

func TestNewAddressWhileACallWaits(t *testing.T) {
	withBoth(t, func(t *testing.T, c *cluster, policy string) {
		cc := c.dialPolicy(t, policy, []string{"a", "b"})
		cc.resolve()
		time.AfterFunc(5*second, func() { cc.resolve("b") })
		start := time.Now()
		backend, err := cc.echo(t.Context(), "call", grpc.WaitForReady(true))
		if took := time.Since(start); err != nil || backend != "b" || took != 5*second {
			t.Errorf("Echo = %q, %v after %v, want b after 5s", backend, err, took)
		}
	}, "a", "b")
}

func TestOneServerDown(t *testing.T) {
	withBoth(t, func(t *testing.T, c *cluster, policy string) {
		cc := c.dialPolicy(t, policy, []string{"a", "b", "c"})
		cc.wantRotation(t, "a", "b", "c")
		c.stop("c")
		cc.wantRotation(t, "a", "b")
	}, "a", "b", "c")
}

func TestAllServersDown(t *testing.T) {
	withBoth(t, func(t *testing.T, c *cluster, policy string) {
		cc := c.dialPolicy(t, policy, []string{"a", "b"})
		c.stop("a", "b")
		if got := cc.GetState(); got != connectivity.TransientFailure {
			t.Errorf("state %v, want TRANSIENT_FAILURE", got)
		}
		if _, err := cc.echo(t.Context(), "call"); status.Code(err) != codes.Unavailable {
			t.Errorf("Echo = %v, want UNAVAILABLE", err)
		}
	}, "a", "b")
}

type attributeKey struct{}

// watchedCredentials report the attribute of the address of each connection.
type watchedCredentials struct {
	credentials.TransportCredentials
	seen *sync.Map // of values
}

func (w watchedCredentials) ClientHandshake(ctx context.Context, authority string, conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	w.seen.Store(credentials.ClientHandshakeInfoFromContext(ctx).Attributes.Value(attributeKey{}), true)
	return w.TransportCredentials.ClientHandshake(ctx, authority, conn)
}

func (w watchedCredentials) Clone() credentials.TransportCredentials { return w }

func TestAddressAttributesChange(t *testing.T) {
	withBoth(t, func(t *testing.T, c *cluster, policy string) {
		var seen sync.Map
		cc := c.dialPolicy(t, policy, []string{"a"}, grpc.WithTransportCredentials(watchedCredentials{insecure.NewCredentials(), &seen}))
		if _, early := seen.Load("version 2"); early {
			t.Fatal("the connection has an attribute that is not there yet")
		}
		address := resolver.Address{Addr: "a", Attributes: attributes.New(attributeKey{}, "version 2")}
		cc.names.UpdateState(resolver.State{Endpoints: []resolver.Endpoint{{Addresses: []resolver.Address{address}}}})
		synctest.Wait()
		cc.wantRotation(t, "a")
		if _, late := seen.Load("version 2"); !late {
			t.Error("there is no connection with the new attribute")
		}
	}, "a")
}

func TestDuplicateAddresses(t *testing.T) {
	withBoth(t, func(t *testing.T, c *cluster, policy string) {
		c.dialPolicy(t, policy, []string{"a", "b", "a"}).wantRotation(t, "a", "b")
	}, "a", "b")
}

func TestErrorOfTheResolver(t *testing.T) {
	withBoth(t, func(t *testing.T, c *cluster, policy string) {
		cc := c.dialPolicy(t, policy, []string{"a", "b"})
		broken := errors.New("the registry is down")
		cc.names.CC().ReportError(broken)
		synctest.Wait()
		cc.wantRotation(t, "a", "b") // the last result stays
		c.stop("a", "b")
		cc.names.CC().ReportError(broken)
		synctest.Wait()
		if _, err := cc.echo(t.Context(), "call"); status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), broken.Error()) {
			t.Errorf("Echo = %v, want UNAVAILABLE with %q", err, broken)
		}
	}, "a", "b")
}

func TestSecondAddressOfAnEndpoint(t *testing.T) {
	withBoth(t, func(t *testing.T, c *cluster, policy string) {
		config := grpc.WithDefaultServiceConfig(`{"loadBalancingConfig":[{"` + policy + `":{}}]}`)
		cc := c.dialEndpoints(t, []resolver.Endpoint{endpoint("a4", "a6"), endpoint("b")}, config)
		cc.wantRotation(t, "a4", "b")
		c.stop("a4")
		time.Sleep(second) // one address is tried after the other
		cc.wantRotation(t, "a6", "b")
	}, "a4", "a6", "b")
}

func TestReconnect(t *testing.T) {
	withBoth(t, func(t *testing.T, c *cluster, policy string) {
		cc := c.dialPolicy(t, policy, []string{"a", "b"})
		c.stop("a")
		cc.wantRotation(t, "b")
		c.start(t, "a")
		time.Sleep(10 * second) // gRPC's backoff
		cc.wantRotation(t, "a", "b")
	}, "a", "b")
}

func TestClientsStartWithDifferentBackends(t *testing.T) {
	withBoth(t, func(t *testing.T, c *cluster, policy string) {
		got := map[string]int{}
		for range 60 {
			backend, err := c.dialPolicy(t, policy, []string{"a", "b"}).echo(t.Context(), "first")
			if err != nil {
				t.Fatal(err)
			}
			got[backend]++
		}
		if got["a"] == 0 || got["b"] == 0 { // by chance in one of 2⁵⁹ runs
			t.Errorf("the first calls of 60 clients went to %v, want both backends", got)
		}
	}, "a", "b")
}

// use has the resolver supply addresses together with a service config that names a policy.
func (c *client) use(policy string, addresses ...string) {
	config := c.names.CC().ParseServiceConfig(`{"loadBalancingConfig":[{"` + policy + `":{}}]}`)
	c.names.UpdateState(resolver.State{Endpoints: endpoints(addresses...), ServiceConfig: config})
	synctest.Wait()
}

func TestSwitchOfPolicies(t *testing.T) {
	withBoth(t, func(t *testing.T, c *cluster, policy string) {
		cc := c.dialPolicy(t, "pick_first", []string{"a", "b"})
		cc.wantRotation(t, "a")
		cc.use(policy, "a", "b")
		cc.wantRotation(t, "a", "b")
		cc.use("pick_first", "a", "b")
		cc.wantRotation(t, "a")
	}, "a", "b")
}

// A rewriter is a policy that, as some parents do with their child's, writes its settings as JSON and parses them a
// second time.
type rewriter struct{ grpcbalancer.Builder }

func init() {
	for _, policy := range []string{balancer.Name, "round_robin"} {
		grpcbalancer.Register(rewriter{grpcbalancer.Get(policy)})
	}
}

func (r rewriter) Name() string { return "rewritten_" + r.Builder.Name() }

func (r rewriter) ParseConfig(settings json.RawMessage) (serviceconfig.LoadBalancingConfig, error) {
	parser, ok := r.Builder.(grpcbalancer.ConfigParser)
	if !ok {
		return nil, nil
	}
	config, err := parser.ParseConfig(settings)
	if err != nil {
		return nil, err
	}
	text, err := json.Marshal(config)
	if err != nil {
		return nil, err
	}
	return parser.ParseConfig(text)
}

func TestParentThatParsesAgain(t *testing.T) {
	withBoth(t, func(t *testing.T, c *cluster, policy string) {
		c.dialPolicy(t, "rewritten_"+policy, []string{"a", "b"}).wantRotation(t, "a", "b")
	}, "a", "b")
}

// A policy that has no connection yet does not replace one that has.
func TestGracefulSwitch(t *testing.T) {
	withBoth(t, func(t *testing.T, c *cluster, policy string) {
		cc := c.dialPolicy(t, policy, []string{"a", "b"})
		var ready atomic.Bool
		c.dialAs("slow", func(ctx context.Context) (net.Conn, error) {
			time.Sleep(5 * second)
			c.start(t, "slow")
			ready.Store(true)
			return c.dial(ctx, "slow")
		})
		cc.use("pick_first", "slow")
		cc.wantRotation(t, "a", "b")
		time.Sleep(6 * second)
		if cc.wantRotation(t, "slow"); !ready.Load() {
			t.Error("the backend responded before it was started")
		}
		cc.use(policy, "a", "b")
		cc.wantRotation(t, "a", "b")
	}, "a", "b")
}

// badCertificates are credentials with which no handshake succeeds.
type badCertificates struct {
	credentials.TransportCredentials
}

func (badCertificates) ClientHandshake(context.Context, string, net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errors.New("certificate signed by unknown authority")
}

func (b badCertificates) Clone() credentials.TransportCredentials { return b }

func TestBadCertificates(t *testing.T) {
	withBoth(t, func(t *testing.T, c *cluster, policy string) {
		cc := c.dialPolicy(t, policy, []string{"a", "b"}, grpc.WithTransportCredentials(badCertificates{insecure.NewCredentials()}))
		if _, err := cc.echo(t.Context(), "call"); status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "unknown authority") {
			t.Errorf("Echo = %v, want UNAVAILABLE with the handshake's error", err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), second)
		defer cancel()
		if _, err := cc.echo(ctx, "waiting", grpc.WaitForReady(true)); status.Code(err) != codes.DeadlineExceeded ||
			!strings.Contains(err.Error(), "unknown authority") {
			t.Errorf("Echo with WaitForReady = %v, want DEADLINE_EXCEEDED with the handshake's error", err)
		}
	}, "a", "b")
}

func healthConfig(policy string) grpc.DialOption {
	return grpc.WithDefaultServiceConfig(`{"healthCheckConfig":{"serviceName":"echo"},"loadBalancingConfig":[{"` + policy + `":{}}]}`)
}

func TestHealthChecks(t *testing.T) {
	withBoth(t, func(t *testing.T, c *cluster, policy string) {
		a, b := c.startWith(t, "a"), c.startWith(t, "b")
		set := func(one *backend, to healthpb.HealthCheckResponse_ServingStatus) {
			one.health.SetServingStatus("echo", to)
			synctest.Wait()
		}
		set(a, healthpb.HealthCheckResponse_SERVING)
		set(b, healthpb.HealthCheckResponse_NOT_SERVING)
		cc := c.dialEndpoints(t, endpoints("a", "b"), healthConfig(policy))
		cc.wantRotation(t, "a")
		set(b, healthpb.HealthCheckResponse_SERVING)
		cc.wantRotation(t, "a", "b")
		set(a, healthpb.HealthCheckResponse_NOT_SERVING)
		cc.wantRotation(t, "b")
		set(b, healthpb.HealthCheckResponse_NOT_SERVING)
		if _, err := cc.echo(t.Context(), "call"); status.Code(err) != codes.Unavailable {
			t.Errorf("Echo = %v while no backend is serving, want UNAVAILABLE", err)
		}
	})
}

func TestHealthChecksWithoutAHealthServer(t *testing.T) {
	withBoth(t, func(t *testing.T, c *cluster, policy string) {
		unimplemented := grpc.StreamInterceptor(func(any, grpc.ServerStream, *grpc.StreamServerInfo, grpc.StreamHandler) error {
			return status.Error(codes.Unimplemented, "there are no health checks")
		})
		c.startWith(t, "a", unimplemented)
		c.dialEndpoints(t, endpoints("a"), healthConfig(policy)).wantRotation(t, "a")
	})
}

func TestIdleness(t *testing.T) {
	withBoth(t, func(t *testing.T, c *cluster, policy string) {
		cc := c.dialPolicy(t, policy, []string{"a", "b"}, grpc.WithIdleTimeout(10*second))
		want := func(state connectivity.State) {
			t.Helper()
			if synctest.Wait(); cc.GetState() != state {
				t.Fatalf("state %v, want %v", cc.GetState(), state)
			}
		}
		want(connectivity.Ready)
		time.Sleep(30 * second)
		want(connectivity.Idle)
		if _, err := cc.echo(t.Context(), "call"); err != nil {
			t.Fatal(err)
		}
		want(connectivity.Ready)
		time.Sleep(30 * second)
		want(connectivity.Idle)
		cc.Connect()
		want(connectivity.Ready)
		cc.wantRotation(t, "a", "b")
		c.behave(func(context.Context, string, string, int) error { time.Sleep(time.Minute); return nil })
		if _, err := cc.echo(t.Context(), "long"); err != nil {
			t.Fatal(err)
		}
		want(connectivity.Ready)
	}, "a", "b")
}

// A ClientConn that is closed ends the calls that wait.
func TestCloseEndsCallsThatWait(t *testing.T) {
	withBoth(t, func(t *testing.T, c *cluster, policy string) {
		c.dialAs("a", hanging)
		cc := c.dialPolicy(t, policy, []string{"a"})
		time.AfterFunc(second, func() { cc.Close() })
		if _, err := cc.echo(t.Context(), "call"); status.Code(err) != codes.Canceled {
			t.Errorf("Echo = %v, want CANCELED", err)
		}
	})
}

// DialOption is the one line that turns the policy on.
func TestDialOption(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		c.dialEndpoints(t, endpoints("a", "b"), balancer.DialOption()).wantRotation(t, "a", "b")
	}, "a", "b")
}

// Connections are the operating system's, and each endpoint has two addresses, of which the first is dead.
func TestOverTCP(t *testing.T) {
	dead, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	dead.Close()
	names := manual.NewBuilderWithScheme("tcp")
	var all []resolver.Endpoint
	for range 3 {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		server := grpc.NewServer()
		echov1.RegisterEchoServiceServer(server, named(listener.Addr().String()))
		go server.Serve(listener)
		t.Cleanup(server.Stop)
		all = append(all, endpoint(dead.Addr().String(), listener.Addr().String()))
	}
	names.InitialState(resolver.State{Endpoints: all})
	cc, err := grpc.NewClient("tcp:///", grpc.WithResolvers(names), grpc.WithTransportCredentials(insecure.NewCredentials()),
		balancer.DialOption())
	if err != nil {
		t.Fatal(err)
	}
	defer cc.Close()
	echo, got := echov1.NewEchoServiceClient(cc), map[string]bool{}
	for len(got) < 3 {
		reply, err := echo.Echo(t.Context(), &echov1.EchoRequest{}, grpc.WaitForReady(true))
		if err != nil {
			t.Fatal(err)
		}
		got[reply.GetMessage()] = true
	}
}

// serverOf names itself in each response.
type serverOf struct {
	echov1.UnimplementedEchoServiceServer
	name string
}

func named(name string) *serverOf { return &serverOf{name: name} }

func (s *serverOf) Echo(context.Context, *echov1.EchoRequest) (*echov1.EchoResponse, error) {
	return &echov1.EchoResponse{Message: s.name}, nil
}
