package grpcretry

import (
	"context"
	"io"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry/internal/words"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// The tests of streams are scripts: what the server does in each attempt, and what the
// application does, step by step.
//
// Server steps:          Application steps:
//
//	recv TEXT  expects     send TEXT
//	recv EOF               close         CloseSend
//	send TEXT              recv TEXT     expects
//	header     sends one   recv EOF
//	wait 3s                recv CODE     expects a failure with this code
//	fail CODE              header, no header, context, trailer
//	pushback MS            wait 3s, cancel
//	hang                   sendeof TEXT  expects SendMsg to return io.EOF
//	                       try TEXT      sends, whatever SendMsg returns
//	                       unsendable    sends what is no message
//
// A server script that ends without fail ends with OK.

// kinds of streams.
var (
	serverStream = &grpc.StreamDesc{StreamName: "Expand", ServerStreams: true}
	clientStream = &grpc.StreamDesc{StreamName: "Collect", ClientStreams: true}
	bidiStream   = &grpc.StreamDesc{StreamName: "Chat", ClientStreams: true, ServerStreams: true}

	// unlinkedStream is a bidiStream of a method that no proto declares; see also TestMain.
	unlinkedStream = &grpc.StreamDesc{StreamName: "Unlinked", ClientStreams: true, ServerStreams: true}
)

// serveStreams starts a server whose attempt n runs play(n, …), for any method.
func serveStreams(t *testing.T, play func(n int, stream grpc.ServerStream) error) *fixture {
	t.Helper()
	var f *fixture
	ready := make(chan struct{})
	f = serve(t, nil, grpc.UnknownServiceHandler(func(_ any, stream grpc.ServerStream) error {
		<-ready
		return play(f.note(stream.Context(), ""), stream)
	}))
	close(ready)
	return f
}

// playServer runs the script of one attempt.
func playServer(t *testing.T, attempt int, steps string, stream grpc.ServerStream) error {
	for _, step := range split(steps) {
		verb, arg, _ := strings.Cut(step, " ")
		switch verb {
		case "recv":
			var m echov1.EchoRequest
			err := stream.RecvMsg(&m)
			switch {
			case stream.Context().Err() != nil:
				return err
			case arg == "EOF" && err == io.EOF:
			case err != nil || m.GetMessage() != arg:
				t.Errorf("server, attempt %d: %s: got %q, %v", attempt, step, brief(m.GetMessage()), err)
				return status.Error(codes.DataLoss, "script")
			}
		case "send":
			if err := stream.SendMsg(&echov1.EchoResponse{Message: arg}); err != nil {
				return err
			}
		case "header":
			if err := stream.SendHeader(metadata.Pairs("attempt", strconv.Itoa(attempt))); err != nil {
				return err
			}
		case "pushback":
			stream.SetTrailer(metadata.Pairs(pushbackKey, arg))
		case "wait":
			if !elapsed(parseDuration(t, arg), stream.Context().Done()) { // or a test that fails would leave this goroutine
				return status.FromContextError(stream.Context().Err()).Err()
			}
		case "hang":
			<-stream.Context().Done()
			return status.FromContextError(stream.Context().Err()).Err()
		case "fail":
			stream.SetTrailer(metadata.Pairs("attempt", strconv.Itoa(attempt)))
			return status.Error(parseCode(t, arg), "failed in attempt "+strconv.Itoa(attempt))
		default:
			t.Errorf("no such step: %s", step)
		}
	}
	return nil
}

// An application runs its script on a stream.
type application struct {
	stream grpc.ClientStream
	cancel context.CancelFunc
	err    error // the last that was not nil
}

func (app *application) play(t *testing.T, steps string) {
	for _, step := range split(steps) {
		verb, arg, _ := strings.Cut(step, " ")
		switch verb {
		case "send", "sendeof":
			err := app.stream.SendMsg(&echov1.EchoRequest{Message: arg})
			if want := map[string]error{"send": nil, "sendeof": io.EOF}[verb]; err != want {
				t.Errorf("application: %s: got %v", brief(step), err)
			}
		case "unsendable":
			if err := app.stream.SendMsg("not a message"); status.Code(err) != codes.Internal {
				t.Errorf("application: %s: got %v", step, err)
			}
		case "oversized": // on a ClientConn with sendLimit
			if err := app.stream.SendMsg(&echov1.EchoRequest{Message: strings.Repeat("x", 200)}); status.Code(err) != codes.ResourceExhausted {
				t.Errorf("application: %s: got %v", step, err)
			}
		case "try":
			app.stream.SendMsg(&echov1.EchoRequest{Message: arg})
		case "close":
			if err := app.stream.CloseSend(); err != nil {
				t.Errorf("application: %s: got %v", step, err)
			}
		case "recv":
			var m echov1.EchoResponse
			err := app.stream.RecvMsg(&m)
			got := m.GetMessage()
			if err == io.EOF {
				got = "EOF"
			} else if err != nil {
				app.err = err
				got = words.Code(status.Code(err))
			}
			if got != arg {
				t.Errorf("application: %s: got %s, %v", step, got, err)
			}
		case "header":
			if md, err := app.stream.Header(); md == nil || err != nil {
				t.Errorf("application: %s: got %v, %v", step, md, err)
			}
		case "no":
			if md, err := app.stream.Header(); md != nil || err != nil {
				t.Errorf("application: %s: got %v, %v", step, md, err)
			}
		case "context":
			if app.stream.Context() == nil {
				t.Errorf("application: %s: got nil", step)
			}
		case "trailer":
			if got := first(app.stream.Trailer()["attempt"]); got != arg {
				t.Errorf("application: %s: got %q", step, got)
			}
		case "wait":
			time.Sleep(parseDuration(t, arg))
		case "cancel":
			app.cancel()
		default:
			t.Errorf("no such step: %s", step)
		}
	}
}

// openStream dials with opts and opens a stream.
func (f *fixture) openStream(t *testing.T, desc *grpc.StreamDesc, opts []Option, call ...grpc.CallOption) (*application, error) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	t.Cleanup(cancel)
	cc := f.conn(t, DialOptions(append([]Option{steady}, opts...)...)...)
	stream, err := cc.NewStream(ctx, desc, "/streams/"+desc.StreamName, call...)
	return &application{stream: stream, cancel: cancel}, err
}

