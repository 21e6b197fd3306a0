// The demo shows what github.com/grpcretry/grpcretry does, attempt by attempt: a real
// gRPC server goes through an outage, an overload and a few other bad moments, and a
// client with the retry interceptor talks to it. Every call is drawn on a time axis, with
// the code of each attempt, the wait after it, who chose that wait, and why the call ended.
//
//	go run .
//
// It needs no network, no flags and a few seconds. Its exit status is 1 if what it shows
// is not what it should show, for example if the server saw another number of attempts
// than the client counted; that makes it a test, too.
//
// With OTEL_EXPORTER_OTLP_ENDPOINT set, say to http://localhost:4317 where a Jaeger
// listens, it also sends its traces there: one trace for each scene.
//
// To copy from it, read client.go first (dial, observe, read the error), then server.go
// (pushback), then otel.go (call spans).
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"

	"go.opentelemetry.io/otel/trace"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Stdout, isTerminal(os.Stdout)); err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
}

// run plays all scenes against a server on the loopback interface, with traces if the
// environment names a collector, and writes what happens to out.
func run(ctx context.Context, out io.Writer, color bool) (err error) {
	t, err := newTelemetry(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, t.finish(ctx, out)) }()

	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	server := startServer(listener)
	defer server.stop()

	client, err := dial(listener.Addr().String(), t.provider)
	if err != nil {
		return err
	}
	defer client.Close()

	return play(ctx, &picture{out: out, color: color}, server, client, t.tracer())
}

// play shows one scene after the other, then the totals, and returns what was not as
// expected.
func play(ctx context.Context, p *picture, s *server, c *client, tracer trace.Tracer) error {
	scenes, err := newScenes()
	if err != nil {
		return err
	}
	p.intro()
	var results []result
	for i, scene := range scenes {
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
	p.line("  Checked: server and client counted the same attempts in every call, none began")
	p.line("  before its wait was over, and every scene ended as written.")
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
