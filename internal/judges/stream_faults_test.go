package judges_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/internal/goroutines"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// This file runs calls of all kinds over real connections that are lost, reset in the middle of a
// frame, stalled or half dead, to servers that stop and start, gracefully or not, while the
// application cancels, waits, or closes its ClientConn. Whatever happens, the outcome must be one
// that a single attempt on plain gRPC could have had: see faultCall.check.
//
// There are three exceptions. In a call that the policy gives one attempt, and so passes through,
// everything is gRPC's own, and only counted. If the application has cancelled the call, set a short
// deadline or closed the ClientConn, OnFinish and RecvMsg may disagree, as in plain gRPC: one reports
// that, the other a result that had arrived. RecvMsg is called again after the end only with the
// library: plain gRPC may then wait forever, see false_eof_test.go. With -faults.plain the test runs
// on plain gRPC and counts what would be findings, per 10,000 calls.

var (
	faultStreams = flag.Int("faults.streams", 120, "how many calls TestFaults makes")
	faultSeed    = flag.Uint64("faults.seed", 1,
		"the seed of TestFaults, 0 for one drawn from the clock, as in make soak; goroutines and connections still run in any order")
	faultPlain  = flag.Bool("faults.plain", false, "TestFaults uses plain gRPC, counts what would be a finding, and does not fail")
	faultWorlds = flag.Int("faults.worlds", 4, "how many servers and ClientConns TestFaults uses at a time")
)

const callsPerWorld = 40

// TestFaults makes random calls under random faults.
func TestFaults(t *testing.T) {
	before := goroutines.Now()
	seed := *faultSeed
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	t.Logf("seed %d", seed)
	start := time.Now()
	var findings faultFindings
	var world atomic.Int64
	var group sync.WaitGroup
	worlds := int64(*faultStreams+callsPerWorld-1) / callsPerWorld
	for range *faultWorlds {
		group.Go(func() {
			for n := world.Add(1); n <= worlds && !findings.fatal.Load(); n = world.Add(1) {
				playWorld(seed+uint64(n), &findings)
			}
		})
	}
	group.Wait()
	findings.report(t, time.Since(start))
	if findings.fatal.Load() {
		return
	}
	if err := goroutines.Left(before); err != nil {
		t.Error(err)
	}
}

// faultFindings is what was found.
type faultFindings struct {
	fatal    atomic.Bool // a call hangs: no world is begun any more
	mu       sync.Mutex
	calls    int                 // guarded by mu
	attempts int                 // likewise
	outcomes map[string]int      // likewise
	found    map[string][]string // likewise, by kind
	excused  map[string]int      // likewise
}

func (f *faultFindings) add(kind, text string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.found == nil {
		f.found = map[string][]string{}
	}
	f.found[kind] = append(f.found[kind], text)
}

func (f *faultFindings) report(t *testing.T, took time.Duration) {
	f.mu.Lock()
	defer f.mu.Unlock()
	t.Logf("%d calls in %v, %.0f per second, %d attempts", f.calls, took.Round(time.Millisecond),
		float64(f.calls)/took.Seconds(), f.attempts)
	for _, outcome := range slices.Sorted(maps.Keys(f.outcomes)) {
		t.Logf("  outcome %s: %d", outcome, f.outcomes[outcome])
	}
	for _, kind := range slices.Sorted(maps.Keys(f.excused)) {
		t.Logf("  as plain gRPC does: %s: %d, or %.1f in 10,000", kind, f.excused[kind], float64(f.excused[kind])*1e4/float64(f.calls))
	}
	for _, kind := range slices.Sorted(maps.Keys(f.found)) {
		texts := f.found[kind]
		text := fmt.Sprintf("%s: %d, or %.1f in 10,000; such as\n%s", kind, len(texts),
			float64(len(texts))*1e4/float64(f.calls), strings.Join(texts[:min(3, len(texts))], "\n"))
		if *faultPlain {
			t.Log(text)
		} else {
			t.Error(text)
		}
	}
}

