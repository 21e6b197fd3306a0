package grpcretry

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"math"
	"math/rand/v2"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// This file proves WithUnsentOnly over real connections: calls of all kinds go through a proxy that
// breaks connections before, during and after the request, to servers that stop and start, lose
// responses, send GOAWAYs and hang. No handler may run twice for a call, unless the server has asked
// for it, and calls that reached no server must be rescued. The same calls without the option show
// that the proxy is nasty enough.

var unsentCalls = flag.Int("unsent.calls", 1000, "how many calls TestNothingRunsTwice makes")

func TestNothingRunsTwice(t *testing.T) {
	calls := *unsentCalls
	on := runOnceWorld(t, calls, WithUnsentOnly(true))
	off := runOnceWorld(t, max(calls/5, 200))
	t.Logf("with UnsentOnly: %v", on)
	t.Logf("without:         %v", off)
	if on.twice > 0 {
		t.Errorf("%d handlers ran twice, such as those of %v", on.twice, on.examples)
	}
	if want := calls / 200; on.rescued < want || on.mayHaveRun < want {
		t.Errorf("%d calls were rescued and %d not retried because they may have run, want at least %d of each",
			on.rescued, on.mayHaveRun, want)
	}
	if off.twice == 0 {
		t.Errorf("without UnsentOnly no handler of %d calls ran twice: the test proves nothing", off.calls)
	}
}

// A onceTally has the number of calls of each fate.
type onceTally struct {
	calls      int
	succeeded  int
	rescued    int // succeeded after an attempt that failed, and the server had not asked for another
	asked      int // were asked for again by the server
	mayHaveRun int // were not retried, because they may have run
	ranNowhere int // failed, and no handler ran
	twice      int // ran more often than the server had asked for
	examples   []string
	outcomes   map[string]int
}

func (c *onceTally) String() string {
	return fmt.Sprintf("%d calls, %d succeeded, %d rescued, %d asked for again, %d not retried, %d failed and ran nowhere, %d ran twice; outcomes %v",
		c.calls, c.succeeded, c.rescued, c.asked, c.mayHaveRun, c.ranNowhere, c.twice, c.outcomes)
}

// A onceWorld is a server, which is replaced now and then, and the proxy before it.
type onceWorld struct {
	group     sync.WaitGroup
	over      chan struct{}
	succeeded chan struct{} // has a few of the calls that succeeded while nobody waited for that
	front     net.Listener
	calls     []onceCall

	refusing atomic.Bool // the proxy resets new connections

	mu      sync.Mutex
	closed  bool              // guarded by mu
	backend string            // guarded by mu; the server's address, empty while there is none
	conns   map[net.Conn]bool // guarded by mu; all ends of all connections of the proxy
}

// A onceCall is what has happened to one call.
type onceCall struct {
	ran, asked atomic.Int32
	outcome    atomic.Pointer[string]
}

func runOnceWorld(t *testing.T, calls int, opts ...Option) *onceTally {
	t.Helper()
	front, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	w := &onceWorld{over: make(chan struct{}), succeeded: make(chan struct{}, 8), front: front, calls: make([]onceCall, calls), conns: map[net.Conn]bool{}}
	w.group.Go(w.accept)
	w.group.Go(w.misbehave)
	errs := w.callAll(t, opts)
	close(w.over)
	front.Close()
	w.mu.Lock()
	w.closed = true
	w.mu.Unlock()
	w.cutAll()
	w.group.Wait()
	return w.count(errs)
}

func (w *onceWorld) count(errs []error) *onceTally {
	all := &onceTally{calls: len(w.calls), outcomes: map[string]int{}}
	for i := range w.calls {
		c, err := &w.calls[i], errs[i]
		ran, asked, outcome := c.ran.Load(), c.asked.Load(), "passed"
		if name := c.outcome.Load(); name != nil {
			outcome = *name
		}
		all.outcomes[outcome]++
		switch {
		case err == nil:
			all.succeeded++
			if outcome == outcomeRecovered && asked == 0 {
				all.rescued++
			}
		case ran == 0:
			all.ranNowhere++
		}
		if asked > 0 {
			all.asked++
		}
		if outcome == ReasonName(errMayHaveRun) {
			all.mayHaveRun++
		}
		if ran > 1+asked {
			all.twice++
			if len(all.examples) < 5 {
				all.examples = append(all.examples, fmt.Sprintf("call %d, which ran %d times, was asked for %d times and ended with %v (%s)",
					i, ran, asked, err, outcome))
			}
		}
	}
	return all
}

