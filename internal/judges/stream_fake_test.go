package judges_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"reflect"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/emptypb"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// This file holds a fake of gRPC: a [grpc.Streamer] whose streams play scripts. Each behaviour
// is taken from grpc-go 1.85, and the comments name the function it is taken from. Transport,
// server and flow control are reduced to a few counters under one lock; time is that of a
// testing/synctest bubble. The fake is as unhelpful as grpc-go may be, and never worse: between
// any two steps that grpc-go does not make under one lock, a nap may let other goroutines go
// first.

// A verb is one step of a server.
type verb uint8

const (
	vSleep   verb = iota // let time pass
	vReceive             // wait for one more message, or the half-close
	vAll                 // receive until the half-close
	vHeader              // send the headers now
	vSend                // send one message, with the headers if they are still to be sent
	vRead                // wait until the client has read everything that was sent
	vEnd                 // end the stream with the script's status
	vHang                // do nothing until the client gives up
)

var verbNames = [...]string{"sleep", "receive", "receive all", "header", "send", "wait until read", "end", "hang"}

// A move is a verb with its duration.
type move struct {
	verb verb
	d    time.Duration
}

func (m move) String() string {
	if m.d > 0 {
		return fmt.Sprintf("%s %v", verbNames[m.verb], m.d)
	}
	return verbNames[m.verb]
}

// A script says what becomes of one attempt.
type script struct {
	createAfter time.Duration // how long the creation of the stream takes
	createCode  codes.Code    // not OK: the creation fails
	moves       []move
	code        codes.Code
	pushback    []string // values of the trailer grpc-retry-pushback-ms
	in, out     int      // windows: messages that the server, and the client, may leave unread
	vanishes    bool     // of a client stream: gRPC reports a lost connection as a clean io.EOF
	garbled     int      // the message, counted from 1, that the codec cannot read; 0 for none

	// A wrapper below the interceptor returns an error of its own from the nth call, counted
	// from 1, of one method; its gRPC stream stays as it is. 0 for never.
	ownCreate        bool
	ownSend, ownRecv int
}

func (s *script) String() string {
	var b strings.Builder
	if s.createAfter > 0 {
		fmt.Fprintf(&b, "created after %v; ", s.createAfter)
	}
	if s.createCode != codes.OK {
		fmt.Fprintf(&b, "creation fails with %v", s.createCode)
		return b.String()
	}
	for _, m := range s.moves {
		if m.verb == vEnd {
			fmt.Fprintf(&b, "end %v", s.code)
			if s.pushback != nil {
				fmt.Fprintf(&b, " pushback %q", s.pushback)
			}
			b.WriteString("; ")
			continue
		}
		fmt.Fprintf(&b, "%v; ", m)
	}
	fmt.Fprintf(&b, "windows in %d out %d", s.in, s.out)
	if s.vanishes {
		b.WriteString("; gRPC reports io.EOF")
	}
	if s.garbled > 0 {
		fmt.Fprintf(&b, "; message %d is garbled", s.garbled-1)
	}
	if s.ownCreate {
		b.WriteString("; a wrapper fails the creation")
	}
	if s.ownSend > 0 {
		fmt.Fprintf(&b, "; a wrapper fails SendMsg %d", s.ownSend)
	}
	if s.ownRecv > 0 {
		fmt.Fprintf(&b, "; a wrapper fails RecvMsg %d", s.ownRecv)
	}
	return b.String()
}

var errWrapper = errors.New("wrapper below: error of its own")

// errNotOpened is told from that of another attempt's method, so that the model knows whose it is.
var errNotOpened = fmt.Errorf("%w, instead of a stream", errWrapper)

// A mark is a place in the log: its number, and the time since the run's start.
type mark struct {
	seq int
	at  time.Duration
}

func (m mark) happened() bool { return m.seq > 0 }

