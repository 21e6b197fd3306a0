package grpcretry

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

var hedgeIterations = flag.Int("hedges.iterations", 10, "how many calls TestHedgedAttemptsAreIsolated makes")

// A racer answers with a reply that is all of one attempt: payload, header and trailer
// have its number. Which attempt is the quickest, and whether it fails, is drawn.
type racer struct {
	echov1.UnimplementedEchoServiceServer
}

const isolatedBytes = 256 << 10 // more than a window of flow control, so that losers are cut while they send

func (racer) Echo(ctx context.Context, req *echov1.EchoRequest) (*echov1.EchoResponse, error) {
	number := byte(PreviousAttempts(ctx) + 1)
	for _, b := range req.GetPayload() {
		if b != 'q' {
			return nil, status.Errorf(codes.DataLoss, "request of attempt %d was changed while it was sent", number)
		}
	}
	for range rand.IntN(50) { // who is first is up to the scheduler, but not only
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		default:
		}
	}
	if err := grpc.SetHeader(ctx, metadata.Pairs("attempt", fmt.Sprint(number))); err != nil {
		return nil, err
	}
	if err := grpc.SetTrailer(ctx, metadata.Pairs("attempt", fmt.Sprint(number))); err != nil {
		return nil, err
	}
	if rand.IntN(8) == 0 {
		return nil, status.Error(codes.Unavailable, fmt.Sprint(number))
	}
	return &echov1.EchoResponse{Message: fmt.Sprint(number), Payload: bytes.Repeat([]byte{number}, isolatedBytes)}, nil
}

// Four attempts at the same time, with large replies, all call options, and a caller that
// changes everything it owns as soon as it has its answer. In real time and with as much
// overlap as there can be: the race detector is the judge, and each answer must be all
// of one attempt.
func TestHedgedAttemptsAreIsolated(t *testing.T) {
	listener := bufconn.Listen(1 << 20)
	server := grpc.NewServer()
	echov1.RegisterEchoServiceServer(server, racer{})
	served := make(chan struct{})
	go func() { defer close(served); server.Serve(listener) }()
	defer func() { server.Stop(); <-served }()
	cc, err := grpc.NewClient("passthrough:///echo", append(DialOptions(WithBudget(Unlimited),
		hedged(4, Hedging{Delay: HedgeAfter(0)})),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }))...)
	if err != nil {
		t.Fatal(err)
	}
	defer cc.Close()

	req := &echov1.EchoRequest{Payload: bytes.Repeat([]byte{'q'}, 1000)}
	reply := &echov1.EchoResponse{}
	var header, trailer metadata.MD
	var at peer.Peer
	var finished atomic.Int64
	wins := map[string]int{}
	for i := range *hedgeIterations {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		for j := range req.Payload {
			req.Payload[j] = 'q'
		}
		err := cc.Invoke(ctx, echoMethod, req, reply, grpc.Header(&header), grpc.Trailer(&trailer), grpc.Peer(&at),
			grpc.OnFinish(func(error) { finished.Add(1) }), grpc.StaticMethod())
		cancel()
		won := first(trailer["attempt"])
		if err != nil {
			won = status.Convert(err).Message()
			if status.Code(err) != codes.Unavailable {
				t.Fatalf("call %d: %v", i, err)
			}
		} else if reply.GetMessage() != won || len(reply.GetPayload()) != isolatedBytes ||
			bytes.Count(reply.GetPayload(), []byte{won[0] - '0'}) != isolatedBytes {
			t.Fatalf("call %d: reply is of attempt %s and has %d bytes, the trailer is of attempt %s", i, reply.GetMessage(),
				len(reply.GetPayload()), won)
		}
		if h := first(header["attempt"]); h != won && (err == nil || h != "") || at.Addr == nil || finished.Load() != int64(i+1) {
			t.Fatalf("call %d: header is of attempt %q, trailer of %q, peer %v, finished %d times", i, h, won, at.Addr, finished.Load())
		}
		wins[won]++
		// All of this is the caller's again.
		for j := range req.Payload {
			req.Payload[j] = 'x'
		}
		clear(reply.Payload)
		reply.Message = "the caller's"
		header["attempt"], trailer["attempt"] = nil, nil
		header, at = metadata.MD{}, peer.Peer{}
	}
	if *hedgeIterations >= 1000 && len(wins) < 2 { // in make soak: who wins a few races is up to the scheduler
		t.Errorf("only attempt %v ever won: this shows nothing", wins)
	}
}
