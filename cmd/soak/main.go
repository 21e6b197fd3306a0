// Command soak makes calls under faults for as long as it is told to, and proves by ledgers on both
// sides that the library's promises hold. Client processes make calls of all kinds to server
// processes on loopback, which are killed, stopped, drained and restarted, and partly through
// proxies, which cut, reset, slow and throttle connections.
//
//	make soak-calls DURATION=3m   # from the root of the repository
//
// coordinator.go starts the processes and checks the ledgers, faults.go makes the faults,
// behaviour.go what servers do to calls, server.go and client.go are the two kinds of processes,
// call.go checks a call, profile.go the budgets, and check.go compares the ledgers. A violation ends
// the run with exit status 1; the message has the seed, the call and its timeline, and the ledgers
// are kept. The seed decides what calls and faults there are, but not when they meet.
//
// docs/reliability.md says what is proven.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime/pprof"
	"syscall"
	"time"
)

func main() {
	runChild()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, stop) // a second signal ends the program immediately, and the kernel its children
	err := command(ctx, os.Args[1:], os.Stdout)
	stop()
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "soak:", err)
		os.Exit(1)
	}
}

// runChild does what a child process does, and ends it. It returns if this is not a child process.
func runChild() {
	if text := os.Getenv(serverVariable); text != "" {
		config := new(serverConfig)
		if err := json.Unmarshal([]byte(text), config); err != nil {
			exitProcess("server", err)
		}
		exitProcess("server", serverProcess(config, os.Stdin, os.Stdout))
	}
	if text := os.Getenv(clientVariable); text != "" {
		config := new(clientConfig)
		if err := json.Unmarshal([]byte(text), config); err != nil {
			exitProcess("client", err)
		}
		exitProcess("client", clientProcess(config, os.Stdin, os.Stdout))
	}
}

// options are those of the command line, and some that only tests set.
type options struct {
	duration time.Duration
	calls    int64
	seed     uint64
	servers  int
	clients  int
	epoch    time.Duration // of the ledgers
	grace    time.Duration // after the last call
	dir      string
}

// command does what the arguments say.
func command(ctx context.Context, args []string, out io.Writer) error {
	o := options{epoch: 4 * time.Second, grace: grace}
	flags := flag.NewFlagSet("soak", flag.ContinueOnError)
	flags.DurationVar(&o.duration, "duration", 20*time.Second, "how long calls are made, at most 24h")
	flags.Int64Var(&o.calls, "calls", 100_000_000, "how many calls are made at most, all clients together")
	flags.Uint64Var(&o.seed, "seed", 0, "the seed of calls and faults; 0 for one from the clock")
	flags.IntVar(&o.servers, "servers", 3, "servers, 2 to 16")
	flags.IntVar(&o.clients, "clients", 2, "client processes, 1 to 16")
	page := flags.String("markdown", "", "also put the figures into this page, between its marks")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if err := o.check(flags.Args()); err != nil {
		return err
	}
	if o.seed == 0 {
		o.seed = uint64(time.Now().UnixNano())
	}
	fmt.Fprintf(out, "seed %d\n", o.seed)
	r, err := soak(ctx, o, out)
	if r != nil {
		fmt.Fprintf(out, "\n%s%s", r.markdown(), r.details())
	}
	if err != nil {
		return err
	}
	if *page != "" {
		return replaceBetweenMarks(*page, "soak", r.markdown())
	}
	return nil
}

func (o *options) check(rest []string) error {
	switch {
	case len(rest) > 0:
		return fmt.Errorf("unexpected argument %q", rest[0])
	case o.duration <= 0 || o.duration > 24*time.Hour:
		return fmt.Errorf("-duration is %v, want more than 0, and at most 24h", o.duration)
	case o.calls < 1:
		return fmt.Errorf("-calls is %d, want at least 1", o.calls)
	case o.servers < 2 || o.servers > 16:
		return fmt.Errorf("-servers is %d, want 2 to 16", o.servers)
	case o.clients < 1 || o.clients > 16:
		return fmt.Errorf("-clients is %d, want 1 to 16", o.clients)
	}
	return nil
}

// hardLimit is how long a run may take beyond its duration.
const hardLimit = 5 * time.Minute

// soak makes a run. Its ledgers are deleted unless something is wrong.
func soak(ctx context.Context, o options, out io.Writer) (*result, error) {
	dir, err := os.MkdirTemp(o.dir, "soak-")
	if err != nil {
		return nil, err
	}
	r := &run{options: o, dir: dir, out: out, failed: make(chan error, 1), counts: map[int]Counts{}}
	hangs := time.AfterFunc(o.duration+hardLimit, func() {
		_ = pprof.Lookup("goroutine").WriteTo(os.Stderr, 1)
		fmt.Fprintf(os.Stderr, "soak: the run hangs; its ledgers are in %s\n", dir)
		os.Exit(1)
	})
	defer hangs.Stop()
	result, err := r.soak(ctx)
	reader := violationReader{dir: dir}
	found, e := reader.next()
	err = errors.Join(err, e)
	for _, v := range found[:min(len(found), 20)] {
		fmt.Fprintf(out, "\n%v", v)
	}
	if len(found) > 0 {
		err = errors.Join(err, fmt.Errorf("%d violations, seed %d", len(found), o.seed))
	}
	if err != nil {
		return result, fmt.Errorf("%w; the ledgers are in %s", err, dir)
	}
	return result, os.RemoveAll(dir)
}