func (w *onceWorld) noteSuccess() {
	select {
	case w.succeeded <- struct{}{}:
	default:
	}
}

// awaitCalls waits until some calls have succeeded, or none does any more. So a slow machine has no
// more faults per call than a fast one.
func (w *onceWorld) awaitCalls(n int) bool {
	stuck := time.NewTimer(200 * ms)
	defer stuck.Stop()
	for range n {
		select {
		case <-w.succeeded:
		case <-stuck.C:
			return true
		case <-w.over:
			return false
		}
	}
	return true
}

func upTo(d time.Duration) time.Duration { return rand.N(d) }

const ms = time.Millisecond

// misbehave starts servers one after the other, and cuts connections.
func (w *onceWorld) misbehave() {
	for {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return
		}
		server := grpc.NewServer(grpc.UnknownServiceHandler(w.handle), grpc.MaxConcurrentStreams(uint32(2+rand.IntN(30))),
			grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionAge: 10*ms + upTo(500*ms), MaxConnectionAgeGrace: ms + upTo(20*ms)}))
		w.group.Go(func() { _ = server.Serve(listener) })
		w.setBackend(listener.Addr().String())
		alive := true
		for range 1 + rand.IntN(6) {
			if alive = w.awaitCalls(1 + rand.IntN(120)); !alive {
				break
			}
			w.hurt()
		}
		if rand.IntN(2) == 0 {
			w.setBackend("") // so that nothing reconnects while it stops
		}
		if alive && rand.IntN(2) == 0 {
			w.group.Go(server.GracefulStop)
			alive = elapsed(upTo(15*ms), w.over)
		}
		server.Stop()
		w.setBackend("")
		if !alive || !elapsed(upTo(20*ms), w.over) {
			return
		}
	}
}

// hurt does one thing to the connections.
func (w *onceWorld) hurt() {
	switch rand.IntN(4) {
	case 0:
		w.cutAll()
	case 1:
		w.refusing.Store(true)
		w.cutAll()
		elapsed(upTo(20*ms), w.over)
		w.refusing.Store(false)
	case 2:
		w.refusing.Store(true) // for new connections only
		elapsed(upTo(10*ms), w.over)
		w.refusing.Store(false)
	}
}

func (w *onceWorld) setBackend(addr string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.backend = addr
}

// keep adds a connection to those that are cut; it returns false if the test is over.
func (w *onceWorld) keep(conn net.Conn) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.closed {
		w.conns[conn] = true
	}
	return !w.closed
}

// cut ends a connection: with a reset, or in good order.
func (w *onceWorld) cut(conn net.Conn) {
	w.mu.Lock()
	delete(w.conns, conn)
	w.mu.Unlock()
	if tcp, ok := conn.(*net.TCPConn); ok && rand.IntN(2) == 0 {
		_ = tcp.SetLinger(0)
	}
	conn.Close()
}

func (w *onceWorld) cutAll() {
	w.mu.Lock()
	all := maps.Clone(w.conns)
	w.mu.Unlock()
	for conn := range all {
		w.cut(conn)
	}
}

// cutOne cuts any of the connections.
func (w *onceWorld) cutOne() {
	w.mu.Lock()
	var one net.Conn
	for one = range w.conns {
		break
	}
	w.mu.Unlock()
	if one != nil {
		w.cut(one)
	}
}

// accept is the proxy.
func (w *onceWorld) accept() {
	for {
		conn, err := w.front.Accept()
		if err != nil {
			return
		}
		w.group.Go(func() { w.carry(conn) })
	}
}

// carry connects a client with the server, for as long as it is drawn to.
func (w *onceWorld) carry(client net.Conn) {
	defer w.cut(client)
	w.mu.Lock()
	addr := w.backend
	w.mu.Unlock()
	if !w.keep(client) || addr == "" || w.refusing.Load() || rand.IntN(12) == 0 {
		return // also while the server is there: a dead proxy
	}
	server, err := net.Dial("tcp", addr)
	if err != nil {
		return
	}
	defer w.cut(server)
	if !w.keep(server) {
		return
	}
	fate := drawFate()
	var group sync.WaitGroup
	group.Go(func() { w.pump(server, client, fate.request, fate) })
	w.pump(client, server, fate.response, fate)
	group.Wait()
}