func split(steps string) []string {
	if steps == "" {
		return nil
	}
	return strings.Split(steps, "; ")
}

func brief(s string) string { return s[:min(len(s), 40)] }

func parseDuration(t *testing.T, s string) time.Duration {
	d, err := time.ParseDuration(s)
	if err != nil {
		t.Error(err)
	}
	return d
}

func parseCode(t *testing.T, s string) (c codes.Code) {
	if err := c.UnmarshalJSON([]byte(strconv.Quote(s))); err != nil {
		t.Error(err)
	}
	return c
}

// openOn opens a stream of a ClientConn. A test that hangs is cancelled after an hour, so that
// it fails and does not stop the others.
func openOn(t *testing.T, cc *grpc.ClientConn, desc *grpc.StreamDesc, call ...grpc.CallOption) *application {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	guard := time.AfterFunc(time.Hour, func() { t.Error("nothing has happened for an hour"); cancel() })
	t.Cleanup(func() { guard.Stop(); cancel() })
	stream, err := cc.NewStream(ctx, desc, "/streams/"+desc.StreamName, call...)
	if err != nil {
		t.Fatal(err)
	}
	return &application{stream: stream, cancel: cancel}
}

// serveScripts starts a server with one script for each attempt.
func serveScripts(t *testing.T, scripts ...string) *fixture {
	t.Helper()
	return serveStreams(t, func(n int, stream grpc.ServerStream) error {
		if n > len(scripts) {
			return status.Error(codes.DataLoss, "one attempt too many")
		}
		return playServer(t, n, scripts[n-1], stream)
	})
}

// A record is what the library reports of a call: its end to OnFinish and to an observer, and
// its attempts to a budget.
type record struct {
	budget aBudget

	mu              sync.Mutex
	finished, ended []error
}

func (r *record) options() []Option {
	return []Option{WithBudget(&r.budget), WithObserver(func(_ context.Context, e Event) {
		if e.Kind == CallEnd {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.ended = append(r.ended, e.Err)
		}
	})}
}

func (r *record) onFinish() grpc.CallOption {
	return grpc.OnFinish(func(err error) {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.finished = append(r.finished, err)
	})
}

// want compares the reports with the result that the application has seen, nil for a success.
func (r *record) want(t *testing.T, result error) {
	t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	for name, got := range map[string][]error{"OnFinish": r.finished, "CallEnd": r.ended} {
		if len(got) != 1 || status.Code(got[0]) != status.Code(result) {
			t.Errorf("%s reported %v, want %v once", name, got, result)
		}
	}
	r.budget.mu.Lock()
	defer r.budget.mu.Unlock()
	succeeded := slices.ContainsFunc(r.budget.heard, func(o Outcome) bool { return o.Result == Succeeded })
	if succeeded != (result == nil) {
		t.Errorf("budget heard %v of a call with the result %v", r.budget.heard, result)
	}
	charged := 0
	for _, o := range r.budget.heard {
		charged += min(1, o.Attempt-1)
	}
	if paid := len(r.budget.asked) - r.budget.refunded; paid != charged {
		t.Errorf("budget gave %d retries, got %d back and heard %v, want each of the others in an outcome",
			len(r.budget.asked), r.budget.refunded, r.budget.heard)
	}
}

var long = strings.Repeat("x", 300<<10) // more than the default buffer holds

// A callKind is a way to call a method.
type callKind struct {
	name string
	desc *grpc.StreamDesc // nil for a unary call
}

var callKinds = []callKind{{"unary", nil}, {"server stream", serverStream}, {"client stream", clientStream}, {"bidi stream", bidiStream}}

// anyMethod is one that serveStreams handles, and that has no options of its own.
const anyMethod = "/streams/Method"

// call sends a request, and receives until the end.
func (k callKind) call(ctx context.Context, cc *grpc.ClientConn, method string, opts ...grpc.CallOption) error {
	return k.send(ctx, cc, method, request(), opts...)
}

func (k callKind) send(ctx context.Context, cc *grpc.ClientConn, method string, m *echov1.EchoRequest, opts ...grpc.CallOption) error {
	if k.desc == nil {
		return cc.Invoke(ctx, method, m, &echov1.EchoResponse{}, opts...)
	}
	stream, err := cc.NewStream(ctx, k.desc, method, opts...)
	if err != nil {
		return err
	}
	if err := stream.SendMsg(m); err != nil && err != io.EOF {
		return err
	}
	if err := stream.CloseSend(); err != nil {
		return err
	}
	for err == nil {
		err = stream.RecvMsg(&echov1.EchoResponse{})
		if err == nil && !k.desc.ServerStreams {
			return nil
		}
	}
	if err == io.EOF {
		return nil
	}
	return err
}

// everyKind runs a test for unary calls and all kinds of streams, each in a bubble.
func everyKind(t *testing.T, f func(t *testing.T, kind callKind)) {
	t.Helper()
	for _, kind := range callKinds {
		t.Run(kind.name, func(t *testing.T) { bubble(t, func(t *testing.T) { f(t, kind) }) })
	}
}
