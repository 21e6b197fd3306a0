// The program in which snippets_test.go runs the Go code of README.md, doc.go and docs/. The
// test adds a file with a function per snippet. This file has the identifiers that snippets
// use without declaring them, and tries out the values that snippets make.
package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"testing"
	"time"

	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/grpcretry/grpcretry"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

var (
	target        string // the address of a server that fails each call's first attempt
	err           error  // from a call that failed
	creds         = insecure.NewCredentials()
	config        = `{"methodConfig": [{"name": [{"service": "shop.v1.Catalog"}]}]}` // a service config
	retrier, _    = grpcretry.New()
	meterProvider = sdkmetric.NewMeterProvider()
	exporter      = tracetest.NewInMemoryExporter()
	internalMux   = http.NewServeMux()
	ctx           = context.Background()
	mailer        postbox
	message       = "hello"
	t             *testing.T
	policy        []grpcretry.Option
)

// register registers a service whose method does nothing.
func register(s grpc.ServiceRegistrar) {
	s.RegisterService(&grpc.ServiceDesc{ServiceName: "shop.Cart", HandlerType: (*any)(nil), Methods: []grpc.MethodDesc{{
		MethodName: "Checkout",
		Handler: func(srv any, ctx context.Context, decode func(any) error, intercept grpc.UnaryServerInterceptor) (any, error) {
			var req emptypb.Empty
			if err := decode(&req); err != nil {
				return nil, err
			}
			return intercept(ctx, &req, &grpc.UnaryServerInfo{Server: srv, FullMethod: "/shop.Cart/Checkout"},
				func(context.Context, any) (any, error) { return &emptypb.Empty{}, nil })
		},
	}}}, nil)
}

func checkout(ctx context.Context, cc *grpc.ClientConn) {
	_ = cc.Invoke(ctx, "/shop.Cart/Checkout", &emptypb.Empty{}, &emptypb.Empty{})
}

// A postbox loses the first message.
type postbox struct{ sent []string }

func (p *postbox) Send(_ context.Context, message string) error {
	if p.sent = append(p.sent, message); len(p.sent) == 1 {
		return errors.New("the message was lost")
	}
	return nil
}

func isTransient(context.Context, grpcretry.Attempt) grpcretry.Classification { return grpcretry.Retry }

// main runs the snippets as a test, because some of them are the contents of one.
func main() {
	testing.Main(func(string, string) (bool, error) { return true, nil }, []testing.InternalTest{{Name: "Snippets", F: func(test *testing.T) {
		t = test
		if err := run(); err != nil {
			t.Fatal(err)
		}
	}}}, nil, nil)
}

func run() error {
	listener, listenErr := net.Listen("tcp", "127.0.0.1:0")
	if listenErr != nil {
		return listenErr
	}
	server := grpc.NewServer()
	echov1.RegisterEchoServiceServer(server, flaky{})
	go server.Serve(listener)
	defer server.Stop()
	target = listener.Addr().String()
	if err = call(grpcretry.WithMaxAttempts(2), grpcretry.WithClassifier(exhaust)); err == nil {
		return errors.New("a call succeeded that should fail")
	}

	var failures []error
	for _, s := range snippets {
		if err := s.run(); err != nil {
			failures = append(failures, fmt.Errorf("%s: %w", s.place, err))
		}
	}
	return errors.Join(failures...)
}

// exhaust stops a call after its first attempt.
func exhaust(context.Context, grpcretry.Attempt) grpcretry.Classification { return grpcretry.Stop }

// A snippet is the code at a place such as README.md:7.
type snippet struct {
	place string
	run   func() error
}

type flaky struct {
	echov1.UnimplementedEchoServiceServer
}

func (flaky) Echo(ctx context.Context, _ *echov1.EchoRequest) (*echov1.EchoResponse, error) {
	if grpcretry.PreviousAttempts(ctx) == 0 {
		return nil, status.Error(codes.Unavailable, "try again")
	}
	return &echov1.EchoResponse{}, nil
}

// try uses what a snippet made, as far as it is of a known type: a ClientConn and dial
// options must lead to a call that is retried and succeeds, and New must accept an option.
func try(made any) error {
	switch made := made.(type) {
	case error:
		return made
	case *grpc.ClientConn:
		defer made.Close()
		return echo(made)
	case []grpc.DialOption:
		return dial(made...)
	case grpc.DialOption:
		return dial(made)
	case grpcretry.Option:
		_, err := grpcretry.New(made)
		return err
	default:
		return nil
	}
}

// call makes a call with the given options.
func call(opts ...grpcretry.Option) error { return dial(grpcretry.DialOptions(opts...)...) }

func dial(opts ...grpc.DialOption) error {
	cc, err := grpc.NewClient(target, append(opts, grpc.WithTransportCredentials(creds))...)
	if err != nil {
		return err
	}
	defer cc.Close()
	return echo(cc)
}

func echo(cc *grpc.ClientConn) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	_, err := echov1.NewEchoServiceClient(cc).Echo(ctx, &echov1.EchoRequest{})
	return err
}
