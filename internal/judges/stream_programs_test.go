package judges_test

import (
	"context"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/resolver/manual"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/grpcretrytest"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// This file holds the programs: what an application does with one stream, what the server of
// each attempt does, and the test that runs them and asks the model for its judgement.

var (
	programsCount = flag.Int("programs.count", 1000, "how many programs TestStreamPrograms runs")
	programsSeed  = flag.Uint64("programs.seed", 1,
		"the first seed of TestStreamPrograms, 0 for one drawn from the clock: make soak does that")
	programsRepeat = flag.Int("programs.repeat", 1, "how often each program of TestStreamPrograms runs: goroutines still run in any order")
)

// A streamKind says which sides stream.
type streamKind uint8

const (
	serverKind streamKind = iota
	clientKind
	bidiKind
)

func (k streamKind) client() bool { return k != serverKind } // the client may send many messages
func (k streamKind) server() bool { return k != clientKind } // the server may

func (k streamKind) String() string {
	return [...]string{"server stream", "client stream", "bidi stream"}[k]
}

func (k streamKind) desc() *grpc.StreamDesc {
	return &grpc.StreamDesc{StreamName: "m", ServerStreams: k.server(), ClientStreams: k.client()}
}

// An op is what an application does.
type op uint8

const (
	oSend op = iota
	oClose
	oRecv
	oDrain // RecvMsg until it returns an error; once for a client stream
	oHeader
	oContext
	oTrailer
	oSleep
	oCancel
)

var opNames = [...]string{"SendMsg", "CloseSend", "RecvMsg", "drain", "Header", "Context", "Trailer", "sleep", "cancel"}

func (o op) String() string { return opNames[o] }

// A deed is an op with its duration, or its size.
type deed struct {
	op       op
	d        time.Duration
	n        int
	tooLarge bool // gRPC refuses to send the message
}

func (d deed) String() string {
	if d.op == oSleep {
		return fmt.Sprintf("sleep %v", d.d)
	}
	if d.tooLarge {
		return "SendMsg of too many bytes"
	}
	if d.op == oSend && d.n > 0 {
		return fmt.Sprintf("SendMsg of %d bytes", d.n)
	}
	return d.op.String()
}

// A program is everything that is drawn.
type program struct {
	seed uint64
	kind streamKind

	attempts     int
	limit        int // of the buffer
	timeout      time.Duration
	backoff      time.Duration
	deadline     time.Duration // 0 for none
	hedge        int           // attempts; 0 for no hedging
	hedgeDelay   time.Duration
	observed     bool
	grants       int // retries that the budget allows; negative for all
	targets      bool
	plainReplies bool
	prefilled    bool // the messages for RecvMsg are not empty

	dropsOptions bool // a wrapper below drops call options
	nilHeader    bool // a wrapper below returns nil from Header before the end
	merges       bool // the codec merges
	left         bool // the service config of a fresh channel leaves the method to gRPC

	inOnFinish, inCallEnd []op // methods that callbacks call

	threads [][]deed // the first is the goroutine that opened the stream
	linger  bool     // the application keeps its context for a while after the last deed
	scripts []*script
}

func (p *program) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "seed %d: %v, %d attempts, buffer %d, backoff %v", p.seed, p.kind, p.attempts, p.limit, p.backoff)
	option := func(on bool, format string, args ...any) {
		if on {
			fmt.Fprintf(&b, ", "+format, args...)
		}
	}
	option(p.timeout > 0, "attempt timeout %v", p.timeout)
	option(p.deadline > 0, "deadline %v", p.deadline)
	option(p.hedge > 0, "hedging %d after %v", p.hedge, p.hedgeDelay)
	option(p.observed, "observed")
	option(p.grants >= 0, "budget %d", p.grants)
	option(p.targets, "targets")
	option(p.plainReplies, "replies that are no proto messages")
	option(p.prefilled, "prefilled replies")
	option(p.dropsOptions, "a wrapper drops call options")
	option(p.nilHeader, "a wrapper's Header returns nil")
	option(p.merges, "the codec merges")
	option(p.left, "the method is left to gRPC")
	option(len(p.inOnFinish) > 0, "OnFinish calls %v", p.inOnFinish)
	option(len(p.inCallEnd) > 0, "the observer of CallEnd calls %v", p.inCallEnd)
	option(p.linger, "lingers")
	for i, t := range p.threads {
		fmt.Fprintf(&b, "\n  goroutine %d: %v", i, t)
	}
	for i, s := range p.scripts {
		fmt.Fprintf(&b, "\n  attempt %d: %v", i+1, s)
	}
	return b.String()
}

