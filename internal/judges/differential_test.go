package judges_test

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math/rand/v2"
	"net"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	tracenoop "go.opentelemetry.io/otel/trace/noop"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/stats"
	"google.golang.org/grpc/status"
	"google.golang.org/grpc/test/bufconn"
	"google.golang.org/protobuf/proto"

	"github.com/grpcretry/grpcretry"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// This file compares the library with plain gRPC. A random program, which is what an
// application and a server do in one call, runs on a plain ClientConn and on one with the
// library, against the same real server, and everything that application, server and
// stats.Handler see must be equal, the virtual time included at which they see it. No
// attempt of a program is retried, so there is nothing that the library may change.
//
// Every program runs on plain gRPC twice. A program that gRPC itself does not repeat is
// dropped. If the library differs, both run again, and a finding is what plain gRPC was
// never seen to do.
//
// Each goroutine of a program acts in time slots of its own, see diffSlot, so that one
// action has had all of its effects before the next, except for the steps marked with "!",
// which follow immediately on the step before.

var (
	diffPrograms = flag.Int("differential.programs", 100, "how many programs TestDifferential draws")
	diffSeed     = flag.Uint64("differential.seed", 1, "the first seed of TestDifferential, 0 for one drawn from the clock, as in make soak")
)

// The slots of a program's goroutines, in milliseconds after each multiple of diffSlot.
const (
	diffSlot       = 10 * time.Millisecond
	atApplication  = 0
	atApplication2 = 3 * time.Millisecond
	atServer       = 5 * time.Millisecond
	atCancel       = 7 * time.Millisecond
	atDeadline     = 8 * time.Millisecond
)

// The kinds of calls. A unary call has no steps of the application but the call itself.
const (
	diffUnary = iota
	diffServerStream
	diffClientStream
	diffBidi
)

var diffKinds = [...]string{"unary", "server stream", "client stream", "bidi stream"}

// A diffStep is one action.
type diffStep struct {
	verb string
	n    int    // payload size, milliseconds, or a status code
	text string // more of it
	now  bool   // without waiting for the next slot
}

func (s diffStep) String() string {
	text := s.verb
	if s.n != 0 {
		text += " " + strconv.Itoa(s.n)
	}
	if s.text != "" {
		text += " " + s.text
	}
	if s.now {
		text = "!" + text
	}
	return text
}

// A diffProgram is one call. Its options are sets of words.
type diffProgram struct {
	kind     int
	deadline int // of the caller, in slots; gRPC rounds 100 ms or more up to microseconds, so that the server's comes just after
	cancel   int // likewise; 0 for never
	policy   []string
	options  []string // of the call
	app      [2][]diffStep
	server   []diffStep
}

func (p *diffProgram) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s; deadline %v", diffKinds[p.kind], p.deadlineAfter())
	if p.cancel > 0 {
		fmt.Fprintf(&b, "; cancel after %v", p.cancelAfter())
	}
	fmt.Fprintf(&b, "\n  policy:  %s\n  options: %s\n", strings.Join(p.policy, ", "), strings.Join(p.options, ", "))
	for i, steps := range p.app {
		if len(steps) > 0 {
			fmt.Fprintf(&b, "  app %d:   %s\n", i+1, joined(steps))
		}
	}
	fmt.Fprintf(&b, "  server:  %s", joined(p.server))
	return b.String()
}

func joined(steps []diffStep) string {
	texts := make([]string, len(steps))
	for i, s := range steps {
		texts[i] = s.String()
	}
	return strings.Join(texts, "; ")
}

func (p *diffProgram) deadlineAfter() time.Duration {
	return time.Duration(p.deadline)*diffSlot + atDeadline + 500*time.Nanosecond
}

func (p *diffProgram) cancelAfter() time.Duration {
	return time.Duration(p.cancel)*diffSlot + atCancel
}

func (p *diffProgram) has(option string) bool {
	return slices.Contains(p.options, option) || slices.Contains(p.policy, option)
}

// hedges: there may be attempts that lose.
func (p *diffProgram) hedges() bool { return p.has("hedges that lose") }

// drawProgram draws a program of a seed.
func drawProgram(seed uint64) *diffProgram {
	draw := rand.New(rand.NewPCG(seed, 14))
	maybe := func(one int) bool { return draw.IntN(one) == 0 }
	p := &diffProgram{kind: draw.IntN(4), deadline: 12 + draw.IntN(60)}
	if maybe(3) {
		p.deadline = 500
	}
	if maybe(6) {
		p.cancel = 1 + draw.IntN(20)
	}

	if !maybe(3) { // else the default codes are retried, which the server then avoids
		p.policy = append(p.policy, "retries only DATA_LOSS")
	}
	for _, one := range []struct {
		text string
		odds int
	}{
		{"attempt timeout of an hour", 3}, {"attempt timeout of 6s", 6}, {"hedging after an hour", 8}, {"hedges that lose", 5},
		{"observed", 3}, {"buffer of 30 bytes", 6}, {"buffer of 0 bytes", 20}, {"one attempt", 20}, {"disabled", 20},
		{"classifier", 8}, {"nothing in particular", 8}, {"max elapsed of a minute", 12},
	} {
		if maybe(one.odds) {
			p.policy = append(p.policy, one.text)
		}
	}
	for _, one := range []struct {
		text string
		odds int
	}{
		{"header", 3}, {"trailer", 3}, {"peer", 3}, {"send at most 100", 8}, {"receive at most 100", 8}, {"unknown compressor", 30},
		{"wait for ready", 10}, {"metadata", 4}, {"static method", 8},
		{"trailer in OnFinish", 12}, {"context in OnFinish", 12}, {"header in OnFinish", 12},
	} {
		if maybe(one.odds) {
			p.options = append(p.options, one.text)
		}
	}
	p.server = drawServer(draw, p)
	if p.kind == diffUnary {
		p.app[0] = []diffStep{{verb: "call", n: drawSize(draw)}}
		return p
	}
	p.drawApplication(draw)
	return p
}

