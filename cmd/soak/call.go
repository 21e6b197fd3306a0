package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// A call is one call of a client, with what the application has seen of it.
type call struct {
	timeline
	client   *client
	profile  *profile
	conn     *conn
	draw     *rand.Rand
	id       callID
	kind     kind
	limit    int  // attempts that the policy allows
	exact    bool // and the call has no other limit
	deadline time.Time
	ctx      context.Context
	cancel   context.CancelFunc
	options  []grpc.CallOption
	settings []string // what is special about the call, for its timeline

	wasExcused bool // the application or the deadline has ended the call
	abandons   bool // the application cancels the call, and looks no further
	cancels    bool // it cancels the call, and looks at the result
	header     metadata.MD
	trailer    metadata.MD

	token     token // of the attempt that the application has seen, 0 for none
	count     int   // messages that were acknowledged
	responses int   // messages that were received
	clean     bool  // the end of a stream was io.EOF
	wrong     []string
}

// callIn is the key of a call in its context, for the observer.
type callIn struct{}

// violates notes what is wrong with the call.
func (c *call) violates(format string, args ...any) {
	c.wrong = append(c.wrong, fmt.Sprintf(format, args...))
}

// prepare draws what the call is like.
func (c *call) prepare(now time.Time) {
	c.begin(now)
	timeout := 8 * time.Second
	switch n := c.draw.IntN(100); {
	case n < 2:
		timeout = time.Duration(c.draw.IntN(3000)) * time.Microsecond
	case n < 6:
		timeout = time.Duration(5+c.draw.IntN(200)) * time.Millisecond
	}
	c.deadline = now.Add(timeout)
	md := metadata.Pairs(callKey, strconv.FormatUint(uint64(c.id), 16))
	if c.kind.once() {
		md.Set(onceKey, "1")
	}
	ctx := metadata.NewOutgoingContext(context.WithValue(context.Background(), callIn{}, c), md)
	c.ctx, c.cancel = context.WithDeadline(ctx, c.deadline)
	c.options = append(c.options, grpc.OnFinish(c.finish), grpc.Header(&c.header), grpc.Trailer(&c.trailer))
	c.limit = c.profile.attempts
	if c.profile.hedgeAll && (c.kind == unary || c.kind == serverStream) {
		c.limit = max(c.limit, c.profile.hedges)
	}
	c.drawPolicy()
	switch n := c.draw.IntN(200); {
	case n == 0:
		c.abandons = !c.kind.unary()
		c.cancels = !c.abandons
	case n < 4:
		c.cancels = true
	}
}

// drawPolicy draws the call's own options.
func (c *call) drawPolicy() {
	set := func(text string, o grpc.CallOption) {
		c.settings = append(c.settings, text)
		c.options = append(c.options, o)
	}
	if c.kind.once() && c.kind != unaryOnce { // Append has its option by its name
		c.options = append(c.options, grpcretry.WithUnsentOnly(true))
	}
	if c.kind.hedged() {
		n, after := 2+c.draw.IntN(2), time.Duration(c.draw.IntN(4000))*time.Microsecond
		h := grpcretry.Hedging{Delay: grpcretry.HedgeAfter(after)}
		if c.draw.IntN(2) == 0 {
			h.Budget = grpcretry.Unlimited
		}
		c.limit = n
		set(fmt.Sprintf("%d hedged attempts, each after %v", n, after), grpcretry.WithPolicy(grpcretry.Policy{MaxAttempts: n, Hedging: &h}))
	} else if c.draw.IntN(5) == 0 {
		n := 1 + c.draw.IntN(6)
		c.limit, c.exact = n, !c.profile.hedgeAll
		set(fmt.Sprintf("%d attempts", n), grpcretry.WithMaxAttempts(n))
	}
	if c.draw.IntN(10) == 0 {
		d := time.Duration(2+c.draw.IntN(60)) * time.Millisecond
		set(fmt.Sprintf("attempt timeout %v", d), grpcretry.WithAttemptTimeout(d))
	}
	if !c.kind.unary() && c.draw.IntN(10) == 0 {
		limit := []int{0, 1, 300, 3000, 1 << 20}[c.draw.IntN(5)]
		set(fmt.Sprintf("buffer of %d bytes", limit), grpcretry.WithBufferLimit(limit))
	}
	if c.draw.IntN(10) == 0 {
		set("waits for ready", grpc.WaitForReady(true))
	}
}