// draw draws the program of a seed.
func draw(seed uint64) *program { return drawFrom(rand.NewPCG(seed, 14), seed) }

// drawFrom draws a program from another source of random numbers.
func drawFrom(source rand.Source, seed uint64) *program {
	d := dice{rand.New(source)}
	p := &program{
		seed:         seed,
		kind:         []streamKind{serverKind, clientKind, bidiKind}[d.IntN(3)],
		attempts:     2 + d.IntN(3),
		limit:        1 << 20,
		backoff:      d.ms(0, 5),
		grants:       -1,
		observed:     d.one(2),
		targets:      d.one(4),
		plainReplies: d.one(8),
		prefilled:    d.one(8),
		linger:       d.one(6),
	}
	if d.one(6) {
		p.limit = []int{1, 100, 400, 2000}[d.IntN(4)]
	}
	if d.one(2) {
		p.timeout = d.ms(1, 12)
	}
	switch d.IntN(6) {
	case 0:
		p.deadline = d.ms(3, 40)
	case 1, 2:
		p.deadline = 10 * time.Hour
	}
	if p.kind == serverKind && d.one(2) {
		p.hedge, p.hedgeDelay = 2+d.IntN(3), d.ms(0, 6)
	}
	if d.one(8) {
		p.grants = d.IntN(3)
	}
	switch d.IntN(16) {
	case 0, 1:
		p.dropsOptions = true
	case 2:
		p.nilHeader = true
	case 3, 4:
		p.merges = true
	}
	if d.one(6) {
		p.inOnFinish = d.callbacks()
	}
	if d.one(6) {
		p.inCallEnd = d.callbacks()
	}
	if p.hedge == 0 && d.one(12) {
		d.IntN(5) // these two chose a panic once: a seed still draws the same program
		d.IntN(4)
	}
	p.left = d.one(40)
	p.threads = d.threads(p.kind)
	own := d.one(16)
	for n := range max(p.attempts, p.hedge) + 1 {
		p.scripts = append(p.scripts, d.script(p.kind, n, own))
	}
	return p
}

type dice struct{ *rand.Rand }

func (d dice) one(in int) bool { return d.IntN(in) == 0 }

func (d dice) ms(from, to int) time.Duration {
	return time.Duration(from+d.IntN(to-from+1)) * time.Millisecond
}

func (d dice) callbacks() []op {
	all := []op{oHeader, oContext, oTrailer, oCancel}
	d.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	return all[:1+d.IntN(3)]
}

func (d dice) send() deed {
	s := deed{op: oSend}
	if d.one(8) {
		s.n = 50 + d.IntN(500)
	}
	s.tooLarge = d.one(100)
	return s
}

// idle is something that an application may do in between.
func (d dice) idle(list []deed) []deed {
	switch d.IntN(10) {
	case 0:
		return append(list, deed{op: oHeader})
	case 1:
		if d.one(2) {
			return append(list, deed{op: oContext})
		}
		return append(list, deed{op: oTrailer})
	case 2, 3, 4:
		return append(list, deed{op: oSleep, d: d.ms(1, 10)})
	case 5:
		if d.one(4) {
			return append(list, deed{op: oCancel})
		}
	}
	return list
}

func (d dice) sends(kind streamKind) (list []deed) {
	n := 1
	if kind.client() {
		n = d.IntN(5)
		if d.one(10) {
			n += 8
		}
	}
	for range n {
		if d.one(3) {
			list = d.idle(list)
		}
		list = append(list, d.send())
	}
	if d.one(4) {
		list = d.idle(list)
	}
	if !d.one(10) {
		list = append(list, deed{op: oClose})
	}
	return list
}

