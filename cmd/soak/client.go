package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"runtime/pprof"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/internal/reasons"
)

// This file is a client process. Its workers make one call after the other, and check each. Meanwhile
// ClientConns are replaced, policies are updated, and budgets are audited. Each call's record goes
// into the file of its epoch; when all calls of an epoch have ended, the process says so on its
// standard output. At the end it closes everything and looks for what is left over.

type clientConfig struct {
	Client    int // from 1
	Dir       string
	Seed      uint64
	Addresses []string // of servers, some through a proxy
	Direct    []string // of the same servers, without a proxy
	Epoch     time.Duration
	Calls     int64 // at most
}

// workers make the calls of one profile.
const workers = 48

// connsPerProfile is the number of ClientConns that a profile uses at a time.
const connsPerProfile = 3

type client struct {
	config   clientConfig
	profiles []*profile
	out      io.Writer
	started  atomic.Int64 // calls

	lag  atomic.Int64 // the longest time that a timer was late in the last seconds, in ns
	stop chan struct{}

	mu    sync.Mutex
	epoch *epoch // guarded by mu; the current one

	tally tally
}

// An epoch is some seconds of a client's calls.
type epoch struct {
	name epochName

	mu        sync.Mutex
	next      uint64 // guarded by mu; the place of the next call
	pending   int    // guarded by mu; calls that have not ended, and 1 while it is the current epoch
	records   *bufio.Writer
	timelines *bufio.Writer
	files     [2]*os.File
}

func newEpoch(dir string, name epochName) (*epoch, error) {
	e := &epoch{name: name, pending: 1}
	for i, file := range []string{name.clientFile(dir), name.timelineFile(dir)} {
		var err error
		if e.files[i], err = os.Create(file); err != nil {
			return nil, err
		}
	}
	e.records, e.timelines = bufio.NewWriter(e.files[0]), bufio.NewWriter(e.files[1])
	return e, nil
}

func (e *epoch) start() callID {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.pending++
	e.next++
	return newCallID(e.name.client, e.name.epoch, e.next-1)
}

// end writes a record. It reports whether it was the last of its epoch.
func (e *epoch) end(r *clientRecord, timeline string) (bool, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	var b [clientRecordSize]byte
	_, err := e.records.Write(r.append(b[:0]))
	if timeline != "" && err == nil {
		_, err = fmt.Fprintf(e.timelines, "%s\t%q\n", r.call, timeline)
	}
	return e.release(err)
}

// leave says that no further call of the epoch starts.
func (e *epoch) leave() (bool, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.release(nil)
}

func (e *epoch) release(err error) (last bool, _ error) {
	e.pending--
	if e.pending > 0 || err != nil {
		return false, err
	}
	return true, errors.Join(e.records.Flush(), e.timelines.Flush(), e.files[0].Close(), e.files[1].Close())
}

// clientProcess is what a client process does.
func clientProcess(config *clientConfig, in io.Reader, out io.Writer) error {
	c := &client{config: *config, out: out, stop: make(chan struct{})}
	c.tally.init()
	var err error
	if c.epoch, err = newEpoch(config.Dir, epochName{config.Client, 1}); err != nil {
		return err
	}
	if c.profiles, err = newProfiles(grpcretry.WithObserver(c.observe)); err != nil {
		return err
	}
	go c.obey(in)
	quiet, err := c.warmUp()
	if err != nil {
		return err
	}
	fmt.Fprintln(out, "ready")
	if err := c.load(); err != nil {
		return err
	}
	return c.finish(quiet)
}

// obey waits for the coordinator's word to stop.
func (c *client) obey(in io.Reader) {
	lines := bufio.NewScanner(in)
	stopped := false
	for lines.Scan() {
		switch lines.Text() {
		case "stop":
			if !stopped {
				close(c.stop)
			}
			stopped = true
		}
	}
	os.Exit(1) // the coordinator has ended
}

// observe is the observer of all Retriers.
func (c *client) observe(ctx context.Context, e grpcretry.Event) {
	call, _ := ctx.Value(callIn{}).(*call)
	if call == nil {
		return // the calls after the load
	}
	call.profile.count(call, &e)
	call.add(&e)
}