// A faultWorld is servers, one after the other at the same address, a ClientConn, and what goes
// wrong between them.
type faultWorld struct {
	seed  uint64
	addr  string
	calls []*faultCall

	mu       sync.Mutex
	draw     *rand.Rand          // guarded by mu; of the connections
	server   *grpc.Server        // guarded by mu
	listener *chanListener       // guarded by mu; of the server
	conns    map[*faultConn]bool // guarded by mu; those of the client
	group    sync.WaitGroup
	over     chan struct{}
}

func playWorld(seed uint64, findings *faultFindings) {
	draw := rand.New(rand.NewPCG(seed, 1))
	w := &faultWorld{seed: seed, draw: rand.New(rand.NewPCG(seed, 2)), conns: map[*faultConn]bool{}, over: make(chan struct{})}
	front, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		findings.add("no listener", err.Error())
		return
	}
	w.addr = front.Addr().String()
	serverOptions := []grpc.ServerOption{grpc.UnknownServiceHandler(w.serve), grpc.InitialWindowSize(64 << 10),
		grpc.InitialConnWindowSize(64 << 10)}
	if draw.IntN(3) == 0 {
		serverOptions = append(serverOptions, grpc.MaxConcurrentStreams(uint32(5+draw.IntN(20))))
	}
	w.replaceServer(serverOptions)
	w.group.Go(func() {
		for {
			conn, err := front.Accept()
			if err != nil {
				return
			}
			w.group.Go(func() { w.accept(conn) })
		}
	})

	opts := []grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithContextDialer(w.dial), grpc.WithIdleTimeout(0),
		grpc.WithInitialWindowSize(64 << 10), grpc.WithInitialConnWindowSize(64 << 10),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.Config{BaseDelay: time.Millisecond, Multiplier: 1.5,
			MaxDelay: 20 * time.Millisecond}, MinConnectTimeout: time.Second}),
	}
	if !*faultPlain {
		opts = append(opts, grpcretry.DialOptions(grpcretry.WithBudget(grpcretry.Unlimited))...)
	}
	cc, err := grpc.NewClient("passthrough:///"+w.addr, opts...)
	if err != nil {
		findings.add("no client", err.Error())
		return
	}
	for i := range callsPerWorld {
		w.calls = append(w.calls, &faultCall{world: w, id: i, draw: rand.New(rand.NewPCG(seed, uint64(100+i)))})
	}
	var calls sync.WaitGroup
	for _, c := range w.calls {
		calls.Go(func() { c.run(cc) })
	}
	done := make(chan struct{})
	go func() { calls.Wait(); close(done) }()
	w.misbehave(draw, done, serverOptions, cc)
	select {
	case <-done:
	case <-time.After(time.Minute):
		findings.fatal.Store(true)
		stacks := make([]byte, 1<<22)
		stacks = stacks[:runtime.Stack(stacks, true)]
		for _, c := range w.calls {
			if text := c.unfinished(); text != "" {
				findings.add("hangs", text)
			}
		}
		findings.add("hangs", "all goroutines:\n"+string(stacks))
		return
	}
	cc.Close()
	w.mu.Lock()
	close(w.over)
	server := w.server
	w.mu.Unlock()
	front.Close()
	server.Stop()
	w.closeConns()
	w.group.Wait()
	for _, c := range w.calls {
		c.check(findings)
	}
}

// A chanListener has the connections of one server.
type chanListener struct {
	accepts chan net.Conn
	once    sync.Once
	closed  chan struct{}
	addr    net.Addr
}

