package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"sync"
	"sync/atomic"
	"time"

	toxiproxy "github.com/Shopify/toxiproxy/v2"
)

// A run is one soak.
type run struct {
	options   options
	dir       string // of the ledgers
	out       io.Writer
	toxiproxy *toxiproxy.ApiServer
	backends  []*backend
	clients   []*process
	processes atomic.Uint64 // server processes started
	faults    faultCount
	failed    chan error

	mu       sync.Mutex
	counts   map[int]Counts // guarded by mu; the latest of each client
	facts    epochFacts     // guarded by mu
	waiting  []waitingEpoch // guarded by mu; epochs that have ended and are still to be checked
	reported int            // violations of the ledgers that were reported
	left     []string
	idle     int
}

// A waitingEpoch is an epoch whose calls have ended, but whose attempts may still reach a server.
type waitingEpoch struct {
	name  epochName
	calls uint64
	ended time.Time
}

// fail ends the run because something is wrong with the soak itself, or with a process.
func (r *run) fail(err error) {
	select {
	case r.failed <- err:
	default:
	}
}

// soak runs everything, and returns what was counted.
func (r *run) soak(ctx context.Context) (*result, error) {
	defer r.stopAll()
	if err := r.startBackends(); err != nil {
		return nil, err
	}
	if err := r.startClients(ctx); err != nil {
		return nil, err
	}
	start := time.Now()
	err := r.disturb(ctx)
	took := time.Since(start)
	if err == nil {
		err = r.finish()
	}
	return r.result(took), err
}

func (r *run) startBackends() error {
	addresses, err := freeAddresses(2 * r.options.servers)
	if err != nil {
		return err
	}
	draw := r.drawFor(1)
	r.toxiproxy = newToxiproxy()
	for i := range r.options.servers {
		r.backends = append(r.backends, &backend{run: r, number: i, address: addresses[2*i], front: addresses[2*i+1]})
	}
	for _, b := range r.backends {
		if err := b.start(draw); err != nil {
			return err
		}
		if err := b.startProxy(""); err != nil {
			return err
		}
	}
	return nil
}

func (r *run) drawFor(what uint64) *rand.Rand { return rand.New(rand.NewPCG(r.options.seed, what)) }

func (r *run) startClients(ctx context.Context) error {
	config := clientConfig{Dir: r.dir, Seed: r.options.seed, Epoch: r.options.epoch}
	for _, b := range r.backends {
		config.Addresses = append(config.Addresses, b.front)
		config.Direct = append(config.Direct, b.address)
	}
	for i := range r.options.clients {
		config.Client = i + 1
		config.Calls = (r.options.calls + int64(r.options.clients) - 1) / int64(r.options.clients)
		p, err := startProcess(fmt.Sprintf("client %d", config.Client), clientVariable, config, r.fail)
		if err != nil {
			return err
		}
		r.clients = append(r.clients, p)
	}
	for i, p := range r.clients {
		if _, err := p.await(ctx, "ready"); err != nil {
			return err
		}
		go r.followClient(i, p)
	}
	return nil
}

// followClient reads what a client says.
func (r *run) followClient(i int, p *process) {
	for l := range p.lines {
		if err := r.heard(i, p, l); err != nil {
			r.fail(fmt.Errorf("client %d wrote %q: %w", i+1, l.word+" "+l.value, err))
		}
	}
}

func (r *run) heard(i int, p *process, l line) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	switch l.word {
	case "tally":
		var c Counts
		if err := json.Unmarshal([]byte(l.value), &c); err != nil {
			return err
		}
		r.counts[i] = c
	case "epoch":
		w := waitingEpoch{ended: time.Now()}
		if _, err := fmt.Sscan(l.value, &w.name.client, &w.name.epoch, &w.calls); err != nil {
			return err
		}
		r.waiting = append(r.waiting, w)
	case "idle":
		p.expected.Store(true)
		r.idle++
	case "done":
		r.left = append(r.left, l.value)
	default:
		return errors.New("unknown word")
	}
	return nil
}

// disturb makes faults until time is up, the calls are made, or something is wrong.
func (r *run) disturb(ctx context.Context) error {
	faulting, stop := context.WithCancel(ctx)
	defer stop()
	var group sync.WaitGroup
	for i, b := range r.backends {
		for j, hurt := range []func(context.Context, *rand.Rand) error{b.hurtServer, b.hurtConnections} {
			group.Go(func() {
				if err := hurt(faulting, r.drawFor(uint64(10+2*i+j))); err != nil {
					r.fail(err)
				}
			})
		}
	}
	err := r.watch(ctx)
	stop()
	group.Wait()
	return err
}

// watch checks the ledgers while calls are made.
func (r *run) watch(ctx context.Context) error {
	end := time.NewTimer(r.options.duration)
	defer end.Stop()
	tick := time.NewTicker(500 * time.Millisecond)
	defer tick.Stop()
	violations := violationReader{dir: r.dir}
	for said := time.Now(); ; {
		select {
		case <-end.C:
			return nil
		case err := <-r.failed:
			return err
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
		}
		if err := r.checkEpochs(grace); err != nil {
			return err
		}
		if found, err := violations.next(); err != nil || len(found) > 0 {
			return err // result reads them again
		}
		r.mu.Lock()
		idle := r.idle == len(r.clients)
		r.mu.Unlock()
		if idle {
			return nil
		}
		if time.Since(said) > 10*time.Second {
			said = time.Now()
			c := r.total()
			fmt.Fprintf(r.out, "%d calls, %d retries, %d hedges\n", c.Calls, c.Retries, c.Hedges)
		}
	}
}