// run makes the call, and returns its result.
func (c *call) run() error {
	defer c.cancel()
	defer func() { c.wasExcused = c.ctx.Err() != nil }()
	if c.cancels {
		c.settings = append(c.settings, "cancelled")
		defer time.AfterFunc(time.Duration(c.draw.IntN(20000))*time.Microsecond, c.cancel).Stop()
	}
	switch c.kind {
	case unary, unaryHedged:
		return c.unary(echov1.NewEchoServiceClient(c.conn.cc).Echo)
	case unaryOnce:
		return c.unary(echov1.NewEchoServiceClient(c.conn.cc).Append)
	case unaryLayered:
		return c.unary(echov1.NewEchoServiceClient(c.conn.cc).Put)
	case serverStream, serverStreamOnce, serverStreamHedged:
		return c.expand()
	case clientStream, clientStreamOnce:
		return c.collect()
	default:
		return c.chat()
	}
}

func (c *call) request(place int) *echov1.EchoRequest {
	return &echov1.EchoRequest{Payload: c.id.payload(request, place), Sequence: int64(place)}
}

// saw checks message number place of the response.
func (c *call) saw(place int, m *echov1.EchoResponse) {
	t, err := parseToken(m.GetMessage())
	switch {
	case err != nil:
		c.violates("message %d of the response names no attempt: %v", place, err)
		return
	case c.token != 0 && c.token != t:
		c.violates("message %d of the response is from attempt %v, and those before it were from %v", place, t, c.token)
	}
	c.token = t
	if err := c.id.checkMessage(response, place, m.GetSequence(), m.GetPayload()); err != nil {
		c.violates("in the response, %v", err)
	}
	c.responses++
}

func (c *call) unary(method func(context.Context, *echov1.EchoRequest, ...grpc.CallOption) (*echov1.EchoResponse, error)) error {
	reply, err := method(c.ctx, c.request(0), c.options...)
	if err == nil {
		c.saw(0, reply)
		c.count = 1
	}
	return err
}

// abandon ends a stream at which nobody looks any more.
func (c *call) abandon() error {
	c.settings = append(c.settings, "abandoned")
	c.cancel()
	return context.Canceled
}

func (c *call) expand() error {
	stream, err := echov1.NewEchoServiceClient(c.conn.cc).Expand(c.ctx, c.request(0), c.options...)
	if err != nil {
		return err
	}
	stop := -1
	if c.abandons {
		stop = c.draw.IntN(c.id.messages() + 1)
	}
	return c.receive(stream, stop, c.id.messages(), func() { c.count = 1 })
}

// receive receives all messages of a stream; want are expected. It abandons the stream after stop
// messages, unless stop is negative.
func (c *call) receive(stream grpc.ServerStreamingClient[echov1.EchoResponse], stop, want int, acknowledged func()) error {
	c.lookAround(stream)
	for place := 0; ; place++ {
		if place == stop {
			return c.abandon()
		}
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			if place == 0 && len(stream.Trailer()) == 0 && c.passed() {
				return errFalseEnd
			}
			c.clean = true
			if place != want {
				c.violates("the stream ended well after %d messages, and the server sends %d", place, want)
			}
			if md := stream.Trailer(); !c.names(md) {
				c.violates("the stream ended well, and its trailer %v does not name attempt %v", md, c.token)
			}
			return nil
		}
		if err != nil {
			return err
		}
		c.saw(place, m)
		acknowledged()
	}
}

