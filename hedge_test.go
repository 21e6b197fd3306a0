package grpcretry

import (
	"context"
	"log/slog"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/dynamicpb"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

func TestHedgingThatCannotBeMeantIsRefused(t *testing.T) {
	const method = "/grpcretry.test.v1.EchoService/Echo"
	on := func(h Hedging) Option { return WithMethod(method, WithHedging(h)) }
	inMethod := " (in WithMethod " + method + ")"
	for _, tt := range []struct {
		name string
		opt  Option
		want string
	}{
		{"one attempt", on(Hedging{MaxAttempts: 1, Delay: HedgeAfter(0)}),
			"grpcretry: WithHedging: MaxAttempts: 1 attempts, want at least 2" + inMethod},
		{"less than none", on(Hedging{MaxAttempts: -2, Delay: HedgeAfter(0)}),
			"grpcretry: WithHedging: MaxAttempts: -2 attempts, want at least 2" + inMethod},
		{"no delay", on(Hedging{}), "grpcretry: WithHedging: Delay is not set, want HedgeAfter or HedgeAtQuantile" + inMethod},
		{"negative delay", on(Hedging{Delay: HedgeAfter(-time.Second)}), "grpcretry: WithHedging: Delay: -1s is negative" + inMethod},
		{"quantile 0", on(Hedging{Delay: HedgeAtQuantile(0, 0, 0)}),
			"grpcretry: WithHedging: Delay: HedgeAtQuantile: q is 0, want between 0 and 1" + inMethod},
		{"quantile NaN", on(Hedging{Delay: HedgeAtQuantile(math.NaN(), 0, 0)}),
			"grpcretry: WithHedging: Delay: HedgeAtQuantile: q is NaN, want between 0 and 1" + inMethod},
		{"negative bound", on(Hedging{Delay: HedgeAtQuantile(0.9, -1, 0)}),
			"grpcretry: WithHedging: Delay: HedgeAtQuantile: bounds -1ns and 0s must not be negative" + inMethod},
		{"bounds crossed", on(Hedging{Delay: HedgeAtQuantile(0.9, time.Second, time.Millisecond)}),
			"grpcretry: WithHedging: Delay: HedgeAtQuantile: upper bound 1ms is below the lower bound 1s" + inMethod},
		{"a switch of nothing", on(Hedging{Delay: HedgeWhile(nil, HedgeAfter(0))}),
			"grpcretry: WithHedging: Delay: HedgeWhile needs a function and a HedgeDelay" + inMethod},
		{"a switch of what is refused", on(Hedging{Delay: HedgeWhile(func() bool { return true }, HedgeAfter(-1))}),
			"grpcretry: WithHedging: Delay: -1ns is negative" + inMethod},
		{"OK", on(Hedging{Delay: HedgeAfter(0), NonFatalCodes: []codes.Code{codes.OK}}),
			"grpcretry: WithHedging: NonFatalCodes: code OK is no failure" + inMethod},
		{"in a policy", WithPolicy(Policy{Hedging: &Hedging{}}),
			"grpcretry: WithPolicy: Hedging: Delay is not set, want HedgeAfter or HedgeAtQuantile"},
		{"all methods", WithHedging(Hedging{Delay: HedgeAfter(0)}),
			"grpcretry: WithHedging for all methods, without AllMethodsAreSafe: name the methods that are safe to run twice with WithMethod"},
		{"all methods, by a policy", WithPolicy(Policy{Hedging: &Hedging{Delay: HedgeAfter(0)}}),
			"grpcretry: WithHedging for all methods, without AllMethodsAreSafe: name the methods that are safe to run twice with WithMethod"},
		{"a client stream", WithMethod("/grpcretry.test.v1.EchoService/Collect", WithHedging(Hedging{Delay: HedgeAfter(0)})),
			"grpcretry: WithHedging in WithMethod /grpcretry.test.v1.EchoService/Collect: a method with a client stream cannot be hedged"},
		{"a bidi stream", WithMethod("/grpcretry.test.v1.EchoService/Chat", WithHedging(Hedging{Delay: HedgeAfter(0)})),
			"grpcretry: WithHedging in WithMethod /grpcretry.test.v1.EchoService/Chat: a method with a client stream cannot be hedged"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if _, err := New(tt.opt); err == nil || err.Error() != tt.want {
				t.Errorf("New = %v, want %s", err, tt.want)
			}
		})
	}
}