func (d dice) receives() (list []deed) {
	for range d.IntN(4) {
		list = d.idle(list)
		if d.one(2) {
			list = append(list, deed{op: oRecv})
		}
	}
	switch d.IntN(12) {
	case 0: // abandoned
	case 1:
		list = append(list, deed{op: oSleep, d: d.ms(1, 30)})
	case 2:
		list = append(list, deed{op: oCancel}, deed{op: oDrain})
	default:
		list = append(list, deed{op: oDrain})
	}
	for d.one(4) {
		list = append(list, deed{op: []op{oRecv, oHeader, oTrailer, oContext}[d.IntN(4)]})
	}
	return list
}

func (d dice) threads(kind streamKind) (threads [][]deed) {
	switch {
	case d.one(2):
		threads = [][]deed{append(d.sends(kind), d.receives()...)}
	case kind == bidiKind && d.one(3): // alternating
		var list []deed
		for range d.IntN(6) {
			list = append(d.idle(list), d.send())
			if d.one(2) {
				list = append(list, deed{op: oRecv})
			}
		}
		if !d.one(6) {
			list = append(list, deed{op: oClose})
		}
		threads = [][]deed{append(list, d.receives()...)}
	default:
		threads = [][]deed{d.receives(), d.sends(kind)}
	}
	if d.one(3) {
		var list []deed
		if d.one(2) {
			list = append(list, deed{op: oHeader})
		}
		for range 1 + d.IntN(4) {
			list = d.idle(list)
		}
		threads = append(threads, list)
	}
	return threads
}

var drawnCodes = []codes.Code{
	codes.Unavailable, codes.Unavailable, codes.Unavailable, codes.Unavailable,
	codes.ResourceExhausted, codes.Internal, codes.Canceled, codes.InvalidArgument,
}

func (d dice) script(kind streamKind, n int, own bool) *script {
	s := &script{in: 1 + d.IntN(4), out: 1 + d.IntN(4)}
	if d.one(4) {
		s.in, s.out = 64, 64
	}
	if d.one(8) {
		s.createAfter = d.ms(1, 8)
	}
	fails := d.IntN(10) < 6-2*n
	if fails && d.one(5) {
		s.createCode = drawnCodes[d.IntN(len(drawnCodes))]
		return s
	}
	if own && d.one(3) {
		switch d.IntN(3) {
		case 0:
			s.ownCreate = true
		case 1:
			s.ownSend = 1 + d.IntN(3)
		default:
			s.ownRecv = 1 + d.IntN(2)
		}
	}
	if d.one(40) {
		s.garbled = 1 + d.IntN(2)
	}
	sent := false
	do := func(v verb) {
		m := move{verb: v}
		if v == vSleep {
			m.d = d.ms(1, 10)
		}
		if v == vSend {
			if !kind.server() && sent && !d.one(50) {
				return
			}
			sent = true
		}
		s.moves = append(s.moves, m)
	}
	if kind.server() && d.one(6) { // headers long before the first message
		do(vHeader)
		do(vSleep)
	}
	for range d.IntN(6) {
		do([]verb{vSleep, vSleep, vReceive, vReceive, vSend, vSend, vHeader, vRead}[d.IntN(8)])
	}
	if !fails {
		if !d.one(6) {
			do(vAll)
		}
		for range d.IntN(3) {
			do(vSend)
			if d.one(4) {
				do(vSleep)
			}
		}
		if !kind.server() && !sent {
			if d.one(20) {
				s.vanishes = d.one(2)
			} else {
				do(vSend)
			}
		}
		if d.one(20) {
			do(vHang)
		}
		do(vEnd)
		return s
	}
	if d.one(8) {
		do(vHang)
	}
	do(vEnd)
	s.code = drawnCodes[d.IntN(len(drawnCodes))]
	if d.one(3) {
		s.pushback = [][]string{{"0"}, {"3"}, {"6"}, {"-1"}, {"-1"}, {"x"}, {"1", "2"}}[d.IntN(7)]
	}
	return s
}