// A fakeStream is one attempt: the clientStream of grpc-go, its transport stream, and the server.
type fakeStream struct {
	r       *run
	number  int
	script  *script
	ctx     context.Context
	cancel  context.CancelFunc
	unwatch func() bool

	finishers []func(error)
	peers     []*peer.Peer
	headers   []*metadata.MD
	trailers  []*metadata.MD

	// Everything below is guarded by r.mu.

	started   mark
	previous  string // the request header grpc-previous-rpc-attempts
	created   mark   // the streamer returned
	createErr error
	olderOpen int // an earlier attempt whose context was open when this one started; 0 for none

	headed   mark     // the headers have arrived
	arrived  []mark   // messages that have arrived at the client, with their times
	read     int      // of those, taken by RecvMsg
	accepted []string // messages that SendMsg has handed to the transport
	consumed int      // of those, taken by the server
	closed   mark     // the half-close was sent

	done     mark // the transport stream has ended
	status   *status.Status
	trailer  metadata.MD
	byServer bool

	finished   mark // cs.finished was set
	finishErr  error
	received   bool // cs.receivedFirstMsg
	recvFailed mark // RecvMsg returned an error
	sentLast   bool
	halfClosed bool // clientStreamWrapper.closeSendCalled
	sending    int
	receiving  int
	sends      int
	recvs      int
	naps       int
	pushing    bool // the server waits until the client reads
}

// peerFields caches where a call option keeps its PeerAddr: the type may embed
// grpc.PeerCallOption, whose own method after cannot be called from here.
var peerFields sync.Map // reflect.Type to []int, nil if there is none

func peerAddr(o grpc.CallOption) *peer.Peer {
	t := reflect.TypeOf(o)
	if t.Kind() != reflect.Pointer || t.Elem().Kind() != reflect.Struct {
		return nil
	}
	index, ok := peerFields.Load(t)
	if !ok {
		f, found := t.Elem().FieldByName("PeerAddr")
		if !found {
			f.Index = nil
		}
		index = f.Index
		peerFields.Store(t, index)
	}
	if len(index.([]int)) == 0 {
		return nil
	}
	p, _ := reflect.ValueOf(o).Elem().FieldByIndex(index.([]int)).Interface().(*peer.Peer)
	return p
}

// open is the grpc.Streamer, newClientStream in grpc-go.
func (r *run) open(ctx context.Context, _ *grpc.StreamDesc, _ *grpc.ClientConn, _ string,
	opts ...grpc.CallOption) (grpc.ClientStream, error) {
	a := &fakeStream{r: r}
	md, _ := metadata.FromOutgoingContext(ctx)
	a.previous = strings.Join(md["grpc-previous-rpc-attempts"], ",")
	for _, o := range opts {
		if r.dropsOptions {
			break
		}
		switch o := o.(type) {
		case grpc.OnFinishCallOption:
			a.finishers = append(a.finishers, o.OnFinish)
		case grpc.PeerCallOption:
			a.peers = append(a.peers, o.PeerAddr)
		case grpc.HeaderCallOption:
			a.headers = append(a.headers, o.HeaderAddr)
		case grpc.TrailerCallOption:
			a.trailers = append(a.trailers, o.TrailerAddr)
		default:
			if p := peerAddr(o); p != nil {
				a.peers = append(a.peers, p)
			}
		}
	}
	a.ctx, a.cancel = context.WithCancel(ctx)

	r.mu.Lock()
	a.number = len(r.attempts) + 1
	a.script = r.scripts[min(a.number, len(r.scripts))-1]
	for _, earlier := range r.attempts {
		if earlier.ctx.Err() == nil && !earlier.done.happened() && a.olderOpen == 0 {
			a.olderOpen = earlier.number
		}
	}
	r.attempts = append(r.attempts, a)
	a.started = r.tick()
	r.mu.Unlock()

	a.nap()
	err := a.create()
	if err != nil {
		// newClientStreamWithParams cancels, then newClientStream runs endOfClientStream.
		a.cancel()
		a.end(err)
		a.createdWith(err)
		return nil, err
	}
	watched := make(chan struct{})
	a.unwatch = context.AfterFunc(a.ctx, func() {
		<-watched // because finish, which watch calls, uses unwatch
		a.watch()
	})
	close(watched)
	go a.serve()
	if a.script.ownCreate {
		a.createdWith(errNotOpened)
		return nil, errNotOpened
	}
	a.createdWith(nil)
	return a, nil
}

func (a *fakeStream) create() error {
	if a.r.left {
		a.r.resolve(a.ctx, a.script.createAfter)
	} else if d := a.script.createAfter; d > 0 {
		timer := time.NewTimer(d)
		defer timer.Stop()
		select {
		case <-timer.C:
		case <-a.ctx.Done():
		}
	}
	if err := a.ctx.Err(); err != nil { // newAttemptLocked
		return status.FromContextError(err).Err()
	}
	if a.script.createCode != codes.OK {
		return status.Error(a.script.createCode, "creation "+strconv.Itoa(a.number))
	}
	return nil
}

