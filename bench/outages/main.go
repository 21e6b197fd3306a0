// Command outages shows what the outages of servers do to the calls of six clients: plain gRPC, a
// service config, go-grpc-middleware, failsafe-go, grpcretry with its defaults, and grpcretry
// with hedged calls.
//
//	make outages        # from the root of the repository: prints the tables, in half a minute
//	make outages-docs   # writes them into docs/outages.md
//
// outages.go has the outages: servers on loopback that answer UNAVAILABLE for a while, servers
// that are killed (SIGKILL) and started again, and an address at which nobody ever listens.
// clients.go says how each client is configured, trial.go what is measured, and table.go what is
// shown. Each client has servers of its own, so all clients go through an outage side by side.
package main

import (
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/grpcretry/grpcretry/bench/internal/pages"
)

func main() {
	if address := os.Getenv(addressVariable); address != "" {
		exit(serve(address, os.Stdin, os.Stdout))
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	exit(command(ctx, os.Args[1:], os.Stdout))
}

func exit(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "outages:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// command does what the arguments say.
func command(ctx context.Context, args []string, out io.Writer) error {
	flags := flag.NewFlagSet("outages", flag.ContinueOnError)
	page := flags.String("markdown", "", "also put the tables into this page, between its marks")
	readme := flags.String("readme", "", "also put a short table into this page, between its marks")
	if err := flags.Parse(args); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 3*time.Minute) // it takes half a minute
	defer cancel()
	results, err := run(ctx, outages, clients)
	if err != nil {
		return err
	}
	fmt.Fprintln(out, machine())
	tables := tablesOf(results)
	for _, t := range tables {
		if err := t.print(out); err != nil {
			return err
		}
	}
	if err := tooBusy(results); err != nil {
		return err // and write no page
	}
	if *page != "" {
		if err := writePage(*page, tables); err != nil {
			return err
		}
	}
	if *readme != "" {
		return pages.ReplaceBetweenMarks(*readme, "outages", "\n"+pages.Table(readmeRows(tables[0], tables[2]), 1)+"\n")
	}
	return nil
}