// A run is one program under way, and the log of it.
type run struct {
	*program
	plain bool // without the interceptor: the control of the model itself
	start time.Time
	ctx   context.Context
	end   context.CancelFunc

	sent atomic.Int32

	mu       sync.Mutex
	changed  chan struct{} // closed at the next change; nil while nobody waits
	seq      int
	attempts []*fakeStream
	calls    []*called
	events   []event
	finishes []finish
	stream   grpc.ClientStream
	opened   mark // the interceptor has returned
	openErr  error
	ctxEnd   mark // of the application's cancel
	appDone  mark
	cleaned  mark // the harness has cancelled
	stalled  bool // the application waits, and plain gRPC would too
	findings []finding

	withdrawn, refused, returned int // of both budgets
	deposits                     []grpcretry.Outcome
	hedges                       hedgeAccount

	peer            peer.Peer
	header, trailer metadata.MD

	cc       *grpc.ClientConn // nil unless the method is left to gRPC
	resolver *manual.Resolver
	resolved mark // the channel knows its policy
}

// A called is one call of a method by the application.
type called struct {
	thread     int
	op         op
	n          int // the number of the message for SendMsg
	start, end mark
	tooLarge   bool
	text       string
	md         metadata.MD
	ctx        context.Context
	err        error
}

const callbackThread = 9

type event struct {
	mark
	grpcretry.Event
}

type finish struct {
	mark
	err error
}

// tick needs mu.
func (r *run) tick() mark {
	r.seq++
	return mark{r.seq, time.Since(r.start)}
}

// notify needs mu.
func (r *run) notify() {
	if r.changed != nil {
		close(r.changed)
		r.changed = nil
	}
}

// await needs mu, and gives it up until something has changed or done is closed.
func (r *run) await(done <-chan struct{}) {
	if r.changed == nil {
		r.changed = make(chan struct{})
	}
	changed := r.changed
	r.mu.Unlock()
	select {
	case <-changed:
	case <-done:
	}
	r.mu.Lock()
}

// misuse needs mu.
func (r *run) misuse(format string, args ...any) { r.find("misuse", format, args...) }

// find needs mu.
func (r *run) find(kind, format string, args ...any) {
	r.findings = append(r.findings, finding{kind, fmt.Sprintf(format, args...), r.seq})
}

// Deposit and the methods after it make a run its own budget.
func (r *run) Deposit(o grpcretry.Outcome) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.note(&r.deposits, o)
}

// note needs mu. An attempt that was not sent after all is no deposit.
func (r *run) note(deposits *[]grpcretry.Outcome, o grpcretry.Outcome) {
	if o.Attempt > 1 && o.Result == grpcretry.Unsent {
		r.returned++
		return
	}
	*deposits = append(*deposits, o)
}

func (r *run) Withdraw(time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.grants >= 0 && r.withdrawn-r.returned >= r.grants {
		r.refused++
		return false
	}
	r.withdrawn++
	return true
}

func (r *run) Balance(time.Time) float64 { return 1 }

// A hedgeAccount is the budget of a run's hedges. It has the tokens of the run.
type hedgeAccount struct {
	*run
	deposits []grpcretry.Outcome
}

func (h *hedgeAccount) Deposit(o grpcretry.Outcome) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.note(&h.deposits, o)
}

// agrees reports whether both budgets have heard the same, and each attempt after the first was paid for
// by one of them: by this one if it was a hedge.
func (h *hedgeAccount) agrees(own []grpcretry.Outcome) bool {
	if len(own) != len(h.deposits) {
		return false
	}
	free := 0
	for i, o := range own {
		other := h.deposits[i]
		if o.Attempt > 1 && (other.Attempt > 1 || o.Hedge) || other.Attempt > 1 && !o.Hedge || o.Hedge != other.Hedge ||
			o.Result != other.Result {
			return false
		}
		if o.Attempt == 1 && other.Attempt == 1 {
			free++
		}
	}
	return free <= 1
}

type runKey struct{}

// observe is the observer of all runs.
func observe(ctx context.Context, e grpcretry.Event) {
	r := ctx.Value(runKey{}).(*run)
	r.mu.Lock()
	r.events = append(r.events, event{r.tick(), e})
	stream := r.stream
	r.mu.Unlock()
	if e.Kind == grpcretry.CallEnd && stream != nil {
		r.callback(stream, r.inCallEnd)
	}
}