func TestHedgingThatIsMeant(t *testing.T) {
	h := Hedging{Delay: HedgeAfter(time.Second)}
	r, err := New(
		WithMethod("/grpcretry.test.v1.EchoService/", WithHedging(h)), // its streams are not hedged
		WithMethod("/grpcretry.test.v1.EchoService/Expand", WithHedging(Hedging{MaxAttempts: 5, Delay: HedgeAtQuantile(0.9, 0, 0)})),
		WithMethod("/grpcretry.test.v1.EchoService/Put", Disable()),
		WithMethod("/grpcretry.test.v1.EchoService/Append", WithMaxAttempts(3)),
		WithMethod("/unknown.Service/Method", WithHedging(h)))
	if err != nil {
		t.Fatal(err)
	}
	for method, want := range map[string]int{"Echo": 2, "Expand": 5, "Put": 0, "Append": 2} {
		got := 0
		if h := r.Policy("/grpcretry.test.v1.EchoService/" + method).Hedging; h != nil {
			got = h.MaxAttempts
		}
		if got != want {
			t.Errorf("%s has %d hedged attempts, want %d", method, got, want)
		}
	}
	if _, err := New(WithHedging(Hedging{Delay: HedgeAfter(0), AllMethodsAreSafe: true})); err != nil {
		t.Errorf("New = %v although all methods are said to be safe", err)
	}
	if _, err := New(Disable(), WithMethod("/a.B/C", WithHedging(h))); err != nil {
		t.Error(err)
	}
	const chat = "/grpcretry.test.v1.EchoService/Chat"
	for _, all := range []Option{WithHedging(Hedging{Delay: HedgeAfter(0), AllMethodsAreSafe: true}),
		WithMethod("/grpcretry.test.v1.EchoService/", WithHedging(h))} {
		if _, err := New(all, WithMethod(chat, WithMaxAttempts(3))); err != nil {
			t.Errorf("New = %v although nobody asks for hedging of the one method with a client stream", err)
		}
	}
}

func TestPolicyHandsOutItsOwnHedging(t *testing.T) {
	h := Hedging{Delay: HedgeAfter(0), NonFatalCodes: []codes.Code{codes.Internal}}
	r, err := New(WithMethod("/a.B/C", WithHedging(h)))
	if err != nil {
		t.Fatal(err)
	}
	h.NonFatalCodes[0] = codes.Aborted
	shown := r.Policy("/a.B/C").Hedging
	shown.MaxAttempts, shown.NonFatalCodes[0] = 9, codes.DataLoss
	if got := r.Policy("/a.B/C").Hedging; got.MaxAttempts != 2 || got.NonFatalCodes[0] != codes.Internal {
		t.Errorf("hedging is %+v, want what New was given", got)
	}
}

// Who turns retries off for all, and hedging on for one method, gets just that.
func TestHedgingWhereRetriesAreOff(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(says("a").after(time.Hour), says("b"), unavailable()))
		client := server.client(t, Disable(), hedged(Hedging{Delay: HedgeAfter(second)}))
		if reply, err := client.Echo(t.Context(), request()); reply.GetMessage() != "b" || err != nil {
			t.Errorf("Echo = %v, %v, want b from the hedge", reply, err)
		}
		_, err := client.Put(t.Context(), request())
		wantUntouched(t, err, codes.Unavailable, "db-down")
		wantTimes(t, server, 0, second, second)
	})
}

