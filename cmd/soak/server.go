package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// This file is a server process. It writes each attempt into the ledger before it does anything else
// for it, and each message before it acknowledges it. It checks that the messages of each attempt are
// those of the call, in order, from the first one on. Over its standard input it is told of storms,
// and when to drain; when that ends, the process ends.

type serverConfig struct {
	Process uint64 // no other server process has the same
	Address string
	Next    string // the address of the server that layered calls go on to
	Dir     string
	Seed    uint64
	MaxAge  time.Duration // of connections
	Streams uint32        // at a time on one connection; 0 for no limit
}

type server struct {
	echov1.UnimplementedEchoServiceServer
	config    serverConfig
	ledger    *serverLedger
	attempts  atomic.Uint64
	running   atomic.Int64 // handlers
	stormEnds atomic.Int64 // in ns since 1970
	next      echov1.EchoServiceClient
}

// A serverReport says what a server process holds.
type serverReport struct {
	Handlers   int64
	Goroutines int
	Heap       uint64
}

// serverProcess is what a server process does.
func serverProcess(config *serverConfig, in io.Reader, out io.Writer) error {
	s := &server{config: *config, ledger: newServerLedger(config.Dir)}
	listener, err := listen(config.Address)
	if err != nil {
		return err
	}
	retrier, err := grpcretry.New(grpcretry.WithMaxAttempts(layerAttempts), grpcretry.WithBackoff(grpcretry.Constant(time.Millisecond)),
		grpcretry.WithPatience(100*time.Millisecond), grpcretry.WithBudget(grpcretry.Unlimited))
	if err != nil {
		return err
	}
	cc, err := grpc.NewClient("passthrough:///"+config.Next, append(retrier.DialOptions(),
		grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithConnectParams(connectParams))...)
	if err != nil {
		return err
	}
	s.next = echov1.NewEchoServiceClient(cc)

	options := []grpc.ServerOption{
		grpc.ChainUnaryInterceptor(grpcretry.UnaryServerInterceptor()),
		grpc.ChainStreamInterceptor(grpcretry.StreamServerInterceptor()),
		grpc.ConnectionTimeout(2 * time.Second), // even Stop waits for a connection that says nothing, such as one stuck in a proxy
		grpc.KeepaliveParams(keepalive.ServerParameters{MaxConnectionAge: config.MaxAge, MaxConnectionAgeGrace: time.Second}),
	}
	if config.Streams > 0 {
		options = append(options, grpc.MaxConcurrentStreams(config.Streams))
	}
	g := grpc.NewServer(options...)
	echov1.RegisterEchoServiceServer(g, s)
	commands := make(chan error, 1)
	go func() { commands <- s.obey(in, out, g) }()
	fmt.Fprintln(out, "listening")
	if err := g.Serve(listener); err != nil {
		return err
	}
	return <-commands // the rest of a drain
}

// listen waits until the port of the process before this one is free.
func listen(address string) (net.Listener, error) {
	for end := time.Now().Add(5 * time.Second); ; {
		l, err := net.Listen("tcp", address)
		if err == nil || time.Now().After(end) {
			return l, err
		}
		<-time.After(10 * time.Millisecond)
	}
}

// obey does what the coordinator says, until the process is to end.
func (s *server) obey(in io.Reader, out io.Writer, g *grpc.Server) error {
	for lines := bufio.NewScanner(in); lines.Scan(); {
		word, value, _ := strings.Cut(lines.Text(), " ")
		switch word {
		case "storm":
			d, err := time.ParseDuration(value)
			if err != nil {
				return err
			}
			s.stormEnds.Store(time.Now().Add(d).UnixNano())
		case "report":
			report, err := json.Marshal(s.report())
			if err != nil {
				return err
			}
			fmt.Fprintf(out, "report %s\n", report)
		case "drain":
			hard := time.AfterFunc(time.Second, g.Stop)
			g.GracefulStop()
			hard.Stop()
			return nil
		default:
			return fmt.Errorf("unknown command %q", lines.Text())
		}
	}
	g.Stop() // the coordinator has ended
	return nil
}

func (s *server) report() serverReport {
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	return serverReport{s.running.Load(), runtime.NumGoroutine(), m.HeapAlloc}
}

// A serverAttempt is an attempt on the server.
type serverAttempt struct {
	*server
	behaviour
	ctx      context.Context
	draw     *rand.Rand
	id       callID
	token    token
	previous int
	below    bool // a handler made the call
}

// Metadata keys of this program.
const (
	callKey  = "soak-call"
	layerKey = "soak-layer" // the call is made by a handler
	onceKey  = "soak-once"  // the method must not run twice
	tokenKey = "soak-token"
)

