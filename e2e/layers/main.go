// Command layers shows what becomes of one call when four services in a row retry it. The services
// A, B, C and D are real processes on loopback: a client calls A once for each request, A calls B,
// B calls C, and C calls D. A, B and C make up to three attempts each, so a call that D fails may
// reach D 27 times. The command measures five setups side by side, each with processes of its own:
// gRPC's own retries, the library's budgets alone, each of its two measures against retries on
// several layers alone, and all of them together.
//
//	make layers   # from the root of the repository: prints one table, in under half a minute
//
// The client makes 40 calls a second. D responds for 3 s, is down for 4 s, which means that it
// fails every attempt with UNAVAILABLE, and responds for 3 s. Then it is flaky for 2 s: it fails the
// first attempt of one call in ten, and the first two of one call in twenty. Finally, after half a
// second in which it responds, its process is killed, and started again on the same port.
//
// With -otlp the command instead makes one call while D is down, and sends the trace to a receiver
// of OTLP such as Jaeger:
//
//	cd e2e && go run ./layers -otlp localhost:4317
//
// setups.go says how the services are configured, service.go what a service does, trial.go what
// happens to the services, and summary.go what is counted.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"
)

func main() {
	if config := os.Getenv(serviceVariable); config != "" {
		exit(serviceProcess(config))
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	exit(command(ctx, os.Args[1:], os.Stdout))
}

func exit(err error) {
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "layers:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// measured is what the command measures. The scenario layers-proof of cmd/herd simulates the same.
var measured = plan{
	rate:     40,
	deadline: 10 * time.Second,
	healthy:  3 * time.Second,
	down:     4 * time.Second,
	healed:   5 * time.Second, // longer than down, so that calls that have waited are over
	flaky:    2 * time.Second,
	settled:  500 * time.Millisecond,
	away:     300 * time.Millisecond,
	after:    2500 * time.Millisecond, // gRPC reconnects about 1.2 s after the kill at the latest
}

// command does what the arguments say.
func command(ctx context.Context, args []string, out io.Writer) error {
	flags := flag.NewFlagSet("layers", flag.ContinueOnError)
	otlp := flags.String("otlp", "",
		"make one call while D is down, for each of two setups, and send its trace to the OTLP receiver at this `address`")
	markdown := flags.Bool("markdown", false, "print the table in Markdown")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if flags.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	ctx, cancel := context.WithTimeoutCause(ctx, 2*time.Minute, errors.New("not finished within 2 minutes"))
	defer cancel()
	if *otlp != "" {
		return traceCalls(ctx, *otlp, out)
	}

	if !*markdown {
		fmt.Fprintf(out, "%s\n\n", measured.describe())
	}
	rows, err := measured.run(ctx)
	if err != nil {
		return err
	}
	text := tableText(rows) + "\n" + restText(rows)
	if *markdown {
		text = tableMarkdown(rows)
	}
	_, err = io.WriteString(out, text)
	return err
}

// run measures all setups side by side.
func (p *plan) run(ctx context.Context) ([]row, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	rows := make([]row, len(setups))
	var running sync.WaitGroup
	for i := range setups {
		running.Go(func() {
			s, err := p.measure(ctx, &setups[i])
			if err != nil {
				cancel(fmt.Errorf("%s: %w", setups[i].name, err)) // the other rows are of no use now
				return
			}
			rows[i] = row{setups[i].name, s}
		})
	}
	running.Wait()
	return rows, context.Cause(ctx)
}