// lookAround sometimes calls the methods of a stream that commit it.
func (c *call) lookAround(stream grpc.ClientStream) {
	switch c.draw.IntN(30) {
	case 0:
		c.settings = append(c.settings, "Header is called")
		if md, err := stream.Header(); err == nil && len(md) > 0 {
			if t, ok := tokenIn(md); ok {
				c.token = t // the messages must be from the same attempt
			} else {
				c.violates("the header %v names no attempt", md)
			}
		}
	case 1:
		c.settings = append(c.settings, "Context is called")
		if stream.Context() == nil {
			c.violates("the stream has no context")
		}
	}
}

// tokenIn returns the attempt that metadata name.
func tokenIn(md metadata.MD) (token, bool) {
	values := md.Get(tokenKey)
	if len(values) != 1 {
		return 0, false
	}
	t, err := parseToken(values[0])
	return t, err == nil
}

// names reports whether metadata name the attempt that the application has seen, if it has seen one.
func (c *call) names(md metadata.MD) bool {
	t, ok := tokenIn(md)
	return ok && (c.token == 0 || c.token == t)
}

func (c *call) collect() error {
	stream, err := echov1.NewEchoServiceClient(c.conn.cc).Collect(c.ctx, c.options...)
	if err != nil {
		return err
	}
	stop := -1
	if c.abandons {
		stop = c.draw.IntN(c.id.messages() + 1)
	}
	for place := range c.id.messages() {
		if place == stop {
			return c.abandon()
		}
		if err := stream.Send(c.request(place)); err != nil {
			if !errors.Is(err, io.EOF) {
				return err
			}
			if c.passed() {
				return c.collectNothing(stream)
			}
			break
		}
	}
	reply, err := stream.CloseAndRecv()
	if err != nil {
		return err
	}
	want := c.id.messages()
	if early := c.id.early(); early >= 0 {
		want = early
	}
	c.saw(want, reply)
	c.count = want
	return nil
}

// errFalseEnd stands for the success of a stream without a trailer. No server has sent that, because each sends one at the end. gRPC
// reports it now and then, see internal/judges, and a call that passes through is all gRPC's own.
var errFalseEnd = status.Error(codes.Unavailable, "a false end of gRPC's")

// passed reports whether the call passes straight through to gRPC, which then has no events.
func (c *call) passed() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.moments) == 0
}

// collectNothing returns the status of a client stream whose SendMsg has returned io.EOF, in a call that
// is all gRPC's own. gRPC may retry such a call transparently after that, but without the message that
// SendMsg has not taken: CloseSend would then make a shorter request of it, and without CloseSend the
// server waits for more.
func (c *call) collectNothing(stream grpc.ClientStream) error {
	c.settings = append(c.settings, "SendMsg returned io.EOF")
	defer time.AfterFunc(time.Second, c.cancel).Stop()
	m := new(echov1.EchoResponse)
	err := stream.RecvMsg(m)
	if err == nil {
		c.count = int(m.GetSequence())
		c.saw(c.count, m)
	}
	return err
}

func (c *call) chat() error {
	stream, err := echov1.NewEchoServiceClient(c.conn.cc).Chat(c.ctx, c.options...)
	if err != nil {
		return err
	}
	sent := make(chan struct{})
	go func() { c.sendAll(stream); close(sent) }()
	stop, want := -1, c.id.messages()
	if c.abandons {
		stop = c.draw.IntN(want + 1)
	}
	if early := c.id.early(); early >= 0 {
		want = early
	}
	err = c.receive(stream, stop, want, func() { c.count++ })
	c.cancelIfStuck(sent)
	return err
}

// sendAll sends a bidi stream's messages. If that fails, RecvMsg says why.
func (c *call) sendAll(stream grpc.BidiStreamingClient[echov1.EchoRequest, echov1.EchoResponse]) {
	for place := range c.id.messages() {
		if stream.Send(c.request(place)) != nil {
			return
		}
	}
	if err := stream.CloseSend(); err != nil {
		c.cancel() // gRPC's CloseSend never fails
	}
}

// cancelIfStuck waits until the goroutine that sends has returned, because gRPC has it return once the
// stream has ended.
func (c *call) cancelIfStuck(sent <-chan struct{}) {
	patience := time.NewTimer(5 * time.Second)
	defer patience.Stop()
	select {
	case <-sent:
	case <-patience.C:
		c.violates("SendMsg has not returned 5s after the stream ended")
		c.cancel()
		<-sent
	}
}