func (l *chanListener) Accept() (net.Conn, error) {
	select {
	case conn := <-l.accepts:
		return conn, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

func (l *chanListener) Close() error { l.once.Do(func() { close(l.closed) }); return nil }

func (l *chanListener) Addr() net.Addr { return l.addr }

// accept gives a connection to the server.
func (w *faultWorld) accept(conn net.Conn) {
	for {
		w.mu.Lock()
		l := w.listener
		w.mu.Unlock()
		select {
		case l.accepts <- conn:
			return
		case <-l.closed: // there is another, or soon will be
			select {
			case <-time.After(time.Millisecond):
			case <-w.over:
				conn.Close()
				return
			}
		}
	}
}

// replaceServer starts a server, and returns the one that was.
func (w *faultWorld) replaceServer(opts []grpc.ServerOption) (old *grpc.Server) {
	l := &chanListener{accepts: make(chan net.Conn), closed: make(chan struct{}), addr: &net.TCPAddr{}}
	server := grpc.NewServer(opts...)
	w.group.Go(func() { server.Serve(l) })
	w.mu.Lock()
	defer w.mu.Unlock()
	old, w.server, w.listener = w.server, server, l
	return old
}

// misbehave does what servers and connections do, until the calls are done.
func (w *faultWorld) misbehave(draw *rand.Rand, done <-chan struct{}, opts []grpc.ServerOption, cc *grpc.ClientConn) {
	for range draw.IntN(8) {
		select {
		case <-done:
			return
		case <-time.After(time.Duration(1+draw.IntN(6000)) * time.Microsecond):
		}
		switch draw.IntN(8) {
		case 0, 1, 2:
			old := w.replaceServer(opts)
			w.group.Go(old.GracefulStop)
			w.group.Go(func() { // a handler may wait for a message that never comes
				select {
				case <-w.over:
				case <-time.After(5 * time.Second):
				}
				old.Stop()
			})
		case 3:
			w.replaceServer(opts).Stop()
		case 4, 5, 6:
			w.closeConns()
		case 7:
			if draw.IntN(8) == 0 {
				for _, c := range w.calls {
					c.excuse("the ClientConn was closed")
				}
				cc.Close()
			}
		}
	}
}

func (w *faultWorld) closeConns() {
	w.mu.Lock()
	conns := slices.Collect(maps.Keys(w.conns))
	w.mu.Unlock()
	for _, conn := range conns {
		conn.Close()
	}
}

func (w *faultWorld) dial(ctx context.Context, addr string) (net.Conn, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	c := &faultConn{Conn: conn, world: w, closed: make(chan struct{}), limit: -1}
	if w.draw.IntN(3) > 0 {
		c.fault = w.draw.IntN(faults)
		c.limit = w.draw.IntN([]int{100, 2000, 100 << 10}[w.draw.IntN(3)])
		c.stall = time.Duration(1+w.draw.IntN(30)) * time.Millisecond
	}
	w.conns[c] = true
	return c, nil
}

// What goes wrong with a connection once so many bytes have been written or read.
const (
	writeFails    = iota // reading goes on for a while
	resetInWrite         // in the middle of a frame, by TCP's RST
	resetInRead          // likewise
	stallInWrite         // for a while
	stallInRead          // likewise
	writesAreLost        // and the connection with them, after a while
	endInRead            // as if the server had closed it
	faults
)

// A faultConn is the client's end of a connection.
type faultConn struct {
	net.Conn
	world   *faultWorld
	fault   int
	limit   int // bytes until then; negative for never
	stall   time.Duration
	once    sync.Once
	closed  chan struct{}
	written int // of the goroutine that writes
	read    int // of the goroutine that reads
	broken  bool
	stalled bool // of the goroutine that writes
	resumed bool // of the goroutine that reads
}

func (c *faultConn) Close() error {
	c.once.Do(func() {
		close(c.closed)
		c.world.mu.Lock()
		delete(c.world.conns, c)
		c.world.mu.Unlock()
	})
	return c.Conn.Close()
}

func (c *faultConn) reset() {
	if tcp, ok := c.Conn.(*net.TCPConn); ok {
		tcp.SetLinger(0)
	}
	c.Conn.Close()
}

func (c *faultConn) wait() {
	select {
	case <-time.After(c.stall):
	case <-c.closed:
	}
}

var errFault = errors.New("the connection broke")

func (c *faultConn) Write(b []byte) (int, error) {
	if c.limit < 0 || c.written+len(b) <= c.limit {
		c.written += len(b)
		return c.Conn.Write(b)
	}
	before := max(0, c.limit-c.written)
	c.written += len(b)
	switch c.fault {
	case writeFails:
		if !c.broken {
			c.broken = true
			c.Conn.Write(b[:before])
			time.AfterFunc(c.stall, c.reset)
		}
		return 0, errFault
	case resetInWrite:
		c.Conn.Write(b[:before])
		c.reset()
		return 0, errFault
	case stallInWrite:
		if !c.stalled {
			c.stalled = true
			c.wait()
		}
	case writesAreLost:
		if !c.broken {
			c.broken = true
			time.AfterFunc(c.stall, c.reset)
		}
		return len(b), nil
	}
	return c.Conn.Write(b)
}

func (c *faultConn) Read(b []byte) (int, error) {
	if c.limit < 0 || c.fault == writeFails || c.fault == resetInWrite || c.fault == stallInWrite || c.fault == writesAreLost {
		return c.Conn.Read(b)
	}
	if c.read >= c.limit {
		switch c.fault {
		case resetInRead:
			c.reset()
			return 0, errFault
		case endInRead:
			c.Conn.Close()
			return 0, io.EOF
		case stallInRead:
			if !c.resumed {
				c.resumed = true
				c.wait()
			}
		}
	} else {
		b = b[:min(len(b), c.limit-c.read)]
	}
	n, err := c.Conn.Read(b)
	c.read += n
	return n, err
}

// A faultAttempt is what the server did and saw in one attempt.
type faultAttempt struct {
	mu       sync.Mutex
	name     string
	received []int // guarded by mu; the numbers of the messages
	all      bool  // guarded by mu; up to and including the end
	sent     int   // guarded by mu
	ended    bool  // guarded by mu
	err      error // guarded by mu; the status that it ended with
}

// serve draws what the server does in an attempt.
func (w *faultWorld) serve(_ any, stream grpc.ServerStream) error {
	md, _ := metadata.FromIncomingContext(stream.Context())
	id, err := strconv.Atoi(strings.Join(md.Get("call"), ""))
	if err != nil || id >= len(w.calls) {
		return status.Error(codes.InvalidArgument, "no such call")
	}
	c := w.calls[id]
	c.mu.Lock()
	number := len(c.attempts) + 1
	a := &faultAttempt{name: fmt.Sprintf("%d/%d", id, number)}
	c.attempts = append(c.attempts, a)
	c.mu.Unlock()
	err = a.play(stream, c, rand.New(rand.NewPCG(w.seed, uint64(1000*id+number))))
	a.mu.Lock()
	defer a.mu.Unlock()
	a.ended, a.err = true, err
	return err
}

func (a *faultAttempt) play(stream grpc.ServerStream, c *faultCall, draw *rand.Rand) error {
	single := c.kind == diffUnary || c.kind == diffClientStream
	for range draw.IntN(5) {
		switch draw.IntN(7) {
		case 0, 1:
			if err := a.receive(stream); err != nil {
				return err
			}
		case 2, 3:
			if !single {
				if err := a.send(stream, c, draw); err != nil {
					return err
				}
			}
		case 4:
			stream.SendHeader(metadata.Pairs("attempt", a.name))
		case 5:
			select {
			case <-time.After(time.Duration(1+draw.IntN(8000)) * time.Microsecond):
			case <-stream.Context().Done():
			}
		case 6:
			if draw.IntN(3) == 0 {
				code := []codes.Code{codes.Unavailable, codes.Unavailable, codes.ResourceExhausted, codes.NotFound}[draw.IntN(4)]
				return status.Error(code, "of attempt "+a.name)
			}
		}
	}
	for !a.all && draw.IntN(12) > 0 { // a server may answer without having read everything
		if err := a.receive(stream); err != nil {
			return err
		}
	}
	more := draw.IntN(4)
	if single {
		more = 1
	}
	for range more {
		if err := a.send(stream, c, draw); err != nil {
			return err
		}
	}
	return nil
}

func (a *faultAttempt) receive(stream grpc.ServerStream) error {
	if a.all {
		return nil
	}
	m := new(echov1.EchoRequest)
	err := stream.RecvMsg(m)
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case err == io.EOF:
		a.all = true
		return nil
	case err != nil:
		return status.Error(codes.Unavailable, "lost, in attempt "+a.name)
	}
	a.received = append(a.received, int(m.GetSequence()))
	return nil
}

func (a *faultAttempt) send(stream grpc.ServerStream, c *faultCall, draw *rand.Rand) error {
	a.mu.Lock()
	m := &echov1.EchoResponse{Message: fmt.Sprintf("%s/%d", a.name, a.sent), Payload: make([]byte, c.drawPayload(draw))}
	a.sent++
	a.mu.Unlock()
	if err := stream.SendMsg(m); err != nil {
		return status.Error(codes.Unavailable, "lost, in attempt "+a.name)
	}
	return nil
}

// drawPayload draws small sizes, and some that fill the windows.
func (c *faultCall) drawPayload(draw *rand.Rand) int {
	if draw.IntN(6) == 0 && (!c.alone || c.kind != diffBidi) {
		return draw.IntN(50 << 10)
	}
	return draw.IntN(200)
}

// A faultCall is one call of the application.
type faultCall struct {
	world  *faultWorld
	id     int
	draw   *rand.Rand // of the goroutine that runs the call
	kind   int
	passes bool // the policy allows no other attempt, so the call passes through
	alone  bool // one goroutine sends and receives, so a bidi stream has small messages

	mu       sync.Mutex
	attempts []*faultAttempt // guarded by mu
	excuses  []string        // guarded by mu; why the call may have been ended by the application
	sent     int             // guarded by mu; messages for which SendMsg returned nil
	refused  bool            // guarded by mu; SendMsg returned an error
	received []string        // guarded by mu
	policy   string          // guarded by mu
	now      map[string]bool // guarded by mu; methods that have not returned
	err      error           // guarded by mu; of RecvMsg, or of the call; nil for a client stream that succeeded
	again    error           // guarded by mu; of another RecvMsg
	sendErr  error
	finished []error       // guarded by mu; what OnFinish got
	onFinish chan struct{} // a value for each
}

func (c *faultCall) excuse(why string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.excuses = append(c.excuses, why)
}

// in tells that a method is called, out that it has returned.
func (c *faultCall) in(method string) (out func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.now == nil {
		c.now = map[string]bool{}
	}
	c.now[method] = true
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		delete(c.now, method)
	}
}