func (a *fakeStream) createdWith(err error) {
	a.r.mu.Lock()
	defer a.r.mu.Unlock()
	a.created, a.createErr = a.r.tick(), err
	a.r.notify()
}

// watch is the goroutine that newClientStreamWithParams starts.
func (a *fakeStream) watch() {
	a.nap()
	a.finish(status.FromContextError(a.ctx.Err()).Err())
}

// addr is the server that the attempt reached.
func (a *fakeStream) addr() string { return "server-" + strconv.Itoa(a.number) }

type fakeAddr string

func (fakeAddr) Network() string  { return "fake" }
func (a fakeAddr) String() string { return string(a) }

func (a *fakeStream) header() metadata.MD { return metadata.MD{"from": {strconv.Itoa(a.number)}} }

// finish is clientStream.finish: it writes the targets of the call options under the lock, and
// runs OnFinish after that, maybe much later.
func (a *fakeStream) finish(err error) {
	if err == io.EOF {
		err = nil
	}
	r := a.r
	r.mu.Lock()
	if a.finished.happened() {
		r.mu.Unlock()
		return
	}
	a.finished, a.finishErr = r.tick(), err
	a.closeLocked(status.Convert(err), nil, false)
	for _, p := range a.peers {
		*p = peer.Peer{Addr: fakeAddr(a.addr())}
	}
	for _, h := range a.headers {
		if *h = nil; a.headed.happened() {
			*h = a.header()
		}
	}
	for _, t := range a.trailers {
		*t = a.trailer.Copy()
	}
	r.mu.Unlock()
	if mix(r.seed, uint64(a.number))%2 == 0 {
		time.Sleep(time.Duration(1+mix(r.seed, uint64(a.number)+99)%50) * time.Microsecond)
	}
	a.end(err)
	a.unwatch()
	a.cancel()
}

// end is endOfClientStream.
func (a *fakeStream) end(err error) {
	for _, f := range a.finishers {
		f(err)
	}
}

// closeLocked is http2Client.closeStream; the first call decides.
func (a *fakeStream) closeLocked(st *status.Status, trailer metadata.MD, byServer bool) {
	if a.done.happened() {
		return
	}
	a.done, a.status, a.trailer, a.byServer = a.r.tick(), st, trailer, byServer
	a.r.notify()
}

// nap lets other goroutines go first: mostly not, sometimes by a change of goroutine, sometimes
// for a moment of virtual time.
func (a *fakeStream) nap() {
	a.r.mu.Lock()
	a.naps++
	x := mix(a.r.seed, uint64(a.number)<<32|uint64(a.naps))
	a.r.mu.Unlock()
	switch x % 8 {
	case 0:
		time.Sleep(time.Duration(x>>8%20) * time.Microsecond)
	case 1, 2:
		runtime.Gosched()
	}
}

// mix is splitmix64 of two numbers.
func mix(seed, n uint64) uint64 {
	x := seed*0x9e3779b97f4a7c15 + n*0xd1342543de82ef95 + 0x632be59bd9b4e019
	x = (x ^ x>>30) * 0xbf58476d1ce4e5b9
	x = (x ^ x>>27) * 0x94d049bb133111eb
	return x ^ x>>31
}

// Header is clientStream.Header: it ends a stream that ended without headers, and returns no
// error.
func (a *fakeStream) Header() (metadata.MD, error) {
	a.nap()
	r := a.r
	r.mu.Lock()
	for !a.headed.happened() && !a.done.happened() {
		if r.nilHeader {
			r.mu.Unlock()
			return nil, nil
		}
		if err := a.ctx.Err(); err != nil { // transport.ClientStream.waitOnHeader
			a.closeLocked(status.FromContextError(err), nil, false)
			break
		}
		r.await(a.ctx.Done())
	}
	if a.headed.happened() {
		r.mu.Unlock()
		a.nap()
		return a.header(), nil
	}
	err := a.status.Err()
	r.mu.Unlock()
	a.nap()
	a.finish(err)
	return nil, nil
}

// Trailer must not be called before the end: grpc-go reads the trailer without a lock.
func (a *fakeStream) Trailer() metadata.MD {
	r := a.r
	r.mu.Lock()
	defer r.mu.Unlock()
	if !a.finished.happened() && !a.recvFailed.happened() && !a.done.happened() && !r.plain {
		r.misuse("Trailer of attempt %d was called before its end", a.number)
	}
	if !a.done.happened() {
		return nil
	}
	return a.trailer.Copy()
}