// begin writes the attempt into the ledger. If it returns an error, the attempt is over.
func (s *server) begin(ctx context.Context) (*serverAttempt, error) {
	md, _ := metadata.FromIncomingContext(ctx)
	id, err := callFrom(md)
	if err != nil {
		return nil, status.Error(codes.InvalidArgument, err.Error())
	}
	a := &serverAttempt{server: s, ctx: ctx, id: id, token: newToken(s.config.Process, s.attempts.Add(1))}
	a.previous = grpcretry.PreviousAttempts(ctx)
	once := len(md.Get(onceKey)) > 0
	a.below = len(md.Get(layerKey)) > 0
	a.draw = rand.New(rand.NewPCG(s.config.Seed^uint64(id), mix(uint64(a.previous), uint64(len(md.Get(layerKey))))))
	a.behaviour = drawBehaviour(a.draw, id, once, time.Now().UnixNano() < s.stormEnds.Load())
	if previous := md.Get("grpc-previous-rpc-attempts"); len(previous) > 1 {
		a.violation(fmt.Sprintf("the request has %d headers with the number of previous attempts: %q", len(previous), previous))
	}
	n := noteRun
	if a.refuse {
		n = noteRefused
	}
	a.write(n, 0)
	if err := grpc.SetHeader(ctx, metadata.Pairs(tokenKey, a.token.String())); err != nil {
		return nil, err
	}
	trailer := metadata.Pairs(tokenKey, a.token.String())
	if a.big {
		trailer.Set("soak-big", bigValue)
	}
	if err := grpc.SetTrailer(ctx, trailer); err != nil {
		return nil, err
	}
	if a.refuse {
		return nil, a.dress(ctx, a.draw, a.token)
	}
	if a.header {
		if err := grpc.SendHeader(ctx, nil); err != nil {
			return nil, err
		}
	}
	return a, nil
}

func callFrom(md metadata.MD) (callID, error) {
	values := md.Get(callKey)
	if len(values) != 1 {
		return 0, fmt.Errorf("the request has %d headers %s", len(values), callKey)
	}
	id, err := strconv.ParseUint(values[0], 16, 64)
	return callID(id), err
}

func (a *serverAttempt) write(n note, count int) {
	r := serverRecord{call: a.id, token: a.token, note: n, below: a.below, previous: uint16(a.previous), count: uint32(count)}
	if err := a.ledger.write(r); err != nil {
		a.violation(fmt.Sprintf("the server's ledger cannot be written: %v", err))
	}
}

func (a *serverAttempt) violation(what string) {
	violation{
		Who: fmt.Sprintf("server process %d", a.config.Process), Call: a.id.String(), Seed: a.config.Seed,
		What: fmt.Sprintf("attempt %d, %v: %s", a.previous+1, a.token, what),
	}.report(a.config.Dir)
}

// pause waits as the behaviour says, or until the attempt ends.
func (a *serverAttempt) pause() {
	if a.slow == 0 {
		return
	}
	select {
	case <-time.After(a.slow):
	case <-a.ctx.Done():
	}
}

// fails reports whether the attempt fails after so many messages.
func (a *serverAttempt) fails(count int) bool { return a.code != codes.OK && count >= a.after }

// failsAfter returns the failure that comes after so many messages.
func (a *serverAttempt) failsAfter(count int) error {
	if !a.fails(count) {
		return nil
	}
	return a.dress(a.ctx, a.draw, a.token)
}

func (a *serverAttempt) response(place int) *echov1.EchoResponse {
	return &echov1.EchoResponse{
		Message: a.token.String(), Payload: a.id.payload(response, place), Sequence: int64(place), Attempt: int32(a.previous + 1),
	}
}

// received checks message number place of the request.
func (a *serverAttempt) received(place int, m *echov1.EchoRequest) {
	if err := a.id.checkMessage(request, place, m.GetSequence(), m.GetPayload()); err != nil {
		a.violation(err.Error())
	}
}

// Echo is a unary call.
func (s *server) Echo(ctx context.Context, m *echov1.EchoRequest) (*echov1.EchoResponse, error) {
	s.running.Add(1)
	defer s.running.Add(-1)
	a, err := s.begin(ctx)
	if err != nil {
		return nil, err
	}
	a.received(0, m)
	a.pause()
	if err := a.failsAfter(a.after); err != nil {
		return nil, err
	}
	a.write(noteStored, 1)
	return a.response(0), nil
}

// Append is a unary call that must not run twice.
func (s *server) Append(ctx context.Context, m *echov1.EchoRequest) (*echov1.EchoResponse, error) {
	return s.Echo(ctx, m)
}