// drawSize draws the size of a payload: mostly small, at times over a limit of the program,
// of the windows, of the default buffer, or of the server.
func drawSize(draw *rand.Rand) int {
	return []int{0, 0, 1, 10, 30, 50, 120, 200, 70 << 10, 300 << 10}[min(draw.IntN(12), draw.IntN(12), 9)]
}

func drawServer(draw *rand.Rand, p *diffProgram) (steps []diffStep) {
	add := func(verb string, n int, text string) {
		steps = append(steps, diffStep{verb: verb, n: n, text: text, now: draw.IntN(4) == 0})
	}
	verbs := []string{"recv", "recv", "recv", "send", "header", "set header", "trailer", "sleep", "nothing"}
	for range draw.IntN(7) {
		switch verb := verbs[draw.IntN(len(verbs))]; verb {
		case "nothing":
		case "send":
			if p.kind != diffUnary && p.kind != diffClientStream || draw.IntN(8) == 0 {
				add(verb, drawSize(draw), "")
			}
		case "sleep":
			add(verb, draw.IntN(100), "")
		case "trailer":
			if draw.IntN(5) == 0 {
				add(verb, 0, "grpc-retry-pushback-ms="+[]string{"10", "-1", "x"}[draw.IntN(3)])
				continue
			}
			fallthrough
		case "header", "set header":
			add(verb, 0, fmt.Sprintf("k%d=%d", draw.IntN(2), draw.IntN(10)))
		default:
			add(verb, 0, "")
		}
	}
	if draw.IntN(3) > 0 {
		add("recv all", 0, "")
	}
	switch p.kind {
	case diffUnary, diffClientStream: // with a violation of the cardinality now and then
		for range []int{1, 1, 1, 1, 1, 1, 0, 2}[draw.IntN(8)] {
			add("send", drawSize(draw), "")
		}
	default:
		for range draw.IntN(4) {
			add("send", drawSize(draw), "")
		}
	}
	if draw.IntN(12) == 0 {
		add("send garbage", 0, "")
	}
	switch draw.IntN(6) {
	case 0, 1:
		code := 1 + draw.IntN(16)
		if p.retried(codes.Code(code)) {
			code = int(codes.NotFound)
		}
		text := []string{"", "gone", "details"}[draw.IntN(3)]
		add("fail", code, text)
	case 2:
		if draw.IntN(3) == 0 {
			add("hang", 0, "")
		}
	}
	return steps
}

// retried: the policy would retry a failure with this code, which is not what is tested here.
func (p *diffProgram) retried(code codes.Code) bool {
	if p.has("retries only DATA_LOSS") {
		return code == codes.DataLoss
	}
	return code == codes.Unavailable || code == codes.ResourceExhausted
}

func (p *diffProgram) drawApplication(draw *rand.Rand) {
	add := func(i int, verbs ...string) {
		for _, verb := range verbs {
			s := diffStep{verb: verb, now: draw.IntN(4) == 0}
			switch verb {
			case "send":
				s.n = drawSize(draw)
			case "sleep":
				s.n = draw.IntN(120)
			}
			p.app[i] = append(p.app[i], s)
		}
	}
	some := func(i, n int, verbs ...string) {
		for range n {
			add(i, verbs[draw.IntN(len(verbs))])
		}
	}
	noise := []string{"header", "context", "sleep", "sleep", "early trailer"}
	rare := []string{"cancel", "send what is no message", "close the connection"}
	extras := []string{"recv", "recv", "header", "trailer", "context", "close", "send", "sleep", "cancel"}
	some(0, draw.IntN(2)*draw.IntN(3), noise...)
	if p.kind == diffServerStream {
		if draw.IntN(10) > 0 {
			add(0, "send")
		}
		if draw.IntN(2) == 0 {
			add(0, "close")
		}
		some(0, draw.IntN(2)*draw.IntN(3), noise...)
	} else {
		receiver := 0
		if draw.IntN(2) == 0 {
			receiver = 1
		}
		for range draw.IntN(7) {
			switch draw.IntN(8) {
			case 0:
				some(0, 1, noise...)
			case 1:
				some(receiver, 1, noise...)
			case 2:
				add(receiver, "recv")
			default:
				add(0, "send")
			}
		}
		if draw.IntN(4) > 0 {
			add(0, "close")
		}
		if draw.IntN(6) == 0 {
			add(0, "send")
		}
		if receiver == 1 {
			some(1, draw.IntN(3), append(noise, "recv")...)
			if draw.IntN(4) > 0 {
				add(1, "recv all")
				some(1, draw.IntN(3), extras...)
			}
			some(0, draw.IntN(3), noise...)
			return
		}
	}
	if draw.IntN(10) == 0 {
		some(0, 1, rare...)
	}
	some(0, draw.IntN(3), append(noise, "recv", "recv")...)
	if draw.IntN(4) > 0 {
		add(0, "recv all")
		some(0, draw.IntN(5), extras...)
	}
}

