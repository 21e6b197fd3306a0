//go:build e2e

package browser

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/debug"
	"github.com/grpcretry/grpcretry/grpcretrytest"
)

// This file plays a shop through a bad quarter of an hour, in virtual time, so that there
// is a page worth looking at.

const (
	cart      = "dns:///cart.shop.internal:8443"
	catalogue = "dns:///catalogue.shop.internal:8443"
	stock     = "dns:///inventory-primary.warehouse-eu-central.shop.internal:8443"

	getCart   = "/shop.cart.v1.CartService/GetCart"
	addItem   = "/shop.cart.v1.CartService/AddItem"
	getPrice  = "/shop.pricing.v2.PricingService/GetPrice"
	recommend = "/shop.recommendation.v1beta1.PersonalizedRecommendationService/ListRecommendationsForReturningCustomer"
	reserve   = "/shop.inventory.v1.InventoryService/Reserve"
	watch     = "/shop.inventory.v1.InventoryService/WatchStock"
)

// recordPage plays the shop and returns the page as it was then: each query has the
// response that it got.
func recordPage(t *testing.T, queries ...string) http.Handler {
	t.Helper()
	recorded := http.NewServeMux()
	synctest.Test(t, func(t *testing.T) {
		// A bubble begins in the year 2000; go on to a date that looks like one.
		time.Sleep(time.Until(time.Date(2026, 11, 20, 14, 32, 7, 0, time.UTC)))
		retrier, err := grpcretry.New(
			grpcretry.WithMethod(recommend,
				grpcretry.WithPolicy(grpcretry.Policy{MaxAttempts: 2,
					Hedging: &grpcretry.Hedging{Delay: grpcretry.HedgeAfter(60 * time.Millisecond)}})),
			grpcretry.WithMethod("/shop.inventory.v1.InventoryService/", grpcretry.WithMaxAttempts(3)),
			grpcretry.WithMethod(addItem, grpcretry.WithUnsentOnly(true)))
		if err != nil {
			t.Fatal(err)
		}
		page := debug.Handler(retrier)
		defer page.Close()
		s := newShop(t, retrier)
		defer s.close()
		s.play()
		responses := map[string]*httptest.ResponseRecorder{}
		for _, query := range queries {
			responses[query] = httptest.NewRecorder()
			page.ServeHTTP(responses[query], httptest.NewRequest(http.MethodGet, "/?"+query, nil))
		}
		recorded.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
			response := responses[r.URL.RawQuery]
			if response == nil {
				http.NotFound(w, r)
				return
			}
			for key, values := range response.Header() {
				w.Header()[key] = values
			}
			_, _ = w.Write(response.Body.Bytes())
		})
	})
	return recorded
}

// A shop is the backends and a client of them.
type shop struct {
	start  time.Time
	conns  map[string]*grpc.ClientConn
	random *rand.Rand
	calls  sync.WaitGroup
}

func newShop(t *testing.T, r *grpcretry.Retrier) *shop {
	s := &shop{start: time.Now(), conns: map[string]*grpc.ClientConn{}, random: rand.New(rand.NewPCG(1, 2))}
	for i, target := range []string{cart, catalogue, stock} {
		var addresses []resolver.Address
		backends := map[string]*grpcretrytest.Server{}
		for replica := range 3 {
			address := fmt.Sprintf("10.4.%d.%d:8443", i, 17+11*replica)
			addresses = append(addresses, resolver.Address{Addr: address})
			backends[address] = s.startBackend(t, replica)
		}
		dns := manual.NewBuilderWithScheme("dns")
		dns.InitialState(resolver.State{Addresses: addresses})
		cc, err := grpc.NewClient(target, append(r.DialOptions(),
			grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithResolvers(dns),
			grpc.WithDefaultServiceConfig(`{"loadBalancingConfig": [{"round_robin": {}}]}`),
			grpc.WithContextDialer(func(ctx context.Context, address string) (net.Conn, error) {
				conn, err := backends[address].DialContext(ctx)
				return addressed{conn, address}, err
			}))...)
		if err != nil {
			t.Fatal(err)
		}
		s.conns[target] = cc
	}
	return s
}

// addressed is a connection to where it says.
type addressed struct {
	net.Conn
	address string
}

func (a addressed) RemoteAddr() net.Addr { return a }
func (a addressed) Network() string      { return "tcp" }
func (a addressed) String() string       { return a.address }