// grace is how long after a call an attempt of it may still reach a server: one that is stopped, or
// behind a connection that is slow.
const grace = 6 * time.Second

// checkEpochs checks and deletes the ledgers of the epochs that ended long enough ago.
func (r *run) checkEpochs(after time.Duration) error {
	for {
		r.mu.Lock()
		if len(r.waiting) == 0 || time.Since(r.waiting[0].ended) < after {
			r.mu.Unlock()
			return nil
		}
		w := r.waiting[0]
		r.waiting = r.waiting[1:]
		r.mu.Unlock()
		if err := r.checkEpoch(w); err != nil {
			return err
		}
	}
}

func (r *run) checkEpoch(w waitingEpoch) error {
	client, err := w.name.readClient(r.dir)
	if err != nil {
		return err
	}
	server, err := w.name.readServer(r.dir)
	if err != nil {
		return err
	}
	found := false
	c := checker{violation: func(id callID, what string, server []serverRecord) {
		found = true
		if r.reported++; r.reported <= 20 {
			violation{
				Who: "the ledgers", Call: id.String(), What: what, Seed: r.options.seed,
				Timeline: describe(server) + "\n" + w.name.timeline(r.dir, id),
			}.report(r.dir)
		}
	}}
	facts := c.check(w.name, w.calls, client, server)
	r.mu.Lock()
	r.facts.calls += facts.calls
	r.facts.acknowledged += facts.acknowledged
	r.facts.runs += facts.runs
	r.facts.refused += facts.refused
	r.mu.Unlock()
	if found {
		return nil // the files are kept
	}
	return w.name.remove(r.dir)
}

// finish stops the load, and checks what is left.
func (r *run) finish() error {
	for _, p := range r.clients {
		if err := p.tell("stop"); err != nil && !p.expected.Load() {
			return err
		}
	}
	if err := r.await("the last calls ended", func() bool { return r.idle == len(r.clients) }); err != nil {
		return err
	}
	if err := r.checkServers(); err != nil {
		return err
	}
	if err := r.await("the clients ended", func() bool { return len(r.left) == len(r.clients) }); err != nil {
		return err
	}
	last := time.Now()
	for _, w := range r.waiting {
		last = maxTime(last, w.ended)
	}
	sleep(context.Background(), time.Until(last.Add(r.options.grace)))
	if err := r.checkEpochs(0); err != nil {
		return err
	}
	if c := r.total(); c.Calls >= callsForFeatures {
		for _, name := range c.missed() {
			violation{Who: "the coordinator", Seed: r.options.seed, What: fmt.Sprintf("none of %d calls %q", c.Calls, name)}.report(r.dir)
		}
	}
	return r.checkLate()
}

// callsForFeatures is how many calls are sure to meet every feature.
const callsForFeatures = 200_000

func maxTime(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// await waits until something holds.
func (r *run) await(what string, holds func() bool) error {
	end := time.Now().Add(90 * time.Second)
	for {
		r.mu.Lock()
		ok := holds()
		r.mu.Unlock()
		if ok {
			return nil
		}
		select {
		case err := <-r.failed:
			return err
		case <-time.After(20 * time.Millisecond):
		}
		if time.Now().After(end) {
			return fmt.Errorf("90s have passed before %s", what)
		}
	}
}

// checkServers checks that no server has a handler that runs, when no client has a call.
func (r *run) checkServers() error {
	ctx, cancel := context.WithTimeoutCause(context.Background(), 30*time.Second, errors.New("no report from a server within 30s"))
	defer cancel()
	for _, b := range r.backends {
		var report serverReport
		for end := time.Now().Add(10 * time.Second); ; {
			if err := b.server.tell("report"); err != nil {
				return err
			}
			text, err := b.server.await(ctx, "report")
			if err != nil {
				return err
			}
			if err := json.Unmarshal([]byte(text), &report); err != nil {
				return err
			}
			if report.Handlers == 0 || time.Now().After(end) {
				break
			}
			sleep(ctx, 20*time.Millisecond)
		}
		if report.Handlers > 0 {
			violation{
				Who: "the coordinator", Seed: r.options.seed,
				What: fmt.Sprintf("%d streams are open on %s 10s after the last call ended", report.Handlers, b.server.name),
			}.report(r.dir)
		}
	}
	return nil
}

// checkLate looks for records that came after their epoch was checked.
func (r *run) checkLate() error {
	entries, err := os.ReadDir(r.dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		var name epochName
		if n, _ := fmt.Sscanf(e.Name(), "server-%d-%d", &name.client, &name.epoch); n == 2 {
			records, err := name.readServer(r.dir)
			if err != nil {
				return err
			}
			r.facts.late += len(records)
		}
	}
	return nil
}

// stopAll ends all processes.
func (r *run) stopAll() {
	for _, p := range r.clients {
		p.kill()
	}
	for _, b := range r.backends {
		if b.server != nil {
			b.server.kill()
		}
		if b.proxy != nil {
			b.stopProxy()
		}
	}
}

// total adds up what the clients have counted.
func (r *run) total() Counts {
	r.mu.Lock()
	defer r.mu.Unlock()
	var c Counts
	for _, of := range r.counts {
		c.add(of)
	}
	return c
}