// verify checks everything that the client knows about a call that has ended with err, and returns
// its record.
func (c *call) verify(err error, excused bool, now time.Time) clientRecord {
	c.awaitFinish()
	c.timeline.close()
	c.mu.Lock()
	defer c.mu.Unlock()
	passed := len(c.moments) == 0
	switch {
	case c.finished != 1:
		c.violates("OnFinish was called %d times", c.finished)
	case !excused && !passed && !sameResult(c.result, err):
		c.violates("OnFinish received %s, and the call returned %s", textOf(c.result), textOf(err))
	}
	if c.late != "" {
		c.violates("there was more: %s", c.late)
	}
	if excused || c.abandons { // the event, too, may report another result
		if len(c.moments) > 0 {
			if last := c.moments[len(c.moments)-1]; last.kind == grpcretry.CallEnd {
				err = last.err
			}
		}
	}
	in := bounds{attempts: c.limit, exact: c.exact, codes: c.profile.codes, wait: c.profile.wait, deadline: c.deadline.Sub(c.start)}
	if wrong := c.check(err, &in); wrong != "" {
		c.violates("%s", wrong)
	}
	if over := now.Sub(c.deadline); over > c.client.slack() {
		c.violates("the call returned %v after its deadline", over)
	}
	if err == nil && !excused {
		c.checkMetadata()
	}
	return c.record(err)
}

// awaitFinish waits for OnFinish, which for an abandoned stream comes a little later.
func (c *call) awaitFinish() {
	select {
	case <-c.done:
		return
	default:
	}
	patience := time.NewTimer(c.client.slack())
	defer patience.Stop()
	select {
	case <-c.done:
	case <-patience.C:
	}
}

// checkMetadata checks that header and trailer are those of the attempt whose result the
// application has.
func (c *call) checkMetadata() {
	if !c.kind.unary() && len(c.header) == 0 {
		return // trailers only, a success without messages
	}
	if !c.names(c.header) {
		c.violates("grpc.Header has %v, and the response is from attempt %v", c.header.Get(tokenKey), c.token)
	}
	if !c.names(c.trailer) {
		c.violates("grpc.Trailer has %v, and the response is from attempt %v", c.trailer.Get(tokenKey), c.token)
	}
}

func (c *call) record(err error) clientRecord {
	started, _ := c.attempts()
	r := clientRecord{
		call: c.id, token: c.token, kind: c.kind, code: uint8(status.Code(err)), limit: uint8(c.limit), attempts: uint8(min(started, 255)),
		count: uint32(c.count),
	}
	if c.responses > 0 {
		r.flags |= flagAcknowledged
	}
	if c.kind.once() {
		r.flags |= flagOnce
	}
	for i := range c.moments {
		if c.moments[i].hedge {
			r.flags |= flagHedged
		}
	}
	return r
}

// describe returns everything that is known about the call.
func (c *call) describe(err error) string {
	return fmt.Sprintf("%s of profile %q, deadline after %v, %d messages; %s\n%s\nthe application received %d messages, from attempt %v, "+
		"and %s",
		c.kind, c.profile.name, c.deadline.Sub(c.start), c.id.messages(), strings.Join(c.settings, ", "), c.timeline.String(),
		c.responses, c.token, textOf(err))
}

// sameResult reports whether two errors are the same result of a call.
func sameResult(a, b error) bool {
	return codeOf(a) == codeOf(b)
}

// codeOf returns an error's code; the end of a stream is a success.
func codeOf(err error) codes.Code {
	if errors.Is(err, io.EOF) {
		return codes.OK
	}
	return status.Code(err)
}

// textOf describes a result.
func textOf(err error) string {
	if err == nil {
		return "OK"
	}
	text := err.Error()
	if len(text) > 300 {
		text = text[:300] + "..."
	}
	return strings.ReplaceAll(text, "\n", " ")
}