// unfinished describes a call that hangs.
func (c *faultCall) unfinished() string {
	c.mu.Lock()
	hangs := len(c.now) > 0
	c.mu.Unlock()
	if !hangs {
		return ""
	}
	return c.String()
}

func (c *faultCall) String() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	text := fmt.Sprintf("world %d, call %d, %s; %s; %s\n    sent %d (%v), received %q, then %v (%T), then %v; OnFinish %v; excuses %q; in %v",
		c.world.seed, c.id, diffKinds[c.kind],
		c.policy, "attempts as the server saw them below", c.sent, c.sendErr, c.received, c.err, c.err, c.again, c.finished, c.excuses,
		slices.Sorted(maps.Keys(c.now)))
	for _, a := range c.attempts {
		a.mu.Lock()
		text += fmt.Sprintf("\n    attempt %s: received %v, all %v; sent %d; ended %v with %v", a.name, a.received, a.all, a.sent,
			a.ended, a.err)
		a.mu.Unlock()
	}
	return text
}

// options draws the policy of the call.
func (c *faultCall) options() (opts []grpc.CallOption) {
	draw := c.draw
	add := func(text string, o grpcretry.CallOption) {
		c.policy += text + " "
		opts = append(opts, o)
	}
	attempts := 1 + draw.IntN(5)
	add(fmt.Sprintf("%d attempts", attempts), grpcretry.WithMaxAttempts(attempts))
	add("", grpcretry.WithBackoff(grpcretry.Constant(time.Duration(draw.IntN(2000))*time.Microsecond)))
	if draw.IntN(3) == 0 {
		d := time.Duration(1+draw.IntN(20)) * time.Millisecond
		add(fmt.Sprintf("attempt timeout %v", d), grpcretry.WithAttemptTimeout(d))
	}
	if draw.IntN(3) == 0 {
		limit := []int{1, 300, 100 << 10}[draw.IntN(3)]
		add(fmt.Sprintf("buffer %d", limit), grpcretry.WithBufferLimit(limit))
	}
	c.passes = attempts == 1
	if draw.IntN(3) == 0 {
		c.passes = c.passes && c.kind != diffUnary && c.kind != diffServerStream
		d := time.Duration(1+draw.IntN(5000)) * time.Microsecond
		add(fmt.Sprintf("hedging after %v", d),
			grpcretry.WithPolicy(grpcretry.Policy{MaxAttempts: 2,
				Hedging: &grpcretry.Hedging{Delay: grpcretry.HedgeAfter(d), Budget: grpcretry.Unlimited}}))
	}
	return opts
}