// A call that is hedged and not retried, and for which there is no delay yet, is one attempt:
// its error is the server's own.
func TestNoDelayAndNoRetries(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(unavailable()))
		_, err := server.client(t, steady, WithMaxAttempts(1), hedged(Hedging{Delay: HedgeAtQuantile(0.95, 0, 0)})).
			Echo(t.Context(), request())
		wantUntouched(t, err, codes.Unavailable, "db-down")
		wantTimes(t, server, 0)
	})
}

// Without a delay, a call is as if there were no hedging, but it is measured.
func TestNoDelayNoHedge(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(unavailable(), says("b").after(5*second), says("c").after(3*second),
			says("d").after(time.Hour), says("e"), unavailable().after(2*second)))
		var on atomic.Bool
		delay := &recordedDelay{HedgeDelay: HedgeAfter(second)}
		client := server.client(t, steady, hedged(Hedging{Delay: HedgeWhile(on.Load, delay)}))
		for i, step := range []struct {
			on      bool
			reply   string
			elapsed time.Duration
			told    []string
		}{
			{false, "b", 6 * second, nil},            // failed, waited its backoff, was slow
			{false, "c", 3 * second, []string{"3s"}}, // slow
			{true, "e", second, []string{"1s lost"}}, // hedged
			{true, "", 2 * second, []string{}},       // hedged, and failed twice
		} {
			on.Store(step.on)
			delay.told = nil
			start := time.Now()
			reply, _ := client.Echo(t.Context(), request())
			if got := time.Since(start); i < 3 && (reply.GetMessage() != step.reply || got != step.elapsed) {
				t.Errorf("call %d: %q after %v, want %q after %v", i+1, reply.GetMessage(), got, step.reply, step.elapsed)
			}
			if i < 3 && !slices.Equal(delay.told, step.told) {
				t.Errorf("call %d: the delay was told %q, want %q", i+1, delay.told, step.told)
			}
		}
	})
}

// A recordedDelay remembers what it was told.
type recordedDelay struct {
	HedgeDelay
	mu   sync.Mutex
	told []string
}

func (d *recordedDelay) Answered(method string, took time.Duration, lost bool, now time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	line := took.String()
	if lost {
		line += " lost"
	}
	d.told = append(d.told, line)
}

func TestWhatCannotBeHedgedIsSaidOnce(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(ok()))
		logs := &logRecorder{}
		cc := server.conn(t, DialOptions(WithLogger(slog.New(logs)),
			WithMethod("/grpcretry.test.v1.EchoService/", WithHedging(Hedging{Budget: Unlimited, Delay: HedgeAfter(second)})))...)
		client := echov1.NewEchoServiceClient(cc)
		for range 3 {
			stream, err := client.Chat(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			stream.CloseSend()
			stream.Recv()
		}
		wantLines(t, logs, "WARN…not hedged, but retried: it has a client stream…method=/grpcretry.test.v1.EchoService/Chat")
		for range 3 {
			stream, err := cc.NewStream(t.Context(), serverStream, "/grpcretry.test.v1.EchoService/Expand", grpc.ForceCodec(oddCodec{}))
			if err != nil {
				t.Fatal(err)
			}
			(&application{stream: stream}).play(t, "send a; close")
			stream.RecvMsg(notAPointer{})
			stream.RecvMsg(notAPointer{})
		}
		wantLines(t, logs, "WARN…not hedged, but retried: no second message can be made…method=/grpcretry.test.v1.EchoService/Expand")
		for range 3 {
			cc.Invoke(t.Context(), "/grpcretry.test.v1.EchoService/Echo", request(), notAPointer{}, grpc.ForceCodec(oddCodec{}))
		}
		wantLines(t, logs, "WARN…not hedged, but retried: no second reply can be made…method=/grpcretry.test.v1.EchoService/Echo")
		cc = server.conn(t, DialOptions(WithLogger(slog.New(logs)), Disable(),
			WithMethod("/grpcretry.test.v1.EchoService/", WithHedging(Hedging{Budget: Unlimited, Delay: HedgeAfter(second)})))...)
		for range 3 {
			stream, err := echov1.NewEchoServiceClient(cc).Chat(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			stream.CloseSend()
			stream.Recv()
		}
		wantLines(t, logs, "WARN…not hedged: it has a client stream…method=/grpcretry.test.v1.EchoService/Chat")
	})
}