// TestDifferential compares random programs on plain gRPC and on the library.
func TestDifferential(t *testing.T) {
	seed := *diffSeed
	if seed == 0 {
		seed = uint64(time.Now().UnixNano())
	}
	t.Logf("seeds %d to %d", seed, seed+uint64(*diffPrograms)-1)
	const perBubble, lanes = 25, 2
	var count diffCount
	next := make(chan int)
	go func() {
		defer close(next)
		for from := 0; from < *diffPrograms; from += perBubble {
			next <- from
		}
	}()
	t.Run("lanes", func(t *testing.T) {
		for range lanes {
			t.Run("", func(t *testing.T) {
				t.Parallel()
				for from := range next {
					if count.failed.Load() {
						continue
					}
					t.Run(strconv.Itoa(from), func(t *testing.T) {
						synctest.Test(t, func(t *testing.T) {
							lab := newDiffLab(t)
							for i := from; i < min(from+perBubble, *diffPrograms); i++ {
								lab.compare(t, seed+uint64(i), &count)
							}
						})
					})
				}
			})
		}
	})
	t.Logf("%d programs, of which plain gRPC did not repeat %d; the library repeated %d only on another run",
		count.programs, count.racy, count.doubtful)
	if count.racy*10 > count.programs {
		t.Errorf("plain gRPC did not repeat %d of %d programs: too many to be worth comparing", count.racy, count.programs)
	}
}

type diffCount struct {
	failed                   atomic.Bool
	mu                       sync.Mutex
	programs, racy, doubtful int
}

// A diffLab has the server and the ClientConns of a bubble.
type diffLab struct {
	listener *bufconn.Listener
	mu       sync.Mutex
	running  *diffRun // guarded by mu; the program that runs
	conns    map[string]*grpc.ClientConn
	handlers sync.WaitGroup
}

const (
	onPlain    = "plain"
	onBound    = "plain, bound" // its streams are bound when they open, as the library's
	onOurs     = "ours"
	onObserved = "ours, observed"
)

func newDiffLab(t *testing.T) *diffLab {
	lab := &diffLab{listener: bufconn.Listen(1 << 20), conns: map[string]*grpc.ClientConn{}}
	server := grpc.NewServer(grpc.UnknownServiceHandler(lab.serve), grpc.ForceServerCodecV2(diffCodec{}),
		grpc.InitialWindowSize(64<<10), grpc.InitialConnWindowSize(1<<20), grpc.MaxRecvMsgSize(200<<10))
	served := make(chan struct{})
	go func() { defer close(served); server.Serve(lab.listener) }()
	t.Cleanup(func() {
		for _, cc := range lab.conns {
			cc.Close()
		}
		server.Stop()
		<-served
	})
	return lab
}

// conn returns a connected ClientConn of the kind given.
func (lab *diffLab) conn(t *testing.T, kind string) *grpc.ClientConn {
	if cc := lab.conns[kind]; cc != nil && cc.GetState() == connectivity.Ready {
		return cc
	}
	opts := []grpc.DialOption{
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return lab.listener.DialContext(ctx) }),
		grpc.WithStatsHandler(lab), grpc.WithIdleTimeout(0),
		grpc.WithInitialWindowSize(64 << 10), grpc.WithInitialConnWindowSize(1 << 20), // no estimates, which depend on the past
	}
	switch kind {
	case onBound:
		opts = append(opts, grpc.WithChainStreamInterceptor(bound))
	case onOurs:
		opts = append(opts, grpcretry.DialOptions()...)
	case onObserved:
		opts = append(opts, grpcretry.DialOptions(
			grpcretry.WithObserver(func(context.Context, grpcretry.Event) {}),
			grpcretry.WithTracerProvider(tracenoop.NewTracerProvider()), grpcretry.WithCallSpan(true),
			grpcretry.WithLogger(slog.New(slog.DiscardHandler)))...)
	}
	cc, err := grpc.NewClient("passthrough:///differential", opts...)
	if err != nil {
		t.Fatal(err)
	}
	cc.Connect()
	for s := cc.GetState(); s != connectivity.Ready; s = cc.GetState() {
		cc.WaitForStateChange(t.Context(), s)
	}
	synctest.Wait()
	lab.conns[kind] = cc
	return cc
}

// bound opens a stream that gRPC does not retry. It is like one that has received something: after an io.EOF of
// SendMsg it ends when RecvMsg is called, and not before.
func bound(ctx context.Context, desc *grpc.StreamDesc, cc *grpc.ClientConn, method string, streamer grpc.Streamer,
	opts ...grpc.CallOption) (grpc.ClientStream, error) {
	stream, err := streamer(ctx, desc, cc, method, opts...)
	if err == nil {
		stream.Context()
	}
	return stream, err
}

func isPlain(kind string) bool { return kind == onPlain || kind == onBound }

// compare runs the program of a seed and reports what differs.
func (lab *diffLab) compare(t *testing.T, seed uint64, count *diffCount) {
	p := drawProgram(seed)
	racy, doubtful, difference := lab.difference(t, p)
	count.mu.Lock()
	count.programs++
	count.racy += racy
	count.doubtful += doubtful
	count.mu.Unlock()
	if difference == "" {
		return
	}
	count.failed.Store(true)
	t.Errorf("%v\n%s\n-differential.seed=%d -differential.programs=1 draws it again", p, difference, seed)
}