// count counts what the profile's budget depends on.
func (p *profile) count(c *call, e *grpcretry.Event) {
	switch e.Kind {
	case grpcretry.AttemptStart:
		c.mu.Lock()
		started, unsent := c.attempts()
		c.mu.Unlock()
		if started > unsent && !e.Attempt.Hedge { // an attempt before this one may have reached a server
			p.retried.Add(1)
		}
	case grpcretry.AttemptEnd:
		a := &e.Attempt
		switch code := a.Code(); {
		case a.Number > 1 && !a.Hedge && (a.Unsent || code == codes.OK):
			p.returned.Add(1)
		}
		switch a.Code() {
		case codes.OK, codes.InvalidArgument, codes.NotFound, codes.AlreadyExists, codes.PermissionDenied, codes.Unauthenticated,
			codes.FailedPrecondition, codes.OutOfRange, codes.Aborted, codes.Unimplemented:
			p.answered.Add(1)
		}
	}
}

// A rest is what a process holds when nothing happens.
type rest struct {
	goroutines int
	heap       uint64
}

func look() rest {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC() // finalizers have run
	runtime.ReadMemStats(&m)
	return rest{runtime.NumGoroutine(), m.HeapAlloc}
}

// warmUp makes and closes ClientConns, so that what gRPC keeps forever is there before the first look.
func (c *client) warmUp() (rest, error) {
	for _, p := range c.profiles {
		conn, err := p.dial(c.config.Direct)
		if err != nil {
			return rest{}, err
		}
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		conn.cc.Connect()
		for s := conn.cc.GetState(); s.String() != "READY" && conn.cc.WaitForStateChange(ctx, s); s = conn.cc.GetState() {
		}
		cancel()
		if err := conn.cc.Close(); err != nil {
			return rest{}, err
		}
	}
	c.settle(rest{goroutines: 4, heap: 1 << 40})
	return look(), nil
}

// load makes the calls, until the coordinator says stop or there have been enough.
func (c *client) load() error {
	for _, p := range c.profiles {
		if err := c.connect(p); err != nil {
			return err
		}
	}
	var group, calls sync.WaitGroup
	enough := make(chan struct{})
	every := func(d time.Duration, f func(draw *rand.Rand)) {
		draw := rand.New(rand.NewPCG(c.config.Seed, rand.Uint64()))
		group.Go(func() {
			for {
				timer := time.NewTimer(d/2 + time.Duration(draw.Int64N(int64(d))))
				select {
				case <-timer.C:
					f(draw)
				case <-enough:
					timer.Stop()
					return
				}
			}
		})
	}
	every(c.config.Epoch, func(*rand.Rand) { c.nextEpoch() })
	every(time.Second, func(*rand.Rand) { c.say() })
	every(250*time.Millisecond, func(*rand.Rand) { c.audit(false) })
	every(50*time.Millisecond, func(*rand.Rand) { c.measureLag() })
	for _, p := range c.profiles {
		every(500*time.Millisecond, func(draw *rand.Rand) { c.replaceConn(p, draw) })
		if p.updates {
			every(100*time.Millisecond, func(draw *rand.Rand) { c.update(p, draw) })
		}
		for w := range workers {
			calls.Go(func() { c.work(p, w) })
		}
	}
	calls.Wait()
	close(enough)
	group.Wait()
	return nil
}

// connect dials a profile's ClientConns.
func (c *client) connect(p *profile) error {
	p.conns = make([]atomic.Pointer[conn], connsPerProfile)
	for i := range p.conns {
		conn, err := p.dial(c.addresses(i))
		if err != nil {
			return err
		}
		p.conns[i].Store(conn)
	}
	return nil
}

// addresses returns all servers, beginning with another one for each n; one in three ClientConns goes
// without proxies.
func (c *client) addresses(n int) []string {
	all := c.config.Addresses
	if n%3 == 2 {
		all = c.config.Direct
	}
	i := (n/3 + n + c.config.Client) % len(all)
	return append(append([]string{}, all[i:]...), all[:i]...)
}