type notAPointer map[string]string

// oddCodec sends protobuf and receives into anything, or nothing.
type oddCodec struct{}

func (oddCodec) Name() string                  { return "proto" }
func (oddCodec) Marshal(v any) ([]byte, error) { return proto.Marshal(v.(proto.Message)) }
func (oddCodec) Unmarshal(b []byte, v any) error {
	switch v := v.(type) {
	case *oddReply:
		v.raw = slices.Clone(b)
		v.received++
	case *[]byte:
		*v = slices.Clone(b)
	}
	return nil
}

type oddReply struct {
	raw      []byte
	received int
}

func TestWhatCanBeHedged(t *testing.T) {
	for _, tt := range []struct {
		reply any
		want  bool
	}{
		{nil, false},
		{(*echov1.EchoResponse)(nil), false},
		{(*[]byte)(nil), false},
		{notAPointer{}, false},
		{oddReply{}, false},
		{&echov1.EchoResponse{}, true},
		{&oddReply{}, true},
		{new(any), true},
		{dynamicpb.NewMessage((&echov1.EchoResponse{}).ProtoReflect().Descriptor()), true},
	} {
		if got := canHedge(tt.reply); got != tt.want {
			t.Errorf("canHedge(%T %v) = %v, want %v", tt.reply, tt.reply, got, tt.want)
		}
	}
}

// All kinds of protobuf messages are replies: generated, without generated code, and
// those of the first version of the API, which gogo/protobuf still makes.
func TestRepliesOfAnyProtobuf(t *testing.T) {
	generated := &echov1.EchoResponse{}
	dynamic := dynamicpb.NewMessage(generated.ProtoReflect().Descriptor())
	for _, tt := range []struct {
		reply any
		text  func() string
	}{
		{generated, generated.GetMessage},
		{dynamic, func() string { return dynamic.Get(dynamic.Descriptor().Fields().ByName("message")).String() }},
		{v1, func() string { return v1.Message }},
	} {
		bubble(t, func(t *testing.T) {
			server := serve(t, script(says("a").after(time.Hour), says("b"), says("").after(time.Hour), says("")))
			cc := server.conn(t, DialOptions(hedged(Hedging{Delay: HedgeAfter(second)}))...)
			for _, want := range []string{"b", "hello"} {
				if err := cc.Invoke(t.Context(), echoMethod, request(), tt.reply); err != nil || tt.text() != want {
					t.Errorf("Invoke = %v, the hedge's answer in %T is %q, want %q", err, tt.reply, tt.text(), want)
				}
			}
		})
	}
}

// What this program does not know of a reply is part of it, also of a hedge's.
func TestAHedgesReplyIsWhole(t *testing.T) {
	bubble(t, func(t *testing.T) {
		unknown := protowire.AppendVarint(protowire.AppendTag(nil, 99, protowire.VarintType), 7)
		below := func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
			err := invoker(ctx, method, req, reply, cc, opts...)
			if a, _ := AttemptFromContext(ctx); a.Number == 2 {
				reply.(proto.Message).ProtoReflect().SetUnknown(unknown)
			}
			return err
		}
		server := serve(t, script(says("a").after(time.Hour), says("b")))
		cc := server.conn(t, append(DialOptions(hedged(Hedging{Delay: HedgeAfter(second)})), grpc.WithChainUnaryInterceptor(below))...)
		reply, err := echov1.NewEchoServiceClient(cc).Echo(t.Context(), request())
		if reply.GetMessage() != "b" || !slices.Equal(reply.ProtoReflect().GetUnknown(), unknown) {
			t.Errorf("Echo = %v, %v with the unknown fields %x, want b and %x", reply, err, reply.ProtoReflect().GetUnknown(), unknown)
		}
	})
}

