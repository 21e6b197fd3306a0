// Command client is the HTTP service of the production example, which calls the gRPC server.
package main

import (
	"flag"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"syscall"
	"time"

	"google.golang.org/grpc/credentials/insecure"

	"github.com/grpcretry/grpcretry/examples/production/client"
	"github.com/grpcretry/grpcretry/examples/production/ops"
)

func main() {
	log := ops.NewLogger(os.Stderr, slog.LevelInfo)
	if err := run(log); err != nil {
		log.Error("client failed", "error", err)
		os.Exit(1)
	}
}

func run(log *slog.Logger) (err error) {
	config := client.Config{
		Log:         log,
		Credentials: insecure.NewCredentials(), // loopback only: use credentials.NewTLS with your certificates
	}
	address := flag.String("listen", "127.0.0.1:8080", "`address` of the HTTP port")
	internal := flag.String("internal", client.DefaultInternal, "`address` of /metrics and the debug page; keep it private")
	flag.StringVar(&config.Target, "target", "dns:///127.0.0.1:50051", "the gRPC server; in Kubernetes, a headless Service")
	flag.DurationVar(&config.Timeout, "timeout", 5*time.Second, "deadline of each request, over all attempts")
	flag.StringVar(&config.Settings, "settings", "", "`file` of settings, read again on SIGHUP")
	flag.DurationVar(&config.Drain.Delay, "drain-delay", 0, "how long load balancers need to see that this replica stops; 5s in Kubernetes")
	flag.DurationVar(&config.Drain.Timeout, "drain-timeout", 15*time.Second, "how long requests in flight may take at the end")
	flag.Parse()

	reload := make(chan os.Signal, 1)
	signal.Notify(reload, syscall.SIGHUP)
	config.Reload = reload
	if config.Public, err = net.Listen("tcp", *address); err != nil {
		return err
	}
	if config.Internal, err = net.Listen("tcp", *internal); err != nil {
		return err
	}
	return client.Run(ops.UntilStopped(), config)
}