// work is what a worker does.
func (c *client) work(p *profile, worker int) {
	draw := rand.New(rand.NewPCG(c.config.Seed^uint64(c.config.Client)<<32, uint64(worker)<<32|uint64(len(p.name))))
	for {
		select {
		case <-c.stop:
			return
		default:
		}
		if c.started.Add(1) > c.config.Calls {
			return
		}
		c.mu.Lock()
		e := c.epoch
		id := e.start()
		c.mu.Unlock()
		c.call(p, e, id, p.conns[draw.IntN(len(p.conns))].Load())
	}
}

// call makes a call and checks it.
func (c *client) call(p *profile, e *epoch, id callID, on *conn) {
	draw := rand.New(rand.NewPCG(c.config.Seed, uint64(id)))
	made := &call{client: c, profile: p, conn: on, draw: draw, id: id, kind: drawKind(draw)}
	now := time.Now()
	made.prepare(now)
	p.inFlight.Add(1)
	err := made.run()
	p.inFlight.Add(-1)
	now = time.Now()
	excused := made.wasExcused || on.closed.Load()
	r := made.verify(err, excused, now)
	for _, what := range made.wrong {
		c.violation(id, made.kind, what, made.describe(err))
	}
	c.tally.count(made, err, now)
	timeline := ""
	if r.attempts > 1 || r.flags&flagOnce != 0 && r.attempts != 1 {
		timeline = made.describe(err)
	}
	c.ended(e.end(&r, timeline))(e)
}

// ended says that an epoch's last call has ended.
func (c *client) ended(last bool, err error) func(*epoch) {
	return func(e *epoch) {
		if err != nil {
			c.fail(fmt.Sprintf("the client's ledger cannot be written: %v", err))
		}
		if last {
			fmt.Fprintf(c.out, "epoch %d %d %d\n", e.name.client, e.name.epoch, e.next)
		}
	}
}

// nextEpoch begins another epoch.
func (c *client) nextEpoch() {
	c.mu.Lock()
	old := c.epoch
	e, err := newEpoch(c.config.Dir, epochName{c.config.Client, old.name.epoch + 1})
	if err == nil {
		c.epoch = e
	}
	c.mu.Unlock()
	if err != nil {
		c.fail(err.Error())
		return
	}
	c.ended(old.leave())(old)
}

// violation reports what is wrong with a call.
func (c *client) violation(id callID, k kind, what, timeline string) {
	violation{
		Who: fmt.Sprintf("client %d", c.config.Client), Call: id.String(), Kind: k.String(), What: what, Timeline: timeline, Seed: c.config.Seed,
	}.report(c.config.Dir)
}

// fail reports what is wrong with the process.
func (c *client) fail(what string) {
	violation{Who: fmt.Sprintf("client %d", c.config.Client), What: what, Seed: c.config.Seed}.report(c.config.Dir)
}

// audit checks the budgets.
func (c *client) audit(atEnd bool) {
	for _, p := range c.profiles {
		p.keep()
		for _, audit := range p.audits {
			if wrong := audit(p, atEnd); wrong != "" {
				c.fail(fmt.Sprintf("the budget of profile %q: %s", p.name, wrong))
			}
		}
	}
}

// update changes a profile's policy.
func (c *client) update(p *profile, draw *rand.Rand) {
	if err := p.retrier.Update(drawUpdate(draw)...); err != nil {
		c.fail(fmt.Sprintf("Update: %v", err))
	}
	c.tally.updates.Add(1)
}

// replaceConn closes one of a profile's ClientConns, now and then with calls in flight, and dials
// another one.
func (c *client) replaceConn(p *profile, draw *rand.Rand) {
	i := draw.IntN(len(p.conns))
	next, err := p.dial(c.addresses(draw.IntN(60)))
	if err != nil {
		c.fail(err.Error())
		return
	}
	old := p.conns[i].Swap(next)
	if draw.IntN(3) > 0 {
		select {
		case <-time.After(300 * time.Millisecond):
		case <-c.stop:
		}
	}
	old.closed.Store(true)
	if err := old.cc.Close(); err != nil {
		c.fail(fmt.Sprintf("closing a ClientConn: %v", err))
	}
	c.tally.conns.Add(1)
}