// A connFate is what happens to a connection.
type connFate struct {
	request, response int           // after how many bytes in that direction
	delay             time.Duration // of what is carried
	how               int
}

// The ways in which a connection goes.
const (
	byCut      = iota // both directions, immediately
	byHalf            // this direction is closed, the other goes on for a while
	bySwallow         // what comes in this direction is lost; a while later both are cut
	byStall           // the same, for longer
	waysOfFate        // how many there are
)

func drawFate() connFate {
	const never = math.MaxInt
	f := connFate{request: never, response: never, how: rand.IntN(waysOfFate)}
	if rand.IntN(3) == 0 {
		f.delay = upTo(2 * ms)
	}
	switch rand.IntN(8) {
	case 0:
		f.request = rand.IntN(300) // in the preface, or in the first requests
	case 1, 2:
		f.request = rand.IntN(20_000)
	case 3:
		f.response = rand.IntN(300)
	case 4, 5:
		f.response = rand.IntN(10_000)
	}
	return f
}

// pump carries bytes in one direction until the connection breaks, or is broken after limit bytes.
func (w *onceWorld) pump(to, from net.Conn, limit int, fate connFate) {
	buffer := make([]byte, 512)
	for {
		n, err := from.Read(buffer)
		if err != nil {
			w.cut(to)
			return
		}
		elapsed(fate.delay, w.over)
		carried := min(n, limit)
		if _, err := to.Write(buffer[:carried]); err != nil {
			w.cut(from)
			return
		}
		if limit -= carried; carried < n {
			w.breakOff(to, from, fate)
			return
		}
	}
}

func (w *onceWorld) breakOff(to, from net.Conn, fate connFate) {
	switch fate.how {
	case byHalf:
		if tcp, ok := to.(*net.TCPConn); ok {
			_ = tcp.CloseWrite()
		}
		elapsed(upTo(5*ms), w.over)
	case bySwallow:
		elapsed(upTo(5*ms), w.over)
	case byStall:
		elapsed(upTo(40*ms), w.over)
	}
	w.cut(to)
	w.cut(from)
}

const onceID = "once-id"

// handle is the handler of all methods: it runs as soon as the server has seen the headers.
func (w *onceWorld) handle(_ any, stream grpc.ServerStream) error {
	md, _ := metadata.FromIncomingContext(stream.Context())
	id, err := strconv.Atoi(first(md.Get(onceID)))
	if err != nil {
		return err
	}
	call := &w.calls[id]
	call.ran.Add(1)
	switch rand.IntN(40) {
	case 0, 1:
		return status.Error(codes.Unavailable, "busy") // without asking for another attempt
	case 2:
		call.asked.Add(1)
		if rand.IntN(2) == 0 {
			stream.SetTrailer(metadata.Pairs(pushbackKey, "1"))
			return status.Error(codes.Unavailable, "later")
		}
		return fail(codes.Unavailable, "later", retryInfoOf(ms)).err
	case 3:
		elapsed(upTo(60*ms), stream.Context().Done())
	case 4, 5, 6:
		elapsed(upTo(5*ms), stream.Context().Done())
	case 7:
		defer w.cutOne() // the response is lost, unless it is fast
	case 8:
		w.cutOne()
	}
	return answerAll(stream)
}

// answerAll receives until the client has nothing more to say, and then returns the last message.
func answerAll(stream grpc.ServerStream) error {
	last := new(echov1.EchoRequest)
	for {
		m := new(echov1.EchoRequest)
		err := stream.RecvMsg(m)
		if errors.Is(err, io.EOF) {
			return stream.SendMsg(&echov1.EchoResponse{Message: last.GetMessage()})
		}
		if err != nil {
			return err
		}
		last = m
	}
}

