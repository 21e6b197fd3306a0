package grpcretry

import (
	"context"
	"fmt"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	sdkmetric "go.opentelemetry.io/otel/sdk/metric"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/known/emptypb"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// This file passes options in ways that their authors may not think of: twice, to two Retriers, changed
// afterwards, in a type of one's own, and from a logger.

func budgetOf(t *testing.T, opts ...Option) Budget {
	t.Helper()
	return retrierOf(t, opts...).Policy("/a.Service/Method").Budget
}

// TestLaterOfTwoEqualOptionsIsUsed: budgets belong to the option, so that a later option with the same
// settings is not the same. Only an Update keeps the state of the earlier one.
func TestLaterOfTwoEqualOptionsIsUsed(t *testing.T) {
	settings := RatioBudget{Ratio: 0.5, Reserve: 2, Window: time.Second}
	shared := WithRatioBudget(settings)
	want := budgetOf(t, shared)
	for name, opts := range map[string][]Option{
		"all methods": {WithRatioBudget(settings), shared},
		"one service": {WithMethod("/a.Service/", WithRatioBudget(settings), shared)},
		"two uses":    {WithMethod("/a.Service/", WithRatioBudget(settings)), WithMethod("/a.Service/", shared)},
		"in a policy": {WithRatioBudget(settings), WithPolicy(Policy{MaxAttempts: 2}), shared},
	} {
		if got := budgetOf(t, opts...); got != want {
			t.Errorf("%s: the budget is not that of the later option", name)
		}
	}
	quantile := HedgeAtQuantile(0.9, 0, 0)
	hedged := func(d HedgeDelay) CallOption { return WithHedging(Hedging{Delay: d}) }
	r := retrierOf(t, WithMethod("/a.Service/", hedged(HedgeAtQuantile(0.9, 0, 0)), hedged(quantile)))
	if r.Policy("/a.Service/Method").Hedging.Delay != quantile {
		t.Error("the delay is not that of the later option")
	}

	kept := retrierOf(t, WithRatioBudget(settings))
	before := kept.Policy("/a.Service/Method").Budget
	if err := kept.Update(WithRatioBudget(settings)); err != nil {
		t.Fatal(err)
	}
	if kept.Policy("/a.Service/Method").Budget != before {
		t.Error("an Update with the same settings does not keep the budget")
	}
}

// TestServiceConfigOptionOfTwoRetriers: the throttle is one for each target of a Retrier.
func TestServiceConfigOptionOfTwoRetriers(t *testing.T) {
	config := WithServiceConfig(`{"methodConfig":[],"retryThrottling":{"maxTokens":10,"tokenRatio":0.5}}`)
	if budgetOf(t, config) == budgetOf(t, config) {
		t.Error("two Retriers share the throttle")
	}
	r := retrierOf(t, config)
	before := r.Policy("/a.Service/Method").Budget
	if err := r.Update(config); err != nil {
		t.Fatal(err)
	}
	if r.Policy("/a.Service/Method").Budget != before {
		t.Error("an Update with the same config does not keep the throttle")
	}
}

// TestOptionsAreCopied: what the caller does with a slice afterwards changes nothing.
func TestOptionsAreCopied(t *testing.T) {
	opts := []CallOption{WithMaxAttempts(3)}
	method := WithMethod("/a.Service/", opts...)
	levels := WithIdempotencyLevel(descriptorpb.MethodOptions_IDEMPOTENCY_UNKNOWN, opts...)
	opts[0] = WithMaxAttempts(99)
	for name, o := range map[string]Option{"WithMethod": method, "WithIdempotencyLevel": levels} {
		if n := retrierOf(t, o).Policy("/a.Service/Method").MaxAttempts; n != 3 {
			t.Errorf("%s: %d attempts, want 3", name, n)
		}
	}
}

// A namedOption is an option in a type of the application's own.
type namedOption struct {
	CallOption
	name string
}

func TestOptionInAnotherType(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := serve(t, always(unavailable()))
		client := f.client(t, WithBackoff(Constant(0)), WithBudget(Unlimited))
		_, err := client.Echo(t.Context(), &echov1.EchoRequest{}, namedOption{WithMaxAttempts(2), "twice"})
		if n := len(f.attempts()); n != 2 {
			t.Errorf("%d attempts, want 2: %v", n, err)
		}
		_, err = client.Echo(t.Context(), &echov1.EchoRequest{}, namedOption{WithMaxAttempts(-1), "never"})
		if status.Code(err) != codes.Internal {
			t.Errorf("error %v, want INTERNAL because of the invalid value", err)
		}
	})
}

// TestLoggerMayUpdate: a logger that reacts to a warning with an Update does not wait for itself.
func TestLoggerMayUpdate(t *testing.T) {
	var r *Retrier
	log := &callingHandler{Handler: slog.DiscardHandler}
	r = retrierOf(t, WithLogger(slog.New(log)))
	log.call = func() {
		log.call = nil
		if err := r.Update(WithAttemptTimeout(time.Second)); err != nil {
			t.Error(err)
		}
	}
	if err := r.Update(WithAttemptTimeout(time.Nanosecond)); err != nil {
		t.Fatal(err)
	}
	if p := r.Policy("/a.Service/Method"); log.call != nil || p.AttemptTimeout != time.Second {
		t.Errorf("the timeout is %v, want that of the logger's Update", p.AttemptTimeout)
	}
}

type callingHandler struct {
	slog.Handler
	call func()
}

func (h *callingHandler) Enabled(context.Context, slog.Level) bool { return true }

func (h *callingHandler) Handle(context.Context, slog.Record) error {
	if h.call != nil {
		h.call()
	}
	return nil
}

// TestUpdateWithManyTargets: with metrics, the cost of an Update grows with the number of targets
// and scopes, and not with its square.
func TestUpdateWithManyTargets(t *testing.T) {
	const targets, scopes = 60, 10
	opts := []Option{WithMeterProvider(sdkmetric.NewMeterProvider(sdkmetric.WithReader(sdkmetric.NewManualReader())))}
	for i := range scopes {
		opts = append(opts, WithMethod(fmt.Sprintf("/a.S%d/", i), WithRatioBudget(RatioBudget{Ratio: 0.5, Window: time.Second})))
	}
	r := retrierOf(t, opts...)
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	for i := range targets {
		cc, err := grpc.NewClient(fmt.Sprintf("passthrough:///t%d", i),
			append(r.DialOptions(), grpc.WithTransportCredentials(insecure.NewCredentials()))...)
		if err != nil {
			t.Fatal(err)
		}
		_ = cc.Invoke(gone, "/a.S1/M", &emptypb.Empty{}, &emptypb.Empty{}, grpc.StaticMethod())
		cc.Close()
	}
	each := testing.AllocsPerRun(5, func() {
		if err := r.Update(WithMaxAttempts(3)); err != nil {
			t.Fatal(err)
		}
	}) / (targets * (scopes + 1))
	if each > 3 {
		t.Errorf("an Update allocates %.1f times for each target and scope, want at most 3", each)
	}
}