// What an interceptor below keeps of a hedge's reply is not the caller's.
func TestAHedgesReplyIsNotSharedWithWhatIsBelow(t *testing.T) {
	bubble(t, func(t *testing.T) {
		kept := map[int]*echov1.EchoResponse{}
		below := func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoker grpc.UnaryInvoker, opts ...grpc.CallOption) error {
			err := invoker(ctx, method, req, reply, cc, opts...)
			a, _ := AttemptFromContext(ctx)
			kept[a.Number] = reply.(*echov1.EchoResponse) // the losers end before the winner's caller goes on
			kept[a.Number].Payload = []byte("payload")
			return err
		}
		server := serve(t, script(says("a").after(time.Hour), says("b")))
		cc := server.conn(t, append(DialOptions(hedged(Hedging{Delay: HedgeAfter(second)})), grpc.WithChainUnaryInterceptor(below))...)
		reply, err := echov1.NewEchoServiceClient(cc).Echo(t.Context(), request())
		clear(reply.GetPayload())
		if got := kept[2]; got.GetMessage() != "b" || string(got.GetPayload()) != "payload" {
			t.Errorf("Echo = %v, %v, and what was kept of the hedge's reply is %v after the caller has changed its own", reply, err, got)
		}
	})
}

var v1 = &v1Reply{Old: true}

type v1Reply struct {
	Message string `protobuf:"bytes,1,opt,name=message,proto3"`
	Payload []byte `protobuf:"bytes,2,opt,name=payload,proto3"`
	Old     bool   // not of the message: as in any reply, gone when a new one comes
}

func (m *v1Reply) Reset()         { *m = v1Reply{} }
func (m *v1Reply) String() string { return m.Message }
func (*v1Reply) ProtoMessage()    {}

// Any pointer that a codec takes can be a reply.
func TestRepliesThatAreNoMessages(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(says("a").after(time.Hour), says("b"), says("a").after(time.Hour), says("b"), says("c")))
		cc := server.conn(t, DialOptions(hedged(Hedging{Delay: HedgeAfter(second)}))...)
		want, err := proto.Marshal(&echov1.EchoResponse{Message: "b"})
		if err != nil {
			t.Fatal(err)
		}
		reply := &oddReply{raw: []byte("old"), received: 41}
		if err := cc.Invoke(t.Context(), echoMethod, request(), reply, grpc.ForceCodec(oddCodec{})); err != nil ||
			!slices.Equal(reply.raw, want) || reply.received != 1 {
			t.Errorf("Invoke = %v with reply %+v, want what the hedge received, once", err, reply)
		}
		var raw []byte
		if err := cc.Invoke(t.Context(), echoMethod, request(), &raw, grpc.ForceCodec(oddCodec{})); err != nil || !slices.Equal(raw, want) {
			t.Errorf("Invoke = %v with reply %q, want %q", err, raw, want)
		}
	})
}

// The estimate is the exact quantile of what was measured, or up to 5 % more.
func TestQuantileIsCloseToTheExactOne(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for name, draw := range map[string]func() float64{
		"exponential": random.ExpFloat64,
		"log-normal":  func() float64 { return math.Exp(2 * random.NormFloat64()) },
		"uniform":     random.Float64,
		"two humps": func() float64 {
			if random.IntN(10) == 0 {
				return 50 + random.Float64()
			}
			return 1 + random.Float64()
		},
	} {
		for _, q := range []float64{0.5, 0.9, 0.95, 0.99} {
			h := HedgeAtQuantile(q, 0, 0).(*hedgeQuantile)
			var all []time.Duration
			now := noon
			for range 5000 {
				took := 10*time.Microsecond + time.Duration(draw()*float64(10*time.Millisecond))
				all = append(all, took)
				h.Answered("/m", took, false, now)
				now = now.Add(10 * time.Millisecond) // 50 s in all
			}
			slices.Sort(all)
			exact := all[int(math.Ceil(q*float64(len(all))))-1]
			got, ok := h.Delay("/m", now)
			if ratio := float64(got) / float64(exact); !ok || ratio < 0.9999 || ratio > 1.0501 {
				t.Errorf("%s: %v-quantile is %v, %v, want %v or up to 5%% more", name, q, got, ok, exact)
			}
		}
	}
}

