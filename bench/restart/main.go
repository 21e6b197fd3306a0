// Command restart shows what a restart of a server does to the calls of its clients. Real
// server processes on loopback are killed (SIGKILL) and started again on the same port after
// 0.1, 1 and 2.5 s: a single server, and one of two replicas that take turns. Six
// clients call them, each with its defaults: gRPC without retries, gRPC with WaitForReady,
// grpc-go's built-in retries, go-grpc-middleware, failsafe-go and grpcretry.
//
//	make restart        # from the root of the repository: prints the tables, in half a minute
//	make restart-docs   # writes them into docs/restart.md
//
// There are two loads: 50 calls that start together just after the client has noticed that
// the server is gone, and 200 calls a second from 1 s before it goes until 4 s after it is
// back. All calls have a deadline of 10 s. clients.go says how each client is configured,
// trial.go what happens to it, and summary.go what is counted. The servers themselves count
// the attempts that reach them.
//
// Every client has servers of its own, so all clients with the same load and absence run
// side by side.
package main

import (
	"context"
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
	if address := os.Getenv(addressVariable); address != "" {
		exit(serve(address, os.Stdin, os.Stdout))
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	exit(command(ctx, os.Args[1:], os.Stdout))
}

func exit(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, "restart:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// command does what the arguments say.
func command(ctx context.Context, args []string, out io.Writer) error {
	p := plan{
		absences: []time.Duration{100 * time.Millisecond, time.Second, 2500 * time.Millisecond},
		before:   time.Second,
		after:    4 * time.Second, // gRPC reconnects about 3 s after the return at the latest
		deadline: 10 * time.Second,
	}
	flags := flag.NewFlagSet("restart", flag.ContinueOnError)
	flags.IntVar(&p.calls, "calls", 50, "calls that start together while the server is away")
	flags.IntVar(&p.rate, "rate", 200, "calls per second of the steady load")
	page := flags.String("markdown", "", "also put the tables into this page, between its marks")
	if err := flags.Parse(args); err != nil {
		return err
	}
	for name, value := range map[string]int{"-calls": p.calls, "-rate": p.rate} {
		if value < 1 || value > 5000 {
			return fmt.Errorf("%s is %d, want 1 to 5000", name, value)
		}
	}
	ctx, cancel := context.WithTimeout(ctx, 3*time.Minute) // it takes half a minute
	defer cancel()

	fmt.Fprintf(out, "%s\n\n", p.describe())
	for _, c := range clients {
		fmt.Fprintf(out, "  %-20s %s\n", c.name, c.settings)
	}
	fmt.Fprintf(out, "\n%s\n", legend)
	tables, err := p.run(ctx)
	if err != nil {
		return err
	}
	for _, t := range tables {
		if err := t.print(out); err != nil {
			return err
		}
	}
	if *page != "" {
		return writePage(*page, tables)
	}
	return nil
}

// A plan is what is measured.
type plan struct {
	absences      []time.Duration
	calls         int // started together
	rate          int // calls per second of the steady load,
	before, after time.Duration
	deadline      time.Duration
}

// tables returns one empty table for each load and number of replicas.
func (p *plan) tables() []table {
	together := load{calls: p.calls, deadline: p.deadline}
	steady := load{rate: p.rate, before: p.before, after: p.after, deadline: p.deadline}
	return []table{
		{mark: "together single", title: fmt.Sprintf("A single server is away: %d calls that start meanwhile", p.calls), replicas: 1, load: together},
		{mark: "together replicas", title: fmt.Sprintf("One of two replicas is away: %d calls that start meanwhile", p.calls), replicas: 2, load: together},
		{mark: "steady single", title: fmt.Sprintf("A single server is away: steady load of %d calls a second", p.rate), replicas: 1, load: steady},
		{mark: "steady replicas", title: fmt.Sprintf("One of two replicas is away: steady load of %d calls a second", p.rate), replicas: 2, load: steady},
	}
}

// run fills the tables.
func (p *plan) run(ctx context.Context) ([]table, error) {
	tables := p.tables()
	for _, sideBySide := range [][]table{tables[:2], tables[2:]} {
		for _, away := range p.absences {
			if err := addRows(ctx, sideBySide, away); err != nil {
				return nil, err
			}
		}
	}
	return tables, nil
}

// addRows measures all clients for several tables at the same time.
func addRows(ctx context.Context, tables []table, away time.Duration) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	errs := make(chan error, len(tables)*len(clients))
	var running sync.WaitGroup
	for i := range tables {
		t := &tables[i]
		s := scenario{replicas: t.replicas, away: away, load: t.load}
		t.rows = append(t.rows, make([]row, len(clients))...)
		rows := t.rows[len(t.rows)-len(clients):]
		for j := range clients {
			running.Go(func() {
				result, err := s.measure(ctx, &clients[j])
				if err != nil {
					errs <- err
					cancel() // the others are of no use now
				}
				rows[j] = row{away, clients[j].name, result}
			})
		}
	}
	running.Wait()
	close(errs)
	return <-errs // the one that cancelled the others, or nil
}