// difference runs p three times, and more often if there is something to be found.
func (lab *diffLab) difference(t *testing.T, p *diffProgram) (racy, doubtful int, text string) {
	plain := lab.run(t, p, onPlain)
	ours := lab.run(t, p, p.conn())
	again := lab.run(t, p, onPlain)
	if !maps.EqualFunc(plain, again, slices.Equal) {
		return 1, 0, ""
	}
	if p.equal(plain, ours) {
		return 0, 0, ""
	}
	differs := slices.Sorted(maps.Keys(merged(plain, ours)))
	explainedBy := func(possible diffLog) {
		differs = slices.DeleteFunc(differs, func(part string) bool { return p.equalPart(part, possible, ours) })
	}
	explainedBy(plain)
	for range 1000 { // races within gRPC may be rare
		if len(differs) == 0 {
			return 0, 1, ""
		}
		explainedBy(lab.run(t, p, onPlain))
		explainedBy(lab.run(t, p, onBound))
	}
	for _, part := range differs {
		text += fmt.Sprintf("%s: plain gRPC\n    %s\n  and the library\n    %s\n", part,
			strings.Join(plain[part], "\n    "), strings.Join(ours[part], "\n    "))
	}
	return 0, 0, text
}

// equal compares what plain gRPC and the library did.
func (p *diffProgram) equal(plain, ours diffLog) bool {
	for part := range merged(plain, ours) {
		if !p.equalPart(part, plain, ours) {
			return false
		}
	}
	return true
}

// equalPart compares one part. These are the exceptions:
//
//   - A second response where one is allowed: gRPC 1.85 returns an error for it, but does not end
//     the call (clientStreamWrapper.RecvMsg), so that OnFinish never runs for a unary call, and for
//     a stream only with its context. The library ends the call. Compared is what the application
//     sees until then.
//   - A receiver that comes after the application has cancelled, closed the ClientConn or let the
//     deadline pass: the call has ended with that, and says so. Plain gRPC reports that end to
//     OnFinish as well, but RecvMsg still returns what had arrived before.
//   - SendMsg that returned io.EOF: the library has asked gRPC for the status then, to find out
//     whether to retry. So OnFinish and stats.End come earlier, and with that status even if the
//     application never asks, but ends the call otherwise.
//   - A client stream without a response, in which the application calls Header: gRPC reports
//     success to OnFinish, and a violation to RecvMsg. The library reports the violation to both.
//   - The order of stats at the same moment, which depends on goroutines of gRPC, and those of a
//     message that is read after stats.End.
//   - grpc.Header, grpc.Trailer and grpc.Peer, if a hedged call ends with the caller's context, show
//     the attempt that was sent last.
//   - Anything that is so in plain gRPC, too, if its stream is bound when it opens, see bound.
//
// See also diffRun.receive, for RecvMsg after a failure.
func (p *diffProgram) equalPart(part string, plain, ours diffLog) bool {
	a, b := plain[part], ours[part]
	if slices.Equal(a, b) {
		return true
	}
	application, attempt := strings.HasPrefix(part, "app "), strings.HasPrefix(part, "attempt ")
	gaveUp := len(ours[partGaveUp]) > 0
	if at, violated := plain.find("cardinality violation: expected <EOF>"); violated {
		if gaveUp && ours.gaveUp() <= at {
			return true // the library says that the call has ended with that
		}
		if at2, violated := ours.find("cardinality violation: expected <EOF>"); !violated || at2 != at {
			return false
		}
		return !application || slices.Equal(until(a, at), until(b, at))
	}
	if attempt {
		a, b = settled(a), settled(b)
	}
	if strings.HasPrefix(part, "server ") { // what arrives there after the application has given up is a matter of goroutines
		a, b = until(a, plain.gaveUp()), until(b, ours.gaveUp())
		if at, refused := plain.find("send: *status.Error"); refused { // which ends the call as well
			a, b = until(a, at), until(b, at)
		}
	}
	if at, refused := plain.find("send: EOF"); refused && application {
		a, b = withoutContext(a, at), withoutContext(b, at)
	} else if refused && (attempt || part == "OnFinish") {
		return sooner(a, b, func(what string) bool { return part == "OnFinish" || strings.HasPrefix(what, "*stats.End") })
	}
	if _, lied := merged(plain, ours).find("cardinality violation: received no response"); lied && part == "OnFinish" {
		a = slices.Clone(a)
		for i, line := range a {
			a[i] = strings.Replace(line, " ms  nil",
				" ms  *status.Error rpc error: code = Internal desc = cardinality violation: "+
					"received no response message from non-server-streaming RPC", 1)
		}
	}
	if gaveUp && (attempt || part == "OnFinish") {
		a, b = until(a, plain.gaveUp()), until(b, ours.gaveUp()) // goroutines of gRPC compete to end the call
	}
	if application {
		for i := range min(len(a), len(b)) {
			at, _ := timeOf(a[i])
			at2, what2 := timeOf(b[i])
			if a[i] != b[i] && at == at2 && ours.gaveUp() <= at && strings.HasPrefix(what2, "recv: *status.Error") &&
				(strings.HasSuffix(what2, "desc = context canceled") || strings.HasSuffix(what2, "desc = context deadline exceeded") ||
					strings.HasSuffix(what2, "desc = grpc: the client connection is closing")) {
				return true
			}
			if a[i] != b[i] {
				break
			}
		}
	}
	return slices.Equal(a, b)
}

// sooner compares lines, but for those that may come earlier, and then with another result.
func sooner(plain, ours []string, may func(what string) bool) bool {
	return slices.EqualFunc(plain, ours, func(a, b string) bool {
		at, what := timeOf(a)
		at2, what2 := timeOf(b)
		return a == b || at2 <= at && may(what) && may(what2)
	})
}