func TestQuantileNeedsEnoughAnswers(t *testing.T) {
	for _, tt := range []struct {
		q       float64
		answers int
	}{{0.5, 50}, {0.9, 50}, {0.95, 100}, {0.99, 500}, {0.999, 5000}} {
		h := HedgeAtQuantile(tt.q, 0, 0)
		for range tt.answers - 1 {
			h.Answered("/m", time.Millisecond, false, noon)
		}
		if d, ok := h.Delay("/m", noon); ok {
			t.Errorf("%v-quantile: delay %v after %d answers, want none before %d", tt.q, d, tt.answers-1, tt.answers)
		}
		h.Answered("/m", time.Millisecond, false, noon)
		if _, ok := h.Delay("/m", noon.Add(quantileRefresh)); !ok {
			t.Errorf("%v-quantile: no delay after %d answers", tt.q, tt.answers)
		}
		if _, ok := h.Delay("/other", noon); ok {
			t.Errorf("%v-quantile: a delay for a method that was never called", tt.q)
		}
	}
}

// Half of 51 is 26: to hedge no more than half of them, it must not be 25.
func TestQuantileIsNeverLess(t *testing.T) {
	for short, want := range map[int]time.Duration{25: time.Second, 26: time.Millisecond} {
		h := HedgeAtQuantile(0.5, 0, 0)
		for n := range 51 {
			took := time.Second
			if n < short {
				took = time.Millisecond
			}
			h.Answered("/m", took, false, noon)
		}
		got, ok := h.Delay("/m", noon)
		if ratio := float64(got) / float64(want); !ok || ratio < 0.9999 || ratio > 1.0501 {
			t.Errorf("the median of %d short ones of 51 is %v, %v, want %v or up to 5%% more", short, got, ok, want)
		}
	}
}

// It is computed once a second, not for each call.
func TestQuantileIsComputedOnceASecond(t *testing.T) {
	h := HedgeAtQuantile(0.5, 0, 0)
	answered := func(took time.Duration) {
		for range 100 {
			h.Answered("/m", took, false, noon)
		}
	}
	answered(time.Millisecond)
	before, _ := h.Delay("/m", noon)
	answered(time.Second)
	answered(time.Second)
	if got, ok := h.Delay("/m", noon.Add(quantileRefresh-1)); !ok || got != before {
		t.Errorf("before a second has passed the delay is %v, %v, want still %v", got, ok, before)
	}
	if got, ok := h.Delay("/m", noon.Add(quantileRefresh)); !ok || got < time.Second {
		t.Errorf("after a second the delay is %v, %v, want that of most answers, a second", got, ok)
	}
}

func TestQuantileForgetsAfterAMinute(t *testing.T) {
	h := HedgeAtQuantile(0.9, 0, 0)
	now := noon
	fill := func(took time.Duration) {
		for range 1000 {
			h.Answered("/m", took, false, now)
		}
	}
	want := func(want time.Duration) {
		t.Helper()
		got, ok := h.Delay("/m", now)
		if ratio := float64(got) / float64(want); !ok || ratio < 1 || ratio > 1.0501 {
			t.Errorf("after %v the delay is %v, %v, want about %v", now.Sub(noon), got, ok, want)
		}
	}
	fill(time.Second)
	want(time.Second)
	now = now.Add(59 * time.Second)
	fill(time.Millisecond)
	want(time.Second) // half are slow
	now = now.Add(12 * time.Second)
	want(time.Millisecond)
	fill(2 * time.Millisecond) // where the first were
	now = now.Add(quantileRefresh)
	want(2 * time.Millisecond)
	now = now.Add(time.Hour)
	if d, ok := h.Delay("/m", now); ok {
		t.Errorf("delay %v of an hour ago", d)
	}
}