// layerAttempts is how many attempts handlers make.
const layerAttempts = 3

// Put is a unary call whose handler calls the next server.
func (s *server) Put(ctx context.Context, m *echov1.EchoRequest) (*echov1.EchoResponse, error) {
	s.running.Add(1)
	defer s.running.Add(-1)
	a, err := s.begin(ctx)
	if err != nil {
		return nil, err
	}
	a.received(0, m)
	below := metadata.AppendToOutgoingContext(ctx, callKey, strconv.FormatUint(uint64(a.id), 16), layerKey, "1")
	if _, err := s.next.Echo(below, m); err != nil {
		if sent := sentInVain(err); sent > 0 {
			a.write(noteNotGivenUp, sent)
		}
		return nil, err
	}
	a.write(noteStored, 1)
	return a.response(0), nil
}

// sentInVain returns how many attempts reached servers of a call that failed without having given up, so that
// its caller may start again; 0 for any other call.
func sentInVain(err error) int {
	failed, ok := errors.AsType[*grpcretry.Error](err)
	if !ok || !errors.Is(err, grpcretry.ErrTargetDown) && !errors.Is(err, grpcretry.ErrNotRetryable) {
		return 0
	}
	sent := 0
	for i := range failed.Attempts {
		if !failed.Attempts[i].Unsent {
			sent++
		}
	}
	return sent
}

// Expand is a server stream.
func (s *server) Expand(m *echov1.EchoRequest, stream grpc.ServerStreamingServer[echov1.EchoResponse]) error {
	s.running.Add(1)
	defer s.running.Add(-1)
	a, err := s.begin(stream.Context())
	if err != nil {
		return err
	}
	a.received(0, m)
	a.write(noteStored, 1)
	a.pause()
	for place := range a.id.messages() {
		if err := a.failsAfter(place); err != nil {
			return err
		}
		if err := stream.Send(a.response(place)); err != nil {
			return err
		}
	}
	return a.failsAfter(a.id.messages())
}

// Collect is a client stream.
func (s *server) Collect(stream grpc.ClientStreamingServer[echov1.EchoRequest, echov1.EchoResponse]) error {
	s.running.Add(1)
	defer s.running.Add(-1)
	a, err := s.begin(stream.Context())
	if err != nil {
		return err
	}
	for place := 0; place != a.id.early(); place++ {
		if err := a.failsAfter(place); err != nil {
			return err
		}
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			a.requestEnded(place)
			return a.acknowledge(stream, place)
		}
		if err != nil {
			return err
		}
		a.received(place, m)
	}
	return a.acknowledge(stream, a.id.early())
}

// acknowledge is the response to a client stream of count messages.
func (a *serverAttempt) acknowledge(stream grpc.ClientStreamingServer[echov1.EchoRequest, echov1.EchoResponse], count int) error {
	a.pause()
	if a.header && a.fails(count) { // the client must not see this response
		err := stream.SendMsg(&echov1.EchoResponse{Message: "of an attempt that failed", Payload: []byte(bigValue), Sequence: -1, Attempt: -1})
		if err != nil {
			return err
		}
	}
	if err := a.failsAfter(count); err != nil {
		return err
	}
	a.write(noteStored, count)
	return stream.SendAndClose(a.response(count))
}

// requestEnded checks that the request has ended where the client ended it.
func (a *serverAttempt) requestEnded(count int) {
	if want := a.id.messages(); count != want {
		a.violation(fmt.Sprintf("the request ended after %d messages, and the client sent %d", count, want))
	}
}

// Chat is a bidi stream: the server acknowledges each message.
func (s *server) Chat(stream grpc.BidiStreamingServer[echov1.EchoRequest, echov1.EchoResponse]) error {
	s.running.Add(1)
	defer s.running.Add(-1)
	a, err := s.begin(stream.Context())
	if err != nil {
		return err
	}
	a.pause()
	for place := 0; place != a.id.early(); place++ {
		if err := a.failsAfter(place); err != nil {
			return err
		}
		m, err := stream.Recv()
		if errors.Is(err, io.EOF) {
			a.requestEnded(place)
			return nil
		}
		if err != nil {
			return err
		}
		a.received(place, m)
		a.write(noteStored, place+1)
		if err := stream.Send(a.response(place)); err != nil {
			return err
		}
	}
	return nil
}

// exitProcess ends a child process.
func exitProcess(who string, err error) {
	if err != nil {
		fmt.Fprintf(os.Stderr, "soak: %s: %v\n", who, err)
		os.Exit(1)
	}
	os.Exit(0)
}