// measureLag measures how late timers are on this machine.
func (c *client) measureLag() {
	const d = 10 * time.Millisecond
	start := time.Now()
	<-time.After(d)
	late := int64(time.Since(start) - d)
	if old := c.lag.Load(); late < old {
		late = old - old/100 // forgotten slowly
	}
	c.lag.Store(late)
}

// slack is how much later than its deadline a call may return.
func (c *client) slack() time.Duration {
	return 5*time.Second + 20*time.Duration(c.lag.Load())
}

// say tells the coordinator what has been counted.
func (c *client) say() {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	c.tally.peak(m.HeapAlloc, runtime.NumGoroutine())
	text, err := json.Marshal(c.tally.counts())
	if err != nil {
		c.fail(err.Error())
		return
	}
	fmt.Fprintf(c.out, "tally %s\n", text)
}

// finish says what is left over when all calls have ended.
func (c *client) finish(quiet rest) error {
	c.mu.Lock()
	e := c.epoch
	c.mu.Unlock()
	c.ended(e.leave())(e)
	c.say()
	fmt.Fprintln(c.out, "idle") // servers now say what they hold
	c.checkBudgets()
	for _, p := range c.profiles {
		for i := range p.conns {
			if err := p.conns[i].Load().cc.Close(); err != nil {
				return err
			}
		}
	}
	left := c.settle(quiet)
	if left.goroutines > quiet.goroutines {
		c.fail(fmt.Sprintf("%d goroutines are left over, %d before the first call; they are in %s",
			left.goroutines, quiet.goroutines, c.dump("goroutine")))
	}
	if left.heap > quiet.heap+heapSlack {
		c.fail(fmt.Sprintf("the heap holds %d KiB, and %d KiB before the first call; the profile is %s",
			left.heap>>10, quiet.heap>>10, c.dump("heap")))
	}
	fmt.Fprintf(c.out, "done %d %d %d %d\n", quiet.goroutines, left.goroutines, quiet.heap, left.heap)
	return nil
}

// heapSlack is by how much the heap may grow: samples of a minute, buckets of budgets and quantiles.
const heapSlack = 8 << 20

// checkBudgets checks the budgets when no call is in flight.
func (c *client) checkBudgets() {
	for _, p := range c.profiles {
		if n := p.inFlight.Load(); n != 0 {
			c.fail(fmt.Sprintf("%d calls are in flight at the end", n))
		}
		if wrong := p.checkUsage(); wrong != "" {
			c.fail(fmt.Sprintf("profile %q: %s", p.name, wrong))
		}
	}
	c.audit(true)
}

// settle waits until the process holds no more than it did, and returns what it holds then.
func (c *client) settle(quiet rest) rest {
	left := look()
	for end := time.Now().Add(20 * time.Second); time.Now().Before(end); left = look() {
		if left.goroutines <= quiet.goroutines && left.heap <= quiet.heap+heapSlack {
			break
		}
		<-time.After(50 * time.Millisecond)
	}
	return left
}

// dump writes a profile into the ledger's folder, and returns its name.
func (c *client) dump(name string) string {
	var b bytes.Buffer
	debug := 0
	if name == "goroutine" {
		debug = 1
	}
	file := filepath.Join(c.config.Dir, fmt.Sprintf("%s-client-%d", name, c.config.Client))
	if err := pprof.Lookup(name).WriteTo(&b, debug); err != nil {
		return err.Error()
	}
	if err := os.WriteFile(file, b.Bytes(), 0o600); err != nil {
		return err.Error()
	}
	if name == "goroutine" {
		return file + ":\n" + strings.Join(strings.SplitN(b.String(), "\n", 60), "\n")
	}
	return file
}

// outcome names how a call ended, for the summary.
func outcome(err error) string {
	if e := new(grpcretry.Error); errors.As(err, &e) {
		return reasons.Of(e.Reason).Word
	}
	return status.Code(err).String()
}
