// The demo shows what github.com/grpcretry/grpcretry does, attempt by attempt: a real
// gRPC server goes through an outage, an overload and a few other bad moments, and a
// client with the retry interceptor talks to it. Every call is drawn on a time axis, with
// the code of each attempt, the wait after it, who chose that wait, and why the call ended.
//
//	go run .
//
// It needs no network, no flags and a few seconds. With -http localhost:8080 it also serves
// the debug page there, until Ctrl-C. Its exit status is 1 if what it shows is not what it
// should show, for example if the server saw another number of attempts than the client
// sent; that makes it a test, too.
//
// With OTEL_EXPORTER_OTLP_ENDPOINT set, say to http://localhost:4317 where a Jaeger
// listens, it also sends its traces there: one trace for each scene, with a span for each
// call, below it one for each attempt, named with its number, and one for each wait, and
// below each attempt the server's.
//
// To copy from it, read client.go first (dial, observe, read the error), then server.go
// (pushback), then otel.go (traces) and page.go (debug page).
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"

	"go.opentelemetry.io/otel/trace"
)

func main() {
	address, err := parse(os.Args[1:], os.Stderr)
	switch {
	case errors.Is(err, flag.ErrHelp):
		return
	case err != nil:
		os.Exit(2) // parse has said why
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Stdout, isTerminal(os.Stdout), address); err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}

// parse reads the command line: where to serve the debug page, empty for nowhere.
func parse(args []string, stderr io.Writer) (address string, err error) {
	flags := flag.NewFlagSet("demo", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.StringVar(&address, "http", "", "serve the debug page at this `address`, say localhost:8080, until Ctrl-C")
	if err := flags.Parse(args); err != nil {
		return "", err
	}
	if flags.NArg() > 0 {
		err = fmt.Errorf("unexpected argument %q", flags.Arg(0))
	} else if _, _, bad := net.SplitHostPort(address); address != "" && bad != nil {
		err = fmt.Errorf("-http %q: want a host and a port, such as localhost:8080", address)
	}
	if err != nil {
		fmt.Fprintln(stderr, "demo:", err)
	}
	return address, err
}

// run plays all scenes, and says where to look at what happened: at the traces, if the
// environment names a collector, and at the debug page, if it has an address.
func run(ctx context.Context, out io.Writer, color bool, address string) error {
	site, err := openSite(address)
	if err != nil {
		return err
	}
	defer site.close()
	t, err := newTelemetry(ctx)
	if err != nil {
		return err
	}
	err = playAgainst(ctx, out, color, t, site)
	if err = errors.Join(err, t.finish(ctx, out)); err != nil {
		return err
	}
	return site.stay(ctx, out)
}

// playAgainst plays against a server on the loopback interface.
func playAgainst(ctx context.Context, out io.Writer, color bool, t *telemetry, site *site) error {
	address := "127.0.0.1:0"
	server, err := startServer(func() (net.Listener, error) {
		listener, err := net.Listen("tcp", address)
		if err == nil {
			address = listener.Addr().String() // where a restarted server is expected
		}
		return listener, err
	}, t.serverOptions()...)
	if err != nil {
		return err
	}
	defer server.stop()

	client, err := dial(address, t)
	if err != nil {
		return err
	}
	defer client.Close()

	site.show(client.retrier, out)
	return play(ctx, &picture{out: out, color: color}, server, client, t.tracer())
}

// play shows one scene after the other, then the totals, and returns what was not as
// expected.
func play(ctx context.Context, p *picture, s *server, c *client, tracer trace.Tracer) error {
	p.intro()
	var results []result
	for i, scene := range newScenes() {
		r, err := scene.play(ctx, i+1, s, c, tracer)
		if err != nil {
			return err
		}
		p.scene(r)
		results = append(results, r)
	}
	p.totals(results)
	if err := verify(results); err != nil {
		return err
	}
	p.line("  Checked: in every call the server saw the attempts that the client sent, none")
	p.line("  began before its wait was over, and every scene ended as written.")
	return nil
}

// verify checks every scene.
func verify(results []result) error {
	var errs []error
	for _, r := range results {
		if err := r.verify(); err != nil {
			errs = append(errs, fmt.Errorf("scene %d (%s): %w", r.number, r.scene.title, err))
		}
	}
	return errors.Join(errs...)
}