// startBackend starts a server of all methods.
func (s *shop) startBackend(t *testing.T, replica int) *grpcretrytest.Server {
	return grpcretrytest.NewServer(t, func(grpc.ServiceRegistrar) {}, grpc.UnknownServiceHandler(func(_ any, stream grpc.ServerStream) error {
		if err := stream.RecvMsg(&emptypb.Empty{}); err != nil {
			return err
		}
		method, _ := grpc.MethodFromServerStream(stream)
		if err := s.answer(stream, method, replica); err != nil {
			return err
		}
		return stream.SendMsg(&emptypb.Empty{})
	}))
}

func (s *shop) close() {
	s.calls.Wait()
	for _, cc := range s.conns {
		cc.Close()
	}
}

// within says whether the shop has been open for a time between the two.
func (s *shop) within(from, to time.Duration) bool {
	open := time.Since(s.start)
	return open >= from && open < to
}

// answer is what a replica answers, after some work.
func (s *shop) answer(stream grpc.ServerStream, method string, replica int) error {
	ctx := stream.Context()
	work := func(d time.Duration) { // until the caller has gone away
		select {
		case <-time.After(d):
		case <-ctx.Done():
		}
	}
	work(time.Duration(8+7*replica) * time.Millisecond)
	switch {
	case method == getCart && s.within(11*time.Minute, 12*time.Minute+30*time.Second):
		work(20 * time.Millisecond)
		return status.Error(codes.Unavailable, "connection pool of carts-db-primary is exhausted: failover in progress")
	case (method == getCart || method == addItem) && replica == 2 && s.within(13*time.Minute+40*time.Second, 14*time.Minute+53*time.Second):
		return status.Error(codes.Unavailable, "replica is draining")
	case method == getCart && s.within(14*time.Minute+53*time.Second, 15*time.Minute) &&
		(grpcretry.PreviousAttempts(ctx) > 0 || time.Now().Nanosecond()%41 == 0):
		return status.Error(codes.Unavailable, "shard 7 is read-only: rebalancing")
	case method == getPrice && s.within(13*time.Minute, time.Hour) && grpcretry.PreviousAttempts(ctx) == 0 && time.Now().Nanosecond()%7 == 0:
		if err := grpcretry.SetPushback(ctx, 250*time.Millisecond); err != nil {
			return err
		}
		return status.Error(codes.ResourceExhausted, "queue is full")
	case method == recommend && replica == 1 && s.within(14*time.Minute, time.Hour):
		work(time.Minute)
		return ctx.Err()
	case method == reserve && s.within(14*time.Minute+55*time.Second, time.Hour):
		if err := grpcretry.SetNoRetry(ctx); err != nil {
			return err
		}
		return status.Error(codes.Unavailable, "stock-taking until 15:00")
	case method == addItem && time.Now().Nanosecond()%31 == 0:
		return status.Error(codes.NotFound, "no such cart")
	case method == watch:
		if err := stream.SendMsg(&emptypb.Empty{}); err != nil {
			return err
		}
		work(20 * time.Second)
		return status.Error(codes.Unavailable, "server is restarting")
	}
	return nil
}

// play is 15 minutes of customers.
func (s *shop) play() {
	for tick := 0; s.within(0, 15*time.Minute); tick++ {
		s.call(cart, getCart)
		if tick%3 == 0 {
			s.call(cart, addItem)
			s.call(catalogue, getPrice)
		}
		if tick%20 == 0 {
			s.call(catalogue, recommend)
			s.call(stock, reserve)
		}
		if tick%2000 == 0 {
			s.call(stock, watch)
		}
		time.Sleep(time.Duration(40+s.random.IntN(40)) * time.Millisecond)
	}
	synctest.Wait()
}

// call makes a call, and does not wait for it.
func (s *shop) call(target, method string) {
	s.calls.Go(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		if method != watch {
			_ = s.conns[target].Invoke(ctx, method, &emptypb.Empty{}, &emptypb.Empty{})
			return
		}
		stream, err := s.conns[target].NewStream(context.Background(), &grpc.StreamDesc{ServerStreams: true}, method)
		if err == nil {
			err = stream.SendMsg(&emptypb.Empty{})
		}
		if err == nil {
			err = stream.CloseSend()
		}
		for err == nil {
			err = stream.RecvMsg(&emptypb.Empty{})
		}
	})
}