// Context is the transport stream's.
func (a *fakeStream) Context() context.Context {
	return peer.NewContext(a.ctx, &peer.Peer{Addr: fakeAddr(a.addr())})
}

// CloseSend is clientStreamWrapper.CloseSend.
func (a *fakeStream) CloseSend() error {
	a.nap()
	r := a.r
	r.mu.Lock()
	defer r.mu.Unlock()
	if a.sending > 0 {
		r.misuse("CloseSend of attempt %d was called during its SendMsg", a.number)
	}
	if a.halfClosed {
		return nil
	}
	a.halfClosed, a.sentLast = true, true
	if !a.done.happened() && !a.closed.happened() {
		a.closed = r.tick()
		r.notify()
	}
	return nil
}

// SendMsg is clientStreamWrapper.SendMsg, clientStream.SendMsg and http2Client.write.
func (a *fakeStream) SendMsg(m any) error {
	r := a.r
	r.mu.Lock()
	a.sends++
	if a.sending++; a.sending > 1 {
		r.misuse("SendMsg of attempt %d was called during another", a.number)
	}
	own := a.sends == a.script.ownSend
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		a.sending--
		r.mu.Unlock()
	}()
	if own {
		return errWrapper
	}
	text := requestText(m)
	a.nap()
	var err error
	if strings.HasSuffix(text, tooLarge) {
		err = errTooLarge
	} else {
		err = a.write(text)
	}
	if err != nil && err != io.EOF {
		a.finish(err)
		return err
	}
	if !r.kind.client() { // clientStreamWrapper
		if err == nil {
			r.mu.Lock()
			a.halfClosed = true
			r.mu.Unlock()
		}
		return nil
	}
	return err
}

// tooLarge ends the text of messages that gRPC refuses to send.
const tooLarge = "!"

var errTooLarge = status.Error(codes.ResourceExhausted, "trying to send message larger than max (9 vs. 8)")

func (a *fakeStream) write(text string) error {
	r := a.r
	r.mu.Lock()
	defer r.mu.Unlock()
	if a.sentLast {
		r.misuse("SendMsg of attempt %d was called after CloseSend", a.number)
		return status.Error(codes.Internal, "SendMsg called after CloseSend")
	}
	if !r.kind.client() {
		a.sentLast = true
	}
	// writeQuota.get: the context does not end this wait, the end of the transport stream does.
	for !a.done.happened() && len(a.accepted)-a.consumed >= a.script.in {
		r.await(nil)
	}
	if a.done.happened() {
		return io.EOF
	}
	a.accepted = append(a.accepted, text)
	if !r.kind.client() {
		a.closed = r.tick()
	}
	r.notify()
	return nil
}

// RecvMsg is clientStreamWrapper.RecvMsg, which reads a client stream to its end.
func (a *fakeStream) RecvMsg(m any) error {
	r := a.r
	r.mu.Lock()
	a.recvs++
	if a.receiving++; a.receiving > 1 {
		r.misuse("RecvMsg of attempt %d was called during another", a.number)
	}
	own := a.recvs == a.script.ownRecv
	if own && !a.recvFailed.happened() {
		a.recvFailed = r.tick()
	}
	r.mu.Unlock()
	defer func() {
		r.mu.Lock()
		a.receiving--
		r.mu.Unlock()
	}()
	if own {
		return errWrapper
	}
	err := a.receive(m)
	if err != nil || r.kind.server() {
		return err
	}
	if err = a.receive(m); err == io.EOF {
		return nil
	}
	if err == nil {
		r.mu.Lock()
		if !a.recvFailed.happened() {
			a.recvFailed = r.tick()
		}
		r.mu.Unlock()
		return status.Error(codes.Internal, cardinality)
	}
	return err
}

var errGarbled = status.Error(codes.Internal, "grpc: failed to unmarshal the received message: garbled")

// cardinality is what gRPC and the library say of a client stream that ended well without a response; the fake says it of
// one with two responses, too.
const cardinality = "cardinality violation: received no response message from non-server-streaming RPC"