func (r *run) callback(stream grpc.ClientStream, ops []op) {
	for _, o := range ops {
		if o == oCancel {
			r.cancel()
			continue
		}
		r.do(callbackThread, stream, deed{op: o})
	}
}

func (r *run) onFinish(err error) {
	r.mu.Lock()
	r.finishes = append(r.finishes, finish{r.tick(), err})
	stream := r.stream
	r.mu.Unlock()
	if stream != nil {
		r.callback(stream, r.inOnFinish)
	}
}

func (r *run) options() []grpc.CallOption {
	opts := []grpc.CallOption{grpc.OnFinish(r.onFinish)}
	if r.targets {
		opts = append(opts, grpc.Peer(&r.peer), grpc.Header(&r.header), grpc.Trailer(&r.trailer))
	}
	if r.plain {
		return opts
	}
	if r.plainReplies || r.merges {
		opts = append(opts, grpc.CallContentSubtype("plain")) // a codec of its own; without one, Header may receive a message ahead
	}
	opts = append(opts, grpcretry.WithMaxAttempts(r.program.attempts), grpcretry.WithBufferLimit(r.limit),
		grpcretry.WithBackoff(grpcretry.Constant(r.backoff)), grpcretry.WithBudget(r))
	if r.timeout > 0 {
		opts = append(opts, grpcretry.WithAttemptTimeout(r.timeout))
	}
	if r.hedge > 0 {
		opts = append(opts, grpcretry.WithPolicy(grpcretry.Policy{MaxAttempts: r.hedge, Hedging: &grpcretry.Hedging{
			Delay: grpcretry.HedgeAfter(r.hedgeDelay), Budget: &r.hedges}}))
	}
	return opts
}

// retriers serve one program: what they know about their target would be news of another.
type retriers struct{ silent, observed grpc.StreamClientInterceptor }

func newRetriers() *retriers {
	unmoved := grpcretrytest.Jitter(0) // so that waits are the backoff
	return &retriers{grpcretry.StreamClientInterceptor(unmoved), grpcretry.StreamClientInterceptor(unmoved, grpcretry.WithObserver(observe))}
}

// application runs on the goroutine that opens the stream.
func (r *run) application(i *retriers) {
	stream, err := r.open1(i)
	r.mu.Lock()
	r.opened, r.openErr = r.tick(), err
	r.stream = stream
	r.mu.Unlock()
	if err == nil && stream != nil {
		var group sync.WaitGroup
		for n, deeds := range r.threads[1:] {
			group.Go(func() { r.perform(n+1, stream, deeds) })
		}
		r.perform(0, stream, r.threads[0])
		group.Wait()
	}
	r.mu.Lock()
	r.appDone = r.tick()
	r.mu.Unlock()
}

func (r *run) open1(i *retriers) (grpc.ClientStream, error) {
	desc := r.kind.desc()
	if r.plain {
		return r.open(r.ctx, desc, nil, "/s/m", r.options()...)
	}
	intercept := i.silent
	if r.observed {
		intercept = i.observed
	}
	return intercept(r.ctx, desc, r.cc, "/s/m", r.open, r.options()...)
}

// perform does what one goroutine of the application does. It keeps gRPC's rules: after an
// error of SendMsg it sends only to see the error again, and after CloseSend nothing.
func (r *run) perform(thread int, stream grpc.ClientStream, deeds []deed) {
	broken := false
	for _, d := range deeds {
		switch d.op {
		case oSleep:
			time.Sleep(d.d)
		case oCancel:
			r.cancel()
		case oDrain:
			for range 50 {
				c := r.do(thread, stream, deed{op: oRecv})
				if c.err != nil || !r.kind.server() {
					break
				}
			}
		case oSend, oClose:
			if broken {
				continue
			}
			c := r.do(thread, stream, d)
			broken = c.err != nil && c.err != io.EOF
		default:
			r.do(thread, stream, d)
		}
	}
}

func (r *run) cancel() {
	r.mu.Lock()
	if !r.ctxEnd.happened() {
		r.ctxEnd = r.tick()
	}
	r.mu.Unlock()
	r.end()
}

const padding = " xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"

