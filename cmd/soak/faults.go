package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	toxiproxy "github.com/Shopify/toxiproxy/v2"
	"github.com/rs/zerolog"
)

// A faultCount counts faults by kind.
type faultCount struct {
	mu     sync.Mutex
	counts map[string]int64 // guarded by mu
}

func (f *faultCount) add(kind string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.counts == nil {
		f.counts = map[string]int64{}
	}
	f.counts[kind]++
}

// A backend is one address at which server processes follow one another, and the proxy before it.
type backend struct {
	run     *run
	number  int
	address string // of the servers
	front   string // of the proxy

	mu     sync.Mutex // held while the process is replaced
	server *process   // guarded by mu
	proxy  *toxiproxy.Proxy
}

// between returns a random time.
func between(draw *rand.Rand, least, most time.Duration) time.Duration {
	return least + time.Duration(draw.Int64N(int64(most-least)))
}

// sleep waits, and reports whether the run goes on.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// hurtServer makes the faults of one server, one after the other, until ctx ends; then the server
// runs.
func (b *backend) hurtServer(ctx context.Context, draw *rand.Rand) error {
	for sleep(ctx, between(draw, 200*time.Millisecond, 1200*time.Millisecond)) {
		switch draw.IntN(6) {
		case 0, 1:
			b.run.faults.add("server killed (SIGKILL)")
			b.current().kill()
			sleep(ctx, between(draw, 0, 400*time.Millisecond))
			if err := b.start(draw); err != nil {
				return err
			}
		case 2:
			b.run.faults.add("server stopped (SIGSTOP) and continued")
			p := b.current()
			if err := suspend(p.cmd.Process); err != nil {
				return err
			}
			sleep(ctx, between(draw, 20*time.Millisecond, 700*time.Millisecond))
			if err := resume(p.cmd.Process); err != nil {
				return err
			}
		case 3, 4:
			b.run.faults.add("server drained (GOAWAY) and restarted")
			if err := b.drain(); err != nil {
				return err
			}
			if err := b.start(draw); err != nil {
				return err
			}
		case 5:
			b.run.faults.add("pushback storm")
			if err := b.current().tell("storm %v", between(draw, 50*time.Millisecond, 600*time.Millisecond)); err != nil {
				return err
			}
		}
	}
	return nil
}

func (b *backend) current() *process {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.server
}

// drain has the server end in an orderly way.
func (b *backend) drain() error {
	p := b.current()
	p.expected.Store(true)
	if err := p.tell("drain"); err != nil {
		return err
	}
	select {
	case <-p.ended:
		return p.exit
	case <-time.After(15 * time.Second):
		p.kill()
		return fmt.Errorf("%s has not ended 15s after it was told to drain", p.name)
	}
}