// run makes the call.
func (c *faultCall) run(cc *grpc.ClientConn) {
	defer c.in("run")()
	draw := c.draw
	c.kind, c.alone = draw.IntN(4), draw.IntN(2) == 0
	c.onFinish = make(chan struct{}, 100)
	opts := []grpc.CallOption{grpc.OnFinish(func(err error) {
		c.mu.Lock()
		c.finished = append(c.finished, err)
		c.mu.Unlock()
		c.onFinish <- struct{}{}
	})}
	retries := c.options()
	if !*faultPlain {
		opts = append(opts, retries...)
	}
	if draw.IntN(2) == 0 {
		opts = append(opts, grpc.WaitForReady(true))
	}
	timeout := 10 * time.Second
	if draw.IntN(10) == 0 {
		timeout = time.Duration(draw.IntN(30)) * time.Millisecond
		c.excuse("short timeout")
	}
	ctx, cancel := context.WithTimeout(metadata.AppendToOutgoingContext(context.Background(), "call", strconv.Itoa(c.id)), timeout)
	defer cancel()
	if draw.IntN(10) == 0 {
		c.excuse("cancelled")
		defer time.AfterFunc(time.Duration(1+draw.IntN(20000))*time.Microsecond, cancel).Stop()
	}
	// Calls start one after the other, so that some find what others have left.
	select {
	case <-time.After(time.Duration(1+draw.IntN(15000)) * time.Microsecond):
	case <-ctx.Done():
	}

	if c.kind == diffUnary {
		reply := new(echov1.EchoResponse)
		err := cc.Invoke(ctx, "/faults/Unary", &echov1.EchoRequest{Sequence: 1, Payload: make([]byte, c.drawPayload(draw))}, reply, opts...)
		c.mu.Lock()
		c.sent, c.err = 1, err
		if err == nil {
			c.received = append(c.received, reply.GetMessage())
		}
		c.mu.Unlock()
		return
	}
	desc := &grpc.StreamDesc{ClientStreams: c.kind != diffServerStream, ServerStreams: c.kind != diffClientStream}
	stream, err := cc.NewStream(ctx, desc, "/faults/Stream", opts...)
	if err != nil {
		c.mu.Lock()
		c.err = err
		c.mu.Unlock()
		return
	}
	var others sync.WaitGroup
	if draw.IntN(6) == 0 {
		which, wait := draw.IntN(3), time.Duration(1+draw.IntN(5000))*time.Microsecond
		others.Go(func() {
			select {
			case <-time.After(wait):
			case <-ctx.Done():
			}
			c.look(stream, which)
		})
	}
	sends, receives := rand.New(rand.NewPCG(draw.Uint64(), 0)), rand.New(rand.NewPCG(draw.Uint64(), 0))
	if c.kind != diffServerStream && !c.alone {
		others.Go(func() { c.send(ctx, stream, sends) })
	} else {
		c.send(ctx, stream, sends)
	}
	c.receive(ctx, stream, receives)
	others.Wait()
	if c.kind == diffServerStream || draw.IntN(2) == 0 { // a call that has ended needs no cancel
		select {
		case <-c.onFinish:
			c.onFinish <- struct{}{}
		case <-time.After(20 * time.Second):
		}
	}
}