// An answer counts for a whole minute, wherever in a slice of time it came.
func TestQuantileRemembersForAMinute(t *testing.T) {
	for at := time.Duration(0); at < quantileSlice; at += second / 2 {
		d, start := HedgeAtQuantile(0.5, 0, 0), time.Unix(0, 0).Add(at)
		for range 50 {
			d.Answered("/s/m", second, false, start)
		}
		if got, ok := d.Delay("/s/m", start.Add(time.Minute)); !ok {
			t.Errorf("a minute after answers at %v the delay is %v, %v, want that they count", at, got, ok)
		}
	}
}

func TestQuantileIsExact(t *testing.T) {
	h := HedgeAtQuantile(0.5, 0, 0)
	for range 50 {
		h.Answered("/m", time.Millisecond, false, noon)
		h.Answered("/m", time.Second, false, noon)
	}
	if got, ok := h.Delay("/m", noon); !ok || got > 2*time.Millisecond {
		t.Errorf("the median of 50 short and 50 long ones is %v, %v, want a short one", got, ok)
	}
}

func TestQuantileOfWhatIsOutOfRange(t *testing.T) {
	for took, want := range map[time.Duration]time.Duration{0: 10500, time.Hour: bucketLatency(latencyBuckets - 1)} {
		h := HedgeAtQuantile(0.5, 0, 0)
		for range 100 {
			h.Answered("/m", took, false, noon)
		}
		if got, ok := h.Delay("/m", noon); !ok || got != want {
			t.Errorf("the median of answers in %v is %v, %v, want %v", took, got, ok, want)
		}
	}
	if longest := bucketLatency(latencyBuckets - 1); longest < 100*time.Second {
		t.Errorf("the longest that is told apart is %v, want over 100s", longest)
	}
}

// The wall clock may be set back. What was measured at times that have not come counts again when
// they have, and the delay is not kept until then.
func TestQuantileWhenTheClockIsSetBack(t *testing.T) {
	h := HedgeAtQuantile(0.5, 0, 0)
	fill := func(took time.Duration, now time.Time) {
		for range 100 {
			h.Answered("/m", took, false, now)
		}
	}
	fill(time.Second, noon)
	h.Delay("/m", noon)
	earlier := noon.Add(-time.Hour)
	if got, ok := h.Delay("/m", earlier); ok {
		t.Errorf("delay %v an hour before anything was measured", got)
	}
	fill(time.Millisecond, earlier)
	if got, ok := h.Delay("/m", earlier.Add(quantileRefresh)); !ok || got > 2*time.Millisecond {
		t.Errorf("delay %v, %v, want the 1ms of the new time", got, ok)
	}
}

func TestQuantileBoundsAndLosers(t *testing.T) {
	now := noon
	for _, tt := range []struct {
		name            string
		atLeast, atMost time.Duration
		answers, losers int
		want            time.Duration
	}{
		{"lower bound", 50 * time.Millisecond, 0, 1000, 0, 50 * time.Millisecond},
		{"upper bound", 0, time.Millisecond, 1000, 0, time.Millisecond},
		{"losers are slower than all", 0, 0, 980, 20, 10 * time.Millisecond}, // of 1..10 ms, so the 0.95 of 1000 is 9.7
		{"more losers than the rest", 0, 0, 100, 900, 10 * time.Millisecond},
	} {
		h := HedgeAtQuantile(0.95, tt.atLeast, tt.atMost)
		for i := range tt.answers {
			h.Answered("/m", time.Duration(i+1)*10*time.Millisecond/time.Duration(tt.answers), false, now)
		}
		for range tt.losers {
			h.Answered("/m", time.Microsecond, true, now)
		}
		got, ok := h.Delay("/m", now)
		if ratio := float64(got) / float64(tt.want); !ok || ratio < 0.92 || ratio > 1.06 {
			t.Errorf("%s: %v, %v, want about %v", tt.name, got, ok, tt.want)
		}
	}
	h := HedgeAtQuantile(0.95, 0, 0)
	for range 1000 {
		h.Answered("/m", time.Second, true, now)
	}
	if d, ok := h.Delay("/m", now); ok {
		t.Errorf("delay %v although nothing was measured", d)
	}
}