// timeOf splits a line, see diffRun.note.
func timeOf(line string) (ms int, what string) {
	at, what, _ := strings.Cut(strings.TrimSpace(line), " ms  ")
	ms, _ = strconv.Atoi(at)
	return ms, what
}

// find returns when text first appears.
func (l diffLog) find(text string) (ms int, found bool) {
	for _, lines := range l {
		for _, line := range lines {
			if strings.Contains(line, text) {
				at, _ := timeOf(line)
				if !found || at < ms {
					ms, found = at, true
				}
			}
		}
	}
	return ms, found
}

// gaveUp is when the application had the call end.
func (l diffLog) gaveUp() int {
	ms, _ := timeOf(l[partGaveUp][0])
	return ms
}

// until is what comes before the time given, or up to the violation at that time.
func until(lines []string, ms int) []string {
	for i, line := range lines {
		if at, what := timeOf(line); strings.Contains(what, "cardinality violation") {
			return lines[:i+1]
		} else if at >= ms {
			return lines[:i]
		}
	}
	return lines
}

// settled is the stats of an attempt up to its end, in an order that is always the same.
func settled(lines []string) []string {
	for i, line := range lines {
		if strings.Contains(line, "*stats.End") {
			at, _ := timeOf(line)
			lines = slices.DeleteFunc(slices.Clone(lines[:i+1]), func(line string) bool { // it competes with the end
				at2, what := timeOf(line)
				return at2 == at && strings.Contains(what, "*stats.InTrailer")
			})
			break
		}
	}
	rank := func(line string) int {
		for i, event := range []string{"tag: ", "*stats.Begin", "*stats.OutHeader"} {
			if strings.Contains(line, event) {
				return i
			}
		}
		if strings.Contains(line, "*stats.End") {
			return 4
		}
		return 3
	}
	return slices.SortedStableFunc(slices.Values(lines), func(a, b string) int {
		at, what := timeOf(a)
		at2, what2 := timeOf(b)
		return cmp.Or(cmp.Compare(at, at2), cmp.Compare(rank(a), rank(b)), cmp.Compare(what, what2))
	})
}

// withoutContext leaves out what Context returned from the time given.
func withoutContext(lines []string, ms int) []string {
	return slices.DeleteFunc(slices.Clone(lines), func(line string) bool {
		at, what := timeOf(line)
		return at >= ms && strings.HasPrefix(what, "context: ")
	})
}

// conn is which ClientConn of the library the program wants.
func (p *diffProgram) conn() string {
	if p.has("observed") {
		return onObserved
	}
	return onOurs
}

func merged(a, b diffLog) diffLog {
	all := maps.Clone(a)
	maps.Copy(all, b)
	return all
}

// A diffLog is what each part of a program saw, in order.
type diffLog map[string][]string

const partGaveUp = "gave up"

// A diffRun is a program that runs.
type diffRun struct {
	program *diffProgram
	start   time.Time
	ctx     context.Context // of the call
	done    func()          // ends it
	cc      *grpc.ClientConn

	mu       sync.Mutex
	log      diffLog           // guarded by mu
	attempts int               // guarded by mu; that a stats.Handler has seen
	stream   grpc.ClientStream // guarded by mu
	ended    bool              // guarded by mu; the application has seen the end
	failed   bool              // guarded by mu; which was a failure
	message  int               // guarded by mu; number of the next message
	targets  struct {          // of call options
		header, trailer metadata.MD
		peer            peer.Peer
	}
}

// note adds a line to what a part has seen.
func (r *diffRun) note(part, format string, args ...any) {
	line := fmt.Sprintf("%5d ms  ", time.Since(r.start).Milliseconds()) + fmt.Sprintf(format, args...)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.log[part] = append(r.log[part], line)
}

// slot waits for the goroutine's next slot.
func (r *diffRun) slot(s diffStep, offset time.Duration) {
	if s.now {
		return
	}
	past := time.Since(r.start)
	next := past.Truncate(diffSlot) + offset
	if next <= past {
		next += diffSlot
	}
	time.Sleep(next - past)
}

// run plays the program on a connection of the kind given.
func (lab *diffLab) run(t *testing.T, p *diffProgram, kind string) diffLog {
	r := &diffRun{program: p, start: time.Now(), cc: lab.conn(t, kind), log: diffLog{}}
	lab.mu.Lock()
	lab.running = r
	lab.mu.Unlock()
	r.start = time.Now()
	ctx, cancel := context.WithTimeout(context.WithValue(t.Context(), diffKey{}, r), p.deadlineAfter())
	defer cancel()
	context.AfterFunc(ctx, func() { r.note(partGaveUp, "context") })
	r.ctx, r.done = ctx, cancel
	if p.cancel > 0 {
		defer time.AfterFunc(p.cancelAfter(), cancel).Stop()
	}
	if p.has("metadata") {
		ctx = metadata.AppendToOutgoingContext(ctx, "of", "the caller")
	}
	opts := r.callOptions()
	if !isPlain(kind) {
		opts = append(opts, p.retryOptions()...)
	}

	ended := make(chan struct{})
	go func() {
		defer close(ended)
		r.application(ctx, opts)
	}()
	select {
	case <-ended:
	case <-time.After(time.Hour):
		r.note("hang", "the application does not return")
		cancel()
		r.cc.Close()
		select {
		case <-ended:
		case <-time.After(time.Hour):
			panic(fmt.Sprintf("%s hangs for good: %v\n%v", kind, p, r.log))
		}
	}
	time.Sleep(500 * time.Millisecond)
	cancel() // for programs that end before the call does
	time.Sleep(2 * time.Second)
	synctest.Wait()
	lab.handlers.Wait()
	synctest.Wait()
	r.note("targets", "%s", r.describeTargets())
	r.mu.Lock()
	defer r.mu.Unlock()
	if p.hedges() && !isPlain(kind) { // only the first attempt has its like in plain gRPC
		maps.DeleteFunc(r.log, func(part string, _ []string) bool {
			return strings.HasPrefix(part, "attempt ") && part != "attempt 1" || strings.HasPrefix(part, "server ") && part != "server 1"
		})
	}
	return maps.Clone(r.log)
}