func (c *faultCall) look(stream grpc.ClientStream, which int) {
	switch which {
	case 0:
		defer c.in("Header")()
		stream.Header()
	case 1:
		defer c.in("Context")()
		stream.Context()
	case 2:
		if c.passes || *faultPlain { // gRPC's own Trailer is for streams that have ended
			return
		}
		defer c.in("Trailer")()
		stream.Trailer()
	}
}

func (c *faultCall) send(ctx context.Context, stream grpc.ClientStream, draw *rand.Rand) {
	n := draw.IntN(8)
	if c.kind == diffServerStream {
		n = 1
	}
	for i := range n {
		pause(ctx, draw)
		m := &echov1.EchoRequest{Sequence: int64(i + 1), Payload: make([]byte, c.drawPayload(draw))}
		out := c.in("SendMsg")
		err := stream.SendMsg(m)
		out()
		c.mu.Lock()
		if err == nil {
			c.sent++
		} else {
			c.refused, c.sendErr = true, err
		}
		c.mu.Unlock()
		if err != nil {
			break
		}
		if draw.IntN(20) == 0 {
			c.look(stream, 1+draw.IntN(2)) // headers may come only after the last message
		}
	}
	pause(ctx, draw)
	defer c.in("CloseSend")()
	stream.CloseSend()
}