// receive is clientStream.RecvMsg. Messages that have arrived come before the end, also before
// that of the context (recvBufferReader.readClient).
func (a *fakeStream) receive(m any) error {
	a.nap()
	r := a.r
	r.mu.Lock()
	for a.read == len(a.arrived) && !a.done.happened() {
		if err := a.ctx.Err(); err != nil {
			a.closeLocked(status.FromContextError(err), nil, false)
			break
		}
		r.await(a.ctx.Done())
	}
	if a.read < len(a.arrived) {
		text := responseText(a.number, a.read)
		a.read++
		garbled := a.read == a.script.garbled
		a.received = a.received || !garbled
		r.notify()
		r.mu.Unlock()
		if garbled { // the rest stays where it is
			a.finish(errGarbled)
			return errGarbled
		}
		err := decode(m, text, r.merges)
		a.nap()
		return err
	}
	err := a.status.Err()
	if err == nil {
		err = io.EOF
		if !r.kind.server() && !a.received && !a.script.vanishes {
			err = status.Error(codes.Internal, cardinality)
		}
	}
	r.mu.Unlock()
	a.nap()
	a.finish(err)
	r.mu.Lock()
	if !a.recvFailed.happened() {
		a.recvFailed = r.tick()
	}
	r.mu.Unlock()
	a.nap()
	return err
}

// serve plays the script.
func (a *fakeStream) serve() {
	r := a.r
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, move := range a.script.moves {
		if a.done.happened() {
			return
		}
		switch move.verb {
		case vSleep:
			r.mu.Unlock()
			time.Sleep(move.d)
			r.mu.Lock()
		case vReceive:
			a.take(a.consumed + 1)
		case vAll:
			for !a.done.happened() && !(a.closed.happened() && a.consumed == len(a.accepted)) {
				a.take(a.consumed + 1)
			}
		case vHeader:
			a.sendHeader()
		case vSend:
			a.sendHeader()
			a.awaitRead(func() bool { return len(a.arrived)-a.read < a.script.out })
			if !a.done.happened() {
				a.arrived = append(a.arrived, r.tick())
				r.notify()
			}
		case vRead:
			a.awaitRead(func() bool { return a.read == len(a.arrived) })
		case vEnd:
			var trailer metadata.MD
			if a.script.pushback != nil {
				trailer = metadata.MD{"grpc-retry-pushback-ms": a.script.pushback}
			}
			if trailer == nil && a.number%2 == 0 {
				trailer = metadata.MD{"end": {strconv.Itoa(a.number)}}
			}
			if a.script.vanishes { // nothing comes from the server then
				trailer = nil
			} else if !a.headed.happened() { // trailers only: they are all that a server must send
				trailer = metadata.Join(trailer, metadata.MD{"content-type": {"application/grpc"}})
			}
			st := status.New(a.script.code, "end "+strconv.Itoa(a.number))
			a.closeLocked(st, trailer, true)
			return
		case vHang:
			for !a.done.happened() {
				r.await(nil)
			}
			return
		}
	}
}

// awaitRead waits until the client has read enough.
func (a *fakeStream) awaitRead(enough func() bool) {
	a.pushing = true
	for !a.done.happened() && !enough() {
		a.r.await(nil)
	}
	a.pushing = false
}

// take waits until n messages were received, or no more can come.
func (a *fakeStream) take(n int) {
	for !a.done.happened() && a.consumed < n {
		switch {
		case a.consumed < len(a.accepted):
			a.consumed++
			a.r.notify()
		case a.closed.happened():
			return
		default:
			a.r.await(nil)
		}
	}
}

func (a *fakeStream) sendHeader() {
	if !a.headed.happened() && !a.done.happened() {
		a.headed = a.r.tick()
		a.r.notify()
	}
}

// requestText identifies a message that the application has sent.
func requestText(m any) string {
	text := m.(*echov1.EchoRequest).GetMessage()
	text, _, _ = strings.Cut(text, " ")
	return text
}

// responseText is the content of a response: the attempt and the place in its stream.
func responseText(attempt, i int) string { return strconv.Itoa(attempt) + "." + strconv.Itoa(i) + ";" }

// A plainReply is a reply that is no proto message, as codecs for JSON have them.
type plainReply struct {
	Text string
	List []string
}

// decode is a codec: that of gRPC resets the message, others merge into it.
func decode(m any, text string, merges bool) error {
	switch m := m.(type) {
	case *echov1.EchoResponse:
		if !merges {
			proto.Reset(m)
		}
		m.Message += text
	case *plainReply:
		if !merges {
			*m = plainReply{}
		}
		m.Text += text
		m.List = append(m.List, text)
	case *emptypb.Empty: // unknown fields
	default:
		return status.Errorf(codes.Internal, "grpc: failed to unmarshal the received message into %T", m)
	}
	return nil
}