// diffKey is the key of the run in a call's context.
type diffKey struct{}

func (r *diffRun) callOptions() (opts []grpc.CallOption) {
	finish := func(err error) {
		r.note("OnFinish", "%s %s", describe(err), r.describeTargets())
		r.mu.Lock()
		stream := r.stream
		r.mu.Unlock()
		if stream == nil {
			return
		}
		if r.program.has("trailer in OnFinish") {
			r.note("OnFinish", "trailer %s", describeMD(stream.Trailer()))
		}
		if r.program.has("context in OnFinish") {
			r.note("OnFinish", "context with %v", stream.Context().Value(diffKey{}) == r)
		}
		if r.program.has("header in OnFinish") {
			md, err := stream.Header()
			r.note("OnFinish", "header %s %s", describeMD(md), describe(err))
		}
	}
	opts = append(opts, grpc.OnFinish(finish))
	for _, option := range r.program.options {
		switch option {
		case "header":
			opts = append(opts, grpc.Header(&r.targets.header))
		case "trailer":
			opts = append(opts, grpc.Trailer(&r.targets.trailer))
		case "peer":
			opts = append(opts, grpc.Peer(&r.targets.peer))
		case "send at most 100":
			opts = append(opts, grpc.MaxCallSendMsgSize(100))
		case "receive at most 100":
			opts = append(opts, grpc.MaxCallRecvMsgSize(100))
		case "unknown compressor":
			opts = append(opts, grpc.UseCompressor("unheard-of"))
		case "wait for ready":
			opts = append(opts, grpc.WaitForReady(true))
		case "static method":
			opts = append(opts, grpc.StaticMethod())
		}
	}
	return opts
}

// retryOptions is what the library is told of the call.
func (p *diffProgram) retryOptions() (opts []grpc.CallOption) {
	lost := []codes.Code{codes.DataLoss}
	for _, option := range p.policy {
		var o grpcretry.CallOption
		switch option {
		case "retries only DATA_LOSS":
			o = grpcretry.WithCodes(lost...)
		case "attempt timeout of an hour":
			o = grpcretry.WithAttemptTimeout(time.Hour)
		case "attempt timeout of 6s":
			o = grpcretry.WithAttemptTimeout(6 * time.Second)
		case "hedging after an hour":
			o = grpcretry.WithPolicy(grpcretry.Policy{MaxAttempts: 2, Hedging: &grpcretry.Hedging{Delay: grpcretry.HedgeAfter(time.Hour)}})
		case "hedges that lose":
			o = grpcretry.WithPolicy(grpcretry.Policy{MaxAttempts: 2,
				Hedging: &grpcretry.Hedging{Delay: grpcretry.HedgeAfter(20 * time.Millisecond), Budget: grpcretry.Unlimited}})
		case "buffer of 30 bytes":
			o = grpcretry.WithBufferLimit(30)
		case "buffer of 0 bytes":
			o = grpcretry.WithBufferLimit(0)
		case "one attempt":
			o = grpcretry.WithMaxAttempts(1)
		case "disabled":
			o = grpcretry.Disable()
		case "classifier":
			o = grpcretry.WithClassifier(func(context.Context, grpcretry.Attempt) grpcretry.Classification { return grpcretry.Default })
		case "max elapsed of a minute":
			o = grpcretry.WithMaxElapsed(time.Minute)
		default:
			continue
		}
		opts = append(opts, o)
	}
	return opts
}

// application plays the application's part.
func (r *diffRun) application(ctx context.Context, opts []grpc.CallOption) {
	p := r.program
	if p.kind == diffUnary {
		reply := new(echov1.EchoResponse)
		err := r.cc.Invoke(ctx, "/differential/Unary", r.next(p.app[0][0].n), reply, opts...)
		r.note("app 1", "call: %s %s", describeMessage(reply), describe(err))
		r.note("app 1", "%s", r.describeTargets())
		return
	}
	desc := &grpc.StreamDesc{StreamName: "Stream", ClientStreams: p.kind != diffServerStream, ServerStreams: p.kind != diffClientStream}
	stream, err := r.cc.NewStream(ctx, desc, "/differential/Stream", opts...)
	r.note("app 1", "open: %s", describe(err))
	if err != nil {
		return
	}
	r.mu.Lock()
	r.stream = stream
	r.mu.Unlock()
	var group sync.WaitGroup
	group.Go(func() { r.play("app 1", atApplication, p.app[0], stream) })
	group.Go(func() { r.play("app 2", atApplication2, p.app[1], stream) })
	group.Wait()
}