// start starts another server process.
func (b *backend) start(draw *rand.Rand) error {
	config := serverConfig{
		Process: b.run.processes.Add(1), Address: b.address, Next: b.run.backends[(b.number+1)%len(b.run.backends)].address,
		Dir: b.run.dir, Seed: b.run.options.seed,
		MaxAge: between(draw, time.Second, 6*time.Second),
	}
	if draw.IntN(3) == 0 {
		config.Streams = uint32(5 + draw.IntN(40))
	}
	p, err := startProcess(fmt.Sprintf("server process %d", config.Process), serverVariable, config, b.run.fail)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(context.Background(), 15*time.Second, fmt.Errorf("%s does not listen after 15s", p.name))
	defer cancel()
	if _, err := p.await(ctx, "listening"); err != nil {
		p.kill()
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.server = p
	return nil
}

// A toxic is a fault of connections that toxiproxy makes.
type toxic struct {
	name   string
	text   func(draw *rand.Rand) string // its attributes
	closes bool                         // it closes connections, so it is there from their start
}

var toxics = []toxic{
	{"latency", func(draw *rand.Rand) string {
		return fmt.Sprintf(`"latency": %d, "jitter": %d`, 1+draw.IntN(40), draw.IntN(20))
	}, false},
	{"bandwidth", func(draw *rand.Rand) string { return fmt.Sprintf(`"rate": %d`, 20+draw.IntN(500)) }, false},
	{"slow_close", func(draw *rand.Rand) string { return fmt.Sprintf(`"delay": %d`, 10+draw.IntN(300)) }, true},
	{"timeout", func(draw *rand.Rand) string { return fmt.Sprintf(`"timeout": %d`, 1+draw.IntN(300)) }, true},
	{"reset_peer", func(draw *rand.Rand) string { return fmt.Sprintf(`"timeout": %d`, draw.IntN(100)) }, true},
	{"limit_data", func(draw *rand.Rand) string { return fmt.Sprintf(`"bytes": %d`, 100+draw.IntN(20000)) }, true},
	{"slicer", func(draw *rand.Rand) string {
		return fmt.Sprintf(`"average_size": %d, "size_variation": %d, "delay": %d`, 20+draw.IntN(200), 10, draw.IntN(50))
	}, false},
}

// hurtConnections makes the faults of one proxy, one after the other, until ctx ends; then the
// proxy only passes bytes on.
func (b *backend) hurtConnections(ctx context.Context, draw *rand.Rand) error {
	for sleep(ctx, between(draw, 100*time.Millisecond, 800*time.Millisecond)) {
		switch n := draw.IntN(len(toxics) + 2); n {
		case len(toxics):
			b.run.faults.add("connections cut")
			if err := b.cut(ctx, 0); err != nil {
				return err
			}
		case len(toxics) + 1:
			b.run.faults.add("proxy disabled and enabled")
			if err := b.cut(ctx, between(draw, 10*time.Millisecond, 400*time.Millisecond)); err != nil {
				return err
			}
		default:
			if err := b.poison(ctx, draw, &toxics[n]); err != nil {
				return err
			}
		}
	}
	return nil
}

// cut cuts all connections, and lets none through for a time.
func (b *backend) cut(ctx context.Context, d time.Duration) error {
	b.stopProxy()
	sleep(ctx, d)
	return b.startProxy("")
}

// stopProxy stops the proxy. Toxiproxy can lock itself up, with a connection that is stuck; then the
// proxy listens no more, and is left as it is, with its connections.
func (b *backend) stopProxy() {
	proxy, stopped := b.proxy, make(chan error, 1)
	go func() { proxy.Stop(); stopped <- nil }()
	if ok, _ := inTime(stopped); !ok {
		b.run.faults.add("connections stuck in the proxy for good")
	}
}

// startProxy starts another proxy, with a toxic for all its connections, unless that is "". For a
// moment the port may still be in use: a process that is just being started has inherited the
// listener, and closes it a little later.
func (b *backend) startProxy(toxic string) (err error) {
	for end := time.Now().Add(5 * time.Second); time.Now().Before(end); sleep(context.Background(), 5*time.Millisecond) {
		b.proxy = toxiproxy.NewProxy(b.run.toxiproxy, fmt.Sprintf("server %d", b.number), b.front, b.address)
		if toxic != "" {
			if _, err := b.proxy.Toxics.AddToxicJson(strings.NewReader(toxic)); err != nil {
				return err
			}
		}
		if err = b.proxy.Start(); err == nil {
			return nil
		}
	}
	return err
}

// poison applies a toxic for a time.
func (b *backend) poison(ctx context.Context, draw *rand.Rand, t *toxic) error {
	direction := "downstream"
	if draw.IntN(2) == 0 {
		direction = "upstream"
	}
	b.run.faults.add("toxic " + t.name)
	text := fmt.Sprintf(`{"name": "toxic", "type": %q, "stream": %q, "attributes": {%s}}`, t.name, direction, t.text(draw))
	if t.closes {
		b.stopProxy()
		if err := b.startProxy(text); err != nil {
			return err
		}
		sleep(ctx, between(draw, 20*time.Millisecond, 600*time.Millisecond))
		return b.cut(ctx, 0)
	}
	proxy, added := b.proxy, make(chan error, 1)
	go func() {
		_, err := proxy.Toxics.AddToxicJson(strings.NewReader(text))
		added <- err
	}()
	if ok, err := inTime(added); !ok || err != nil {
		return errors.Join(err, b.cut(ctx, 0))
	}
	sleep(ctx, between(draw, 20*time.Millisecond, 600*time.Millisecond))
	removed := make(chan error, 1)
	go func() { removed <- proxy.Toxics.RemoveToxic(context.Background(), "toxic") }()
	if ok, err := inTime(removed); !ok || err != nil {
		return errors.Join(err, b.cut(ctx, 0))
	}
	return nil
}

// inTime reports whether something has been done in time. Toxiproxy waits for a connection that is
// stuck before it changes the toxics of the others.
func inTime(done <-chan error) (bool, error) {
	select {
	case err := <-done:
		return true, err
	case <-time.After(2 * time.Second):
		return false, nil
	}
}

func newToxiproxy() *toxiproxy.ApiServer {
	zerolog.SetGlobalLevel(zerolog.Disabled) // one toxic has a logger of its own
	return toxiproxy.NewServer(toxiproxy.NewMetricsContainer(nil), zerolog.Nop())
}
