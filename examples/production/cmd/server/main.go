// Command server is the gRPC server of the production example.
package main

import (
	"flag"
	"log/slog"
	"net"
	"os"
	"time"

	"google.golang.org/grpc/credentials/insecure"

	"github.com/grpcretry/grpcretry/examples/production/ops"
	"github.com/grpcretry/grpcretry/examples/production/server"
)

func main() {
	log := ops.NewLogger(os.Stderr, slog.LevelInfo)
	if err := run(log); err != nil {
		log.Error("server failed", "error", err)
		os.Exit(1)
	}
}

func run(log *slog.Logger) (err error) {
	config := server.Config{
		Log:         log,
		Credentials: insecure.NewCredentials(), // loopback only: use credentials.NewTLS with your certificates
	}
	address := flag.String("listen", "127.0.0.1:50051", "`address` of the gRPC port")
	internal := flag.String("internal", server.DefaultInternal, "`address` of /metrics; keep it private")
	flag.IntVar(&config.Capacity, "capacity", 100, "requests in flight; more are rejected")
	flag.DurationVar(&config.Drain.Delay, "drain-delay", 0, "how long load balancers need to see that this replica stops; 5s in Kubernetes")
	flag.DurationVar(&config.Drain.Timeout, "drain-timeout", 15*time.Second, "how long requests in flight may take at the end")
	flag.IntVar(&config.Faults.FailEvery, "fail-every", 0, "fail each `n`-th request on purpose, every other one after it has run")
	flag.DurationVar(&config.Faults.Work, "work", 0, "how long each request takes")
	flag.Parse()

	if config.Public, err = net.Listen("tcp", *address); err != nil {
		return err
	}
	if config.Internal, err = net.Listen("tcp", *internal); err != nil {
		return err
	}
	return server.Run(ops.UntilStopped(), config)
}
