package debug_test

import (
	"context"
	"encoding/json"
	"fmt"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/debug"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// restarting fails each first attempt.
type restarting struct {
	echov1.UnimplementedEchoServiceServer
}

func (restarting) Echo(ctx context.Context, _ *echov1.EchoRequest) (*echov1.EchoResponse, error) {
	if grpcretry.PreviousAttempts(ctx) == 0 {
		return nil, status.Error(codes.Unavailable, "replica is restarting")
	}
	return &echov1.EchoResponse{}, nil
}

// Mount the page beside /debug/pprof, on the port that only the people who run the program
// can reach; with ?format=json a program can read it, too.
func ExampleHandler() {
	retrier, err := grpcretry.New(grpcretry.WithBackoff(grpcretry.Constant(time.Millisecond)))
	if err != nil {
		log.Fatal(err)
	}
	page := debug.Handler(retrier)
	defer page.Close()
	internal := http.NewServeMux()
	internal.Handle("/debug/grpcretry", page)

	client, stop := dial(retrier.DialOptions()...)
	defer stop()
	for range 3 {
		_, _ = client.Echo(context.Background(), &echov1.EchoRequest{})
	}

	response := httptest.NewRecorder()
	internal.ServeHTTP(response, httptest.NewRequest(http.MethodGet, "/debug/grpcretry?format=json", nil))
	var s debug.Snapshot
	if err := json.Unmarshal(response.Body.Bytes(), &s); err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%d calls, %d attempts, %d rescued by a retry\n", s.Total.Calls, s.Total.Attempts, s.Total.Rescued)
	fmt.Println("failed attempts:", s.Total.Failed)
	for _, a := range s.Calls[0].Attempts {
		fmt.Println("attempt", a.Number, a.Code, a.Message, a.Decision)
	}
	// Output:
	// 3 calls, 6 attempts, 3 rescued by a retry
	// failed attempts: map[UNAVAILABLE:3]
	// attempt 1 UNAVAILABLE replica is restarting retry
	// attempt 2 OK  success
}

// dial starts the server and dials it.
func dial(opts ...grpc.DialOption) (echov1.EchoServiceClient, func()) {
	listener := bufconn.Listen(1 << 16)
	s := grpc.NewServer()
	echov1.RegisterEchoServiceServer(s, restarting{})
	go func() { _ = s.Serve(listener) }()

	cc, err := grpc.NewClient("passthrough:///echo", append(opts,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return listener.DialContext(ctx) }))...)
	if err != nil {
		log.Fatal(err)
	}
	return echov1.NewEchoServiceClient(cc), func() { cc.Close(); s.Stop() }
}