// do calls one method, and records that.
func (r *run) do(thread int, stream grpc.ClientStream, d deed) (c *called) {
	c = &called{thread: thread, op: d.op}
	if d.op == oSend {
		c.n = int(r.sent.Add(1)) - 1
	}
	r.mu.Lock()
	c.start = r.tick()
	r.calls = append(r.calls, c)
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		c.end = r.tick()
		r.mu.Unlock()
	}()
	switch d.op {
	case oSend:
		text := strconv.Itoa(c.n)
		if c.tooLarge = d.tooLarge; c.tooLarge {
			text += tooLarge
		}
		if d.n > 0 {
			text += strings.Repeat(padding, d.n/len(padding)+1)
		}
		c.err = stream.SendMsg(&echov1.EchoRequest{Message: text})
	case oClose:
		c.err = stream.CloseSend()
	case oRecv:
		reply := r.reply()
		c.err = stream.RecvMsg(reply)
		c.text = replyText(reply)
	case oHeader:
		c.md, c.err = stream.Header()
	case oContext:
		c.ctx = stream.Context()
	case oTrailer:
		c.md = stream.Trailer()
	}
	return c
}

const prefix = "before;"

func (r *run) reply() any {
	text := ""
	if r.prefilled {
		text = prefix
	}
	if r.plainReplies {
		return &plainReply{Text: text}
	}
	return &echov1.EchoResponse{Message: text}
}

func replyText(m any) string {
	if m, ok := m.(*plainReply); ok {
		return m.Text
	}
	return m.(*echov1.EchoResponse).GetMessage()
}

const (
	stallAfter = 30 * time.Minute // nothing in a program takes as long
	hangAfter  = 60 * time.Minute
)