func pause(ctx context.Context, draw *rand.Rand) {
	if draw.IntN(4) == 0 {
		select {
		case <-time.After(time.Duration(1+draw.IntN(4000)) * time.Microsecond):
		case <-ctx.Done():
		}
	}
}

func (c *faultCall) receive(ctx context.Context, stream grpc.ClientStream, draw *rand.Rand) {
	for {
		pause(ctx, draw)
		if draw.IntN(20) == 0 {
			c.look(stream, draw.IntN(2))
		}
		m := new(echov1.EchoResponse)
		out := c.in("RecvMsg")
		err := stream.RecvMsg(m)
		out()
		c.mu.Lock()
		if err == nil {
			c.received = append(c.received, m.GetMessage())
		}
		c.err = err
		c.mu.Unlock()
		if err != nil || c.kind == diffClientStream {
			break
		}
	}
	if draw.IntN(4) == 0 && !*faultPlain && !c.passes { // plain gRPC may wait forever after a false end
		out := c.in("RecvMsg again")
		err := stream.RecvMsg(new(echov1.EchoResponse))
		out()
		c.mu.Lock()
		c.again = err
		if err == nil {
			c.again = errors.New("a message")
		}
		c.mu.Unlock()
	}
}

// check says whether the outcome of the call is one that a single attempt could have had:
//
//   - each attempt received a prefix of what was sent, in order;
//   - the messages that the application received are those of one attempt, from the first, in
//     order, none missing;
//   - if the call succeeded, the server ended that attempt with OK, the application received all
//     that it sent, and an attempt that read to the end received all that was sent;
//   - if it failed with a status of the server, an attempt ended with that, the one whose messages
//     were received if there are any;
//   - if it failed otherwise, the code is one for a lost connection, or says who gave up, and the
//     application had or the policy has an attempt timeout;
//   - OnFinish ran once, with the same result, and SendMsg failed with io.EOF at most.
func (c *faultCall) check(findings *faultFindings) {
	select {
	case <-c.onFinish:
	case <-time.After(5 * time.Second):
	}
	text := c.String()
	c.mu.Lock()
	defer c.mu.Unlock()
	findings.mu.Lock()
	findings.calls++
	findings.attempts += len(c.attempts)
	if findings.outcomes == nil {
		findings.outcomes = map[string]int{}
	}
	findings.outcomes[diffKinds[c.kind]+" "+c.outcome()]++
	findings.mu.Unlock()
	for _, kind := range c.faults() {
		if c.passes && !*faultPlain { // the library does nothing
			findings.mu.Lock()
			if findings.excused == nil {
				findings.excused = map[string]int{}
			}
			findings.excused[kind]++
			findings.mu.Unlock()
			continue
		}
		findings.add(kind, text)
	}
}

func (c *faultCall) single() bool { return c.kind == diffUnary || c.kind == diffClientStream }