func (r *diffRun) play(part string, offset time.Duration, steps []diffStep, stream grpc.ClientStream) {
	for _, s := range steps {
		r.slot(s, offset)
		switch s.verb {
		case "send":
			r.send(part, s, stream, r.next(s.n))
		case "send what is no message":
			r.send(part, s, stream, "no message")
		case "close":
			r.mu.Lock() // gRPC wants it after the SendMsg of another goroutine
			r.mu.Unlock()
			r.note(part, "close: %s", describe(stream.CloseSend()))
		case "recv":
			r.receive(part, stream)
		case "recv all":
			for range 20 {
				if r.receive(part, stream) != nil {
					break
				}
			}
		case "header":
			md, err := stream.Header()
			r.note(part, "header: %s %s", describeMD(md), describe(err))
			time.Sleep(time.Nanosecond) // another goroutine may be about to learn of a failure, see receive
		case "trailer": // not before the end, nor after the caller's: gRPC may still write to it then
			r.mu.Lock()
			ended := r.ended && r.ctx.Err() == nil
			r.mu.Unlock()
			if ended {
				r.note(part, "trailer: %s", describeMD(stream.Trailer()))
			}
		case "context":
			own := stream.Context()
			time.Sleep(time.Nanosecond) // gRPC ends it on a goroutine, which may be about to run
			r.note(part, "context: %s", r.describeContext(own))
		case "sleep":
			time.Sleep(time.Duration(s.n) * time.Millisecond)
		case "cancel":
			r.done()
		case "close the connection":
			r.note(partGaveUp, "connection")
			r.cc.Close()
		}
	}
}

func (r *diffRun) receive(part string, stream grpc.ClientStream) error {
	r.mu.Lock()
	failed := r.failed
	r.mu.Unlock()
	m := new(echov1.EchoResponse)
	err := stream.RecvMsg(m)
	switch {
	case failed: // gRPC reads on, in the middle of a message if need be
		r.note(part, "recv: after a failure")
		return io.EOF
	case err != nil:
		r.note(part, "recv: %s", describe(err))
	default:
		r.note(part, "recv: %s", describeMessage(m))
	}
	r.mu.Lock()
	r.ended = r.ended || err != nil || r.program.kind == diffClientStream
	r.failed = r.failed || err != nil && err != io.EOF
	r.mu.Unlock()
	return err
}

// send sends a message. If that fails otherwise than with io.EOF, the call has failed.
func (r *diffRun) send(part string, s diffStep, stream grpc.ClientStream, m any) {
	err := stream.SendMsg(m)
	r.note(part, "%s: %s", s.verb, describe(err))
	if err != nil && err != io.EOF {
		r.mu.Lock()
		r.failed = true
		r.mu.Unlock()
	}
}

// next is the application's next message.
func (r *diffRun) next(size int) *echov1.EchoRequest {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.message++
	return &echov1.EchoRequest{Sequence: int64(r.message), Payload: make([]byte, size)}
}

// serve plays the server's part in one attempt.
func (lab *diffLab) serve(_ any, stream grpc.ServerStream) (err error) {
	lab.mu.Lock()
	r := lab.running
	lab.mu.Unlock()
	lab.handlers.Add(1)
	defer lab.handlers.Done()
	ctx := stream.Context()
	md, _ := metadata.FromIncomingContext(ctx)
	number := 1
	if previous := md.Get("grpc-previous-rpc-attempts"); len(previous) > 0 {
		n, _ := strconv.Atoi(previous[0])
		number += n
	}
	part := fmt.Sprintf("server %d", number)
	delete(md, "user-agent")
	deadline, _ := ctx.Deadline()
	r.note(part, "%s deadline %v", describeMD(md), deadline.Sub(r.start).Round(time.Millisecond))
	defer func() {
		if ctx.Err() != nil {
			time.Sleep(time.Second) // the client has ended the call, and must not learn of another end at the same moment
		}
		r.note(part, "ends with %s, context %v", describe(err), ctx.Err())
	}()
	if number > 1 {
		<-ctx.Done()
		return ctx.Err()
	}
	sent := 0
	send := func(m []byte) error {
		err := stream.SendMsg(&m)
		r.note(part, "send: %s", describe(err))
		return err
	}
	receive := func() error {
		var b []byte
		err := stream.RecvMsg(&b)
		m := new(echov1.EchoRequest)
		if err == nil {
			err = proto.Unmarshal(b, m)
		}
		r.note(part, "recv: %d with %d bytes %s", m.GetSequence(), len(m.GetPayload()), describe(err))
		return err
	}
	for i, s := range r.program.server {
		s.now = s.now && i > 0
		r.slot(s, atServer)
		switch s.verb {
		case "recv", "recv all":
			for {
				if err = receive(); err != nil || s.verb == "recv" {
					break
				}
			}
			if err != nil && err != io.EOF {
				return err
			}
		case "send":
			sent++
			m, _ := proto.Marshal(&echov1.EchoResponse{Message: strconv.Itoa(sent), Payload: make([]byte, s.n)})
			if err = send(m); err != nil {
				return err
			}
		case "send garbage":
			if err = send([]byte{0xff, 0xff, 0xff}); err != nil {
				return err
			}
		case "header":
			r.note(part, "header: %s", describe(stream.SendHeader(pairOf(s.text))))
		case "set header":
			r.note(part, "set header: %s", describe(stream.SetHeader(pairOf(s.text))))
		case "trailer":
			stream.SetTrailer(pairOf(s.text))
		case "sleep":
			time.Sleep(time.Duration(s.n) * time.Millisecond)
		case "hang":
			<-ctx.Done()
			return ctx.Err()
		case "fail":
			st := status.New(codes.Code(s.n), s.text)
			if s.text == "details" {
				st, _ = st.WithDetails(&errdetails.ErrorInfo{Reason: "drawn"}, &errdetails.RequestInfo{RequestId: "7"})
			}
			return st.Err()
		}
	}
	r.slot(diffStep{}, atServer)
	return nil
}