// play runs a program in the bubble it is called in, and judges it. It returns false if
// goroutines are left that the next program would suffer from.
func play(p *program, i *retriers, plain bool) (r *run, clean bool) {
	r = &run{program: p, plain: plain, start: time.Now()}
	r.hedges.run = r
	watched.Store(r)
	before := runtime.NumGoroutine()
	base := context.WithValue(context.Background(), runKey{}, r)
	if p.deadline > 0 {
		r.ctx, r.end = context.WithTimeout(base, p.deadline)
	} else {
		r.ctx, r.end = context.WithCancel(base)
	}
	defer r.end()
	if p.left && !plain {
		r.connect()
	}
	over := make(chan struct{})
	go func() {
		defer close(over)
		r.application(i)
	}()
	hang := time.NewTimer(hangAfter)
	defer hang.Stop()
	stall := time.AfterFunc(stallAfter, r.inspect)
	defer stall.Stop()
	select {
	case <-over:
	case <-hang.C:
		r.mu.Lock()
		defer r.mu.Unlock()
		r.hung()
		return r, false
	}
	stall.Stop()
	if r.linger {
		time.Sleep(time.Minute)
		r.lingered()
	}
	r.mu.Lock()
	r.cleaned = r.tick()
	r.mu.Unlock()
	r.end()
	time.Sleep(time.Minute)
	if r.cc != nil {
		r.cc.Close()
	}
	synctest.Wait()
	left := runtime.NumGoroutine() - before
	for range 1000 {
		if left <= 0 {
			break
		}
		runtime.Gosched()
		left = runtime.NumGoroutine() - before
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	leaked := false
	if left > 0 {
		// A goroutine that has just ended may still be counted.
		if stacks := leftInBubble(); stacks != "" {
			leaked = true
			r.find("leak", "goroutines are left:\n%s", stacks)
		}
	}
	r.judge()
	return r, !leaked
}

// leftInBubble returns the stacks of all goroutines of this bubble that a program has started.
func leftInBubble() string {
	buf := make([]byte, 1<<20)
	all := strings.Split(string(buf[:runtime.Stack(buf, true)]), "\n\n")
	first, _, _ := strings.Cut(all[0], "\n") // of the caller: goroutine 7 [running, synctest bubble 3]:
	_, bubble, _ := strings.Cut(first, "synctest bubble ")
	var left []string
	for _, stack := range all[1:] {
		if strings.Contains(stack, "synctest bubble "+bubble) && !strings.Contains(stack, "testing/synctest.") {
			left = append(left, stack)
		}
	}
	return strings.Join(left, "\n\n")
}

// watched is the run under way, for the guard against hangs that virtual time does not see,
// such as a mutex that is never unlocked.
var watched atomic.Pointer[run]

func guard(t testing.TB) {
	stop := make(chan struct{})
	t.Cleanup(func() { close(stop) })
	go func() {
		var last *run
		since := 0
		for {
			select {
			case <-stop:
				return
			case <-time.After(time.Second):
			}
			if now := watched.Load(); now != last {
				last, since = now, 0
				continue
			}
			if since++; since == 30 && last != nil {
				buf := make([]byte, 1<<20)
				fmt.Fprintf(os.Stderr, "a program hangs in real time, as with a mutex that is never unlocked\n%v\n", last.program)
				if last.mu.TryLock() {
					fmt.Fprintf(os.Stderr, "%s\n", last.timeline())
				}
				fmt.Fprintf(os.Stderr, "%s\n", buf[:runtime.Stack(buf, true)])
				os.Exit(2)
			}
		}
	}()
}

// batch runs programs in a bubble of their own. It returns the first run with findings, how
// many programs ran, and how many of them waited for ever.
func batch(t *testing.T, programs []*program, plain bool) (found *run, ran, stalled int) {
	defer func() {
		if p := recover(); p != nil && (found == nil || !strings.Contains(fmt.Sprint(p), "deadlock")) {
			panic(p)
		}
	}()
	failed := t.Failed()
	defer func() {
		if t.Failed() && !failed && found == nil { // by the race detector
			t.Logf("the batch begins with seed %d", programs[0].seed)
		}
	}()
	synctest.Test(t, func(*testing.T) {
		for _, p := range programs {
			r, clean := play(p, newRetriers(), plain)
			ran++
			if r.stalled {
				stalled++
			}
			if len(r.findings) > 0 || !clean {
				found = r
				return
			}
		}
	})
	return found, ran, stalled
}

// TestStreamPrograms runs random programs on a fake of gRPC, and has a model of gRPC's promises
// judge what the application observed. See stream_model_test.go for the model.
func TestStreamPrograms(t *testing.T) { runPrograms(t, *programsCount, false) }

// TestStreamProgramsOfPlainGRPC is the control of the model: the same programs without the
// interceptor, which the model must accept.
func TestStreamProgramsOfPlainGRPC(t *testing.T) { runPrograms(t, *programsCount/10, true) }

// Programs whose faults were a matter of scheduling are run many times.
func TestStreamProgramsThatFailedNowAndThen(t *testing.T) {
	guard(t)
	for _, seed := range []uint64{
		14399,               // the timeout and the server end a committed attempt at the same time
		1795333079606444607, // likewise
		1795333011278485656, // a hedged stream, below which an interceptor returns no headers
		1795333079606182289, // Header finds the end of a client stream without a response, at the timeout
	} {
		var programs []*program
		for range 300 {
			programs = append(programs, draw(seed))
		}
		for range 2 {
			if r, _, _ := batch(t, programs, false); r != nil {
				t.Fatal(report(t, r))
			}
		}
	}
}

func runPrograms(t *testing.T, count int, plain bool) {
	guard(t)
	seed := *programsSeed
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	t.Logf("seeds %d to %d", seed, seed+uint64(count)-1)
	stalled := 0
	for done := 0; done < count; {
		var programs []*program
		for i := range min(100, count-done) {
			for range *programsRepeat {
				s := seed + uint64(done+i)
				programs = append(programs, draw(s))
			}
		}
		r, ran, waited := batch(t, programs, plain)
		done += max(1, ran / *programsRepeat)
		stalled += waited
		if r != nil {
			t.Fatal(report(t, r))
		}
	}
	t.Logf("%d programs waited for ever, as they would with plain gRPC", stalled)
}

// report is what a test prints of a run with findings: a smaller program with a finding of the
// same kind, if there is one.
func report(t *testing.T, r *run) string {
	kind := r.findings[0].kind
	small := shrink(t, r, kind)
	small.mu.Lock()
	defer small.mu.Unlock()
	text := fmt.Sprintf("%s\n%v\n%s", kind, small.program, small.timeline())
	if small != r {
		text += "this is a smaller program than that of the seed\n"
	}
	if r.seed == 0 { // from FuzzStreamProgram
		return text
	}
	return text + fmt.Sprintf("-programs.seed=%d -programs.count=1 -programs.repeat=100 runs it again", r.seed)
}

// shrink looks for a smaller program that has a finding of the same kind.
func shrink(t *testing.T, r *run, kind string) *run {
	const tries = 8 // goroutines run in any order
	has := func(p *program) *run {
		var same []*program
		for range tries {
			same = append(same, p)
		}
		found, _, _ := batch(t, same, r.plain)
		if found != nil && slices.ContainsFunc(found.findings, func(f finding) bool { return f.kind == kind }) {
			return found
		}
		return nil
	}
	for progress := true; progress; {
		progress = false
		for i := 0; ; i++ {
			smaller := r.program.without(i)
			if smaller == nil {
				break
			}
			if found := has(smaller); found != nil {
				r, progress = found, true
				i-- // what comes after has moved up
			}
		}
	}
	return r
}

// without returns the program less its ith detail, nil if there is none. A detail that is not
// there counts, so that the others keep their places; it is skipped.
func (p *program) without(i int) *program {
	q := *p
	q.threads = slices.Clone(p.threads)
	q.scripts = slices.Clone(p.scripts)
	n := 0
	changed := false
	try := func(on bool, change func()) {
		if !on {
			return
		}
		if n == i {
			change()
			changed = true
		}
		n++
	}
	try(len(q.scripts) > 1, func() { q.scripts = q.scripts[:len(q.scripts)-1] })
	try(p.hedge > 0, func() { q.hedge = 0 })
	try(p.timeout > 0, func() { q.timeout = 0 })
	try(p.deadline > 0, func() { q.deadline = 0 })
	try(p.observed, func() { q.observed = false })
	try(p.targets, func() { q.targets = false })
	try(p.plainReplies, func() { q.plainReplies = false })
	try(p.prefilled, func() { q.prefilled = false })
	try(p.dropsOptions, func() { q.dropsOptions = false })
	try(p.nilHeader, func() { q.nilHeader = false })
	try(p.merges, func() { q.merges = false })
	try(p.left, func() { q.left = false })
	try(p.linger, func() { q.linger = false })
	try(p.grants >= 0, func() { q.grants = -1 })
	try(p.limit < 1<<20, func() { q.limit = 1 << 20 })
	try(p.backoff > 0, func() { q.backoff = 0 })
	try(len(p.inOnFinish) > 0, func() { q.inOnFinish = p.inOnFinish[1:] })
	try(len(p.inCallEnd) > 0, func() { q.inCallEnd = p.inCallEnd[1:] })
	for t, deeds := range p.threads {
		try(t > 0, func() { q.threads = slices.Delete(q.threads, t, t+1) })
		for d, deed := range deeds {
			try(true, func() { q.threads[t] = slices.Delete(slices.Clone(deeds), d, d+1) })
			try(deed.op == oSend && deed.n > 0, func() {
				q.threads[t] = slices.Clone(deeds)
				q.threads[t][d].n = 0
			})
		}
	}
	for k, s := range p.scripts {
		edit := func(change func(*script)) func() {
			return func() {
				c := *s
				change(&c)
				q.scripts[k] = &c
			}
		}
		for m := range s.moves {
			try(true, edit(func(c *script) { c.moves = slices.Delete(slices.Clone(s.moves), m, m+1) }))
		}
		try(s.vanishes, edit(func(c *script) { c.vanishes = false }))
		try(s.garbled > 0, edit(func(c *script) { c.garbled = 0 }))
		try(s.createAfter > 0, edit(func(c *script) { c.createAfter = 0 }))
		try(s.pushback != nil, edit(func(c *script) { c.pushback = nil }))
		try(s.in < 64, edit(func(c *script) { c.in = 64 }))
		try(s.out < 64, edit(func(c *script) { c.out = 64 }))
		try(s.ownCreate, edit(func(c *script) { c.ownCreate = false }))
		try(s.ownSend > 0, edit(func(c *script) { c.ownSend = 0 }))
		try(s.ownRecv > 0, edit(func(c *script) { c.ownRecv = 0 }))
	}
	if !changed {
		return nil
	}
	return &q
}