func (c *faultCall) succeeded() bool { return c.err == nil || c.err == io.EOF && !c.single() }

func (c *faultCall) outcome() string {
	if c.succeeded() {
		return "OK"
	}
	return status.Code(c.err).String()
}

// faults needs mu.
func (c *faultCall) faults() (found []string) {
	add := func(format string, args ...any) { found = append(found, fmt.Sprintf(format, args...)) }
	for _, a := range c.attempts {
		a.mu.Lock()
		defer a.mu.Unlock()
		for i, number := range a.received {
			if number != i+1 {
				add("an attempt received other messages than were sent, or in another order")
				break
			}
		}
	}
	if len(c.finished) != 1 {
		add("OnFinish ran %d times", len(c.finished))
	} else if nilError := c.finished[0] == nil; nilError != c.succeeded() && len(c.excuses) == 0 {
		add("OnFinish got another result, nil: %v", nilError)
	}
	if c.sendErr != nil && c.sendErr != io.EOF && len(c.excuses) == 0 {
		add("SendMsg failed with something else than EOF")
	}
	if c.kind == diffServerStream && c.sendErr != nil {
		add("SendMsg of a server stream failed")
	}

	var from *faultAttempt // whose messages were received
	for i, m := range c.received {
		for _, a := range c.attempts {
			if i == 0 && m == a.name+"/0" {
				from = a
			}
		}
		if from == nil || m != fmt.Sprintf("%s/%d", from.name, i) {
			add("messages are missing, or of several attempts")
			return found
		}
	}
	switch {
	case c.single() && c.err == io.EOF:
		add("EOF from a call with one response")
	case c.succeeded():
		if from == nil {
			for _, a := range c.attempts {
				if a.ended && a.err == nil && a.sent == 0 {
					from = a
				}
			}
		}
		switch {
		case from == nil:
			add("success without messages, and no attempt did that")
		case !from.ended || from.err != nil:
			add("success, and the attempt did not end with OK")
		case from.sent != len(c.received):
			add("success, and messages are missing")
		case from.all && !c.refused && len(from.received) != c.sent:
			add("success, and the server has not received all that was sent")
		case from.all && c.refused:
			add("success, and the server has seen an end of the messages, but SendMsg has failed")
		}
	default:
		c.failureFaults(from, add)
	}
	if c.again == nil {
		return found
	}
	if c.again.Error() == "a message" || c.succeeded() != (c.again == io.EOF) && len(c.excuses) == 0 && c.kind != diffClientStream {
		add("after the end, RecvMsg returned something else")
	}
	return found
}

// failureFaults needs mu, also of the attempts.
func (c *faultCall) failureFaults(from *faultAttempt, add func(string, ...any)) {
	st, ok := status.FromError(c.err)
	if !ok {
		add("the error has no status")
		return
	}
	if len(c.excuses) > 0 && (st.Code() == codes.Canceled || st.Code() == codes.DeadlineExceeded) {
		return // the text has the status of an earlier attempt
	}
	if name, isServers := cutAttempt(st.Message()); isServers {
		for _, a := range c.attempts {
			if a.name != name {
				continue
			}
			if from != nil && a != from {
				add("a status of another attempt than the messages")
			}
			if !a.ended || status.Code(a.err) != st.Code() {
				add("a status that the attempt did not end with")
			}
			return
		}
		add("a status of no attempt")
		return
	}
	switch st.Code() {
	case codes.Unavailable:
	case codes.Canceled, codes.DeadlineExceeded:
		if len(c.excuses) == 0 && !errors.Is(c.err, grpcretry.ErrAttemptTimeout) {
			add("%v, although nobody gave up", st.Code())
		}
	default:
		add("an error that was not to be expected, %v %s", st.Code(), st.Message())
	}
}

// cutAttempt finds the attempt in a status message of the server, and in that of an error of the
// library that has it.
func cutAttempt(message string) (string, bool) {
	for _, words := range []string{"of attempt ", "lost, in attempt "} {
		if i := strings.LastIndex(message, words); i >= 0 {
			return message[i+len(words):], true
		}
	}
	return "", false
}