// callAll makes all calls, on a few ClientConns, and returns their errors.
func (w *onceWorld) callAll(t *testing.T, opts []Option) []error {
	t.Helper()
	observe := WithObserver(func(ctx context.Context, e Event) {
		if e.Kind == CallEnd {
			name := e.Outcome()
			w.calls[ctx.Value(onceKey{}).(int)].outcome.Store(&name)
		}
	})
	opts = append([]Option{observe, WithBudget(Unlimited), WithBackoff(Exponential{Base: ms, Max: 10 * ms})}, opts...)
	var conns []*grpc.ClientConn
	for _, one := range [][]Option{
		nil,
		{WithAttemptTimeout(3 * ms)},
		{WithAttemptTimeout(20 * ms)},
		{WithConnectWait(0), WithMaxAttempts(8)},
		{WithConnectWait(30 * ms), WithCodes(codes.Unavailable, codes.Internal, codes.Unknown, codes.Canceled, codes.DeadlineExceeded)},
		{WithClassifier(func(context.Context, Attempt) Classification { return Retry })},
	} {
		conns = append(conns, w.dial(t, append(one, opts...)))
	}
	conns = append(conns, w.dial(t, opts, grpc.WithChainUnaryInterceptor(dropping), grpc.WithChainStreamInterceptor(droppingStream)))
	errs := make([]error, len(w.calls))
	var next atomic.Int64
	var group sync.WaitGroup
	for range 48 {
		group.Go(func() {
			for i := int(next.Add(1)) - 1; i < len(w.calls); i = int(next.Add(1)) - 1 {
				errs[i] = w.call(i, conns[rand.IntN(len(conns))])
				if errs[i] == nil {
					w.noteSuccess()
				}
			}
		})
	}
	group.Wait()
	for _, cc := range conns {
		cc.Close()
	}
	return errs
}

type onceKey struct{}

func (w *onceWorld) dial(t *testing.T, opts []Option, dial ...grpc.DialOption) *grpc.ClientConn {
	t.Helper()
	dial = append(append(DialOptions(opts...), dial...), grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithIdleTimeout(0),
		grpc.WithConnectParams(grpc.ConnectParams{Backoff: backoff.Config{BaseDelay: ms, Multiplier: 1.5, MaxDelay: 10 * ms},
			MinConnectTimeout: 100 * ms}))
	cc, err := grpc.NewClient("passthrough:///"+w.front.Addr().String(), dial...)
	if err != nil {
		t.Fatal(err)
	}
	return cc
}

// call makes one call.
func (w *onceWorld) call(id int, cc *grpc.ClientConn) error {
	ctx := context.WithValue(metadata.AppendToOutgoingContext(context.Background(), onceID, strconv.Itoa(id)), onceKey{}, id)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	switch rand.IntN(6) {
	case 0:
		ctx, cancel = context.WithTimeout(ctx, upTo(30*ms))
	case 1, 2:
		ctx, cancel = context.WithTimeout(ctx, upTo(500*ms))
	case 3:
		timer := time.AfterFunc(upTo(200*ms), cancel)
		defer timer.Stop()
	}
	defer cancel()
	timer := time.AfterFunc(5*time.Second, cancel) // nothing lasts that long, and nothing may hang
	defer timer.Stop()
	var opts []grpc.CallOption
	if rand.IntN(8) == 0 {
		opts = append(opts, grpc.WaitForReady(true))
	}
	return randomCall(ctx, cc, strconv.Itoa(id), opts)
}

// randomCall makes a call of any kind, and checks its response.
func randomCall(ctx context.Context, cc *grpc.ClientConn, message string, opts []grpc.CallOption) error {
	reply := new(echov1.EchoResponse)
	desc := []*grpc.StreamDesc{nil, serverStream, clientStream, bidiStream}[rand.IntN(4)]
	if desc == nil {
		if err := cc.Invoke(ctx, "/once/Unary", &echov1.EchoRequest{Message: message}, reply, opts...); err != nil {
			return err
		}
		return checkReply(reply, message)
	}
	stream, err := cc.NewStream(ctx, desc, "/once/"+desc.StreamName, opts...)
	if err != nil {
		return err
	}
	for range 1 + rand.IntN(3) {
		if err := stream.SendMsg(&echov1.EchoRequest{Message: message}); err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		if !desc.ClientStreams {
			break
		}
		if rand.IntN(4) == 0 {
			elapsed(upTo(2*ms), ctx.Done())
		}
	}
	if err := stream.CloseSend(); err != nil {
		return err
	}
	if err := stream.RecvMsg(reply); err != nil {
		return err
	}
	if desc.ServerStreams {
		if err := stream.RecvMsg(new(echov1.EchoResponse)); !errors.Is(err, io.EOF) {
			return fmt.Errorf("instead of the end: %w", err)
		}
	}
	return checkReply(reply, message)
}

func checkReply(reply *echov1.EchoResponse, want string) error {
	if got := reply.GetMessage(); got != want {
		return fmt.Errorf("the response is %q, want %q", got, want)
	}
	return nil
}