func TestQuantileKnowsABoundedNumberOfMethods(t *testing.T) {
	h := HedgeAtQuantile(0.5, 0, 0).(*hedgeQuantile)
	for i := range 2 * quantileMethods {
		for range 100 {
			h.Answered(strings.Repeat("x", i), time.Millisecond, false, noon)
		}
	}
	if got := h.known.Load(); got != quantileMethods {
		t.Errorf("%d methods are known, want %d", got, quantileMethods)
	}
	if _, ok := h.Delay(strings.Repeat("x", 2*quantileMethods-1), noon); ok {
		t.Error("a method too many has a delay")
	}
}

// Latency doubles for everyone. Hedges cannot help then; the budget holds them down until
// the delay has learnt.
func TestHedgesStayUnderTheBudgetWhenAllGetSlow(t *testing.T) {
	bubble(t, func(t *testing.T) {
		took := 10 * time.Millisecond
		var mu sync.Mutex
		server := serve(t, func(int) answer {
			mu.Lock()
			defer mu.Unlock()
			return ok().after(took + time.Duration(rand.IntN(int(took/10))))
		})
		budget, err := NewRatioBudget(RatioBudget{Ratio: 0.1, Window: 10 * time.Second})
		if err != nil {
			t.Fatal(err)
		}
		events := &countedEvents{}
		client := server.client(t, WithBudget(budget), WithObserver(events.observe),
			hedged(Hedging{Delay: HedgeAtQuantile(0.95, 0, 0)}))
		run := func(calls int) (hedges int) {
			before := len(server.attempts())
			for range calls {
				client.Echo(context.Background(), request())
				time.Sleep(10 * time.Millisecond)
			}
			return len(server.attempts()) - before - calls
		}
		run(1000)
		if got := run(3000); got > 3000*8/100 {
			t.Errorf("%d hedges for 3000 calls at the usual pace, want about 5 %%", got)
		}
		mu.Lock()
		took *= 2
		mu.Unlock()
		if got := run(3000); got > 3000/10+20 {
			t.Errorf("%d hedges for 3000 calls when all are slow, want at most the budget's tenth", got)
		}
		if got := run(3000); got > 3000*8/100 {
			t.Errorf("%d hedges for 3000 calls when the delay has learnt, want about 5 %%", got)
		}
	})
}

type countedEvents struct{ n atomic.Int64 }

func (c *countedEvents) observe(context.Context, Event) { c.n.Add(1) }

// Hedges are not saved up: what calls earn can be spent for a second, and one hedge is kept.
func TestDefaultHedgeBudget(t *testing.T) {
	b := newHedgeBudget()
	at := time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)
	answered := func(calls int, within time.Duration) {
		for range calls {
			b.Deposit(Outcome{Attempt: 1, Result: Succeeded})
		}
		at = at.Add(within)
	}
	for _, tt := range []struct {
		name        string
		calls       int
		within      time.Duration
		least, most float64
	}{
		{"at the start", 0, 0, 0, 0},
		{"nine calls", 9, time.Second, 0.9, 0.9},
		{"ten calls", 1, time.Second, 1, 1},
		{"an hour later", 0, time.Hour, 1, 1},
		{"a thousand calls in half a second", 1000, time.Second / 2, 100, 101},
		{"ten thousand in the next ten", 10_000, 10 * time.Second, 100, 106},
		{"a quiet second later", 0, 1100 * time.Millisecond, 1, 1},
	} {
		answered(tt.calls, tt.within)
		if got := b.Balance(at); got < tt.least-1e-6 || got > tt.most+1e-6 {
			t.Errorf("%s: balance %v, want %v to %v", tt.name, got, tt.least, tt.most)
		}
	}
}