func pairOf(text string) metadata.MD {
	k, v, _ := strings.Cut(text, "=")
	return metadata.Pairs(k, v)
}

// A diffCodec is the server's codec: messages are bytes.
type diffCodec struct{}

func (diffCodec) Name() string { return "proto" }

func (diffCodec) Marshal(v any) (mem.BufferSlice, error) {
	return mem.BufferSlice{mem.SliceBuffer(*v.(*[]byte))}, nil
}

func (diffCodec) Unmarshal(data mem.BufferSlice, v any) error {
	*v.(*[]byte) = data.Materialize()
	return nil
}

// diffLab is the stats.Handler of its ClientConns: every attempt has its own list.
type diffAttemptKey struct{}

func (lab *diffLab) TagRPC(ctx context.Context, info *stats.RPCTagInfo) context.Context {
	r, ok := ctx.Value(diffKey{}).(*diffRun)
	if !ok {
		return ctx
	}
	r.mu.Lock()
	r.attempts++
	part := fmt.Sprintf("attempt %d", r.attempts)
	r.mu.Unlock()
	r.note(part, "tag: %s %v %v", info.FullMethodName, info.FailFast, info.NameResolutionDelay)
	return context.WithValue(ctx, diffAttemptKey{}, part)
}

func (lab *diffLab) HandleRPC(ctx context.Context, s stats.RPCStats) {
	part, ok := ctx.Value(diffAttemptKey{}).(string)
	if !ok {
		return
	}
	r := ctx.Value(diffKey{}).(*diffRun)
	text := ""
	switch s := s.(type) {
	case *stats.Begin:
		text = fmt.Sprint(s.FailFast, s.IsClientStream, s.IsServerStream, s.IsTransparentRetryAttempt)
	case *stats.OutHeader:
		authority := reflect.ValueOf(s).Elem().FieldByName("Authority") // since grpc-go 1.85
		text = fmt.Sprint(s.FullMethod, s.Compression, describeMD(s.Header), s.RemoteAddr, authority)
	case *stats.OutPayload:
		text = fmt.Sprint(s.Length, s.CompressedLength, s.WireLength)
	case *stats.InHeader:
		text = fmt.Sprint(describeMD(s.Header), s.Compression)
	case *stats.InPayload:
		text = fmt.Sprint(s.Length, s.CompressedLength, s.WireLength)
	case *stats.InTrailer:
		text = describeMD(s.Trailer)
	case *stats.End:
		text = describe(s.Error) + " " + describeMD(s.Trailer)
	}
	r.note(part, "%T %s", s, text)
}

func (lab *diffLab) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }

func (lab *diffLab) HandleConn(context.Context, stats.ConnStats) {}

// describe tells everything about an error. Of a call that the caller's context has ended the
// library returns an *Error, whose Last is then what gRPC said.
func describe(err error) string {
	var e *grpcretry.Error
	switch {
	case err == nil:
		return "nil"
	case err == io.EOF:
		return "EOF"
	case errors.As(err, &e) && (errors.Is(e, context.Canceled) || errors.Is(e, context.DeadlineExceeded)) &&
		status.Code(e) == status.Code(e.Last):
		return describe(e.Last)
	}
	text := fmt.Sprintf("%T %v", err, err)
	if st, ok := status.FromError(err); ok {
		for _, detail := range st.Proto().GetDetails() {
			text += fmt.Sprintf(" %s:%x", detail.GetTypeUrl(), detail.GetValue())
		}
	}
	return text
}

func describeMD(md metadata.MD) string {
	if md == nil {
		return "nil"
	}
	var b strings.Builder
	for _, key := range slices.Sorted(maps.Keys(md)) {
		fmt.Fprintf(&b, "%s=%q ", key, md[key])
	}
	return "{" + strings.TrimSpace(b.String()) + "}"
}

func describeMessage(m *echov1.EchoResponse) string {
	return fmt.Sprintf("%q with %d bytes", m.GetMessage(), len(m.GetPayload()))
}

// describeTargets tells what the call options have set.
func (r *diffRun) describeTargets() string {
	if r.ctx.Err() != nil && r.program.hedges() {
		return "of any attempt"
	}
	return fmt.Sprintf("header=%s trailer=%s peer=%v", describeMD(r.targets.header), describeMD(r.targets.trailer), r.targets.peer.Addr)
}

func (r *diffRun) describeContext(ctx context.Context) string {
	deadline, _ := ctx.Deadline()
	p, _ := peer.FromContext(ctx)
	var addr net.Addr
	if p != nil {
		addr = p.Addr
	}
	md, _ := metadata.FromOutgoingContext(ctx)
	if r.program.hedges() { // it may be a hedge's
		md = md.Copy()
		delete(md, "grpc-previous-rpc-attempts")
		delete(md, "grpcretry-caller-retries") // if the attempt before it had no response
	}
	return fmt.Sprintf("%v %v %v %v %v %v", ctx.Value(diffKey{}) == r, ctx.Err(), context.Cause(ctx), deadline.Sub(r.start), addr,
		describeMD(md))
}
