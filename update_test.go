package grpcretry

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// update fails the test if the Update is rejected.
func update(t *testing.T, r *Retrier, opts ...Option) {
	t.Helper()
	if err := r.Update(opts...); err != nil {
		t.Fatal(err)
	}
}

// Each setting can be changed, the others stay, and the next call obeys.
func TestUpdateChangesTheNextCall(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(unavailable()))
		r := retrierOf(t, WithMaxAttempts(3), WithBackoff(Constant(second)), WithBudget(Unlimited), WithPatience(0))
		client := echov1.NewEchoServiceClient(server.conn(t, r.DialOptions()...))
		var want []time.Duration
		at := time.Duration(0)
		call := func(after ...time.Duration) {
			t.Helper()
			client.Echo(t.Context(), request())
			want = append(want, at)
			for _, d := range after {
				at += d
				want = append(want, at)
			}
			wantTimes(t, server, want...)
		}
		call(second, second)
		update(t, r, WithMaxAttempts(2))
		call(second)
		update(t, r, WithBackoff(Constant(3*second)))
		call(3 * second)
		update(t, r, WithMethod(echoMethod, WithMaxAttempts(4)))
		call(3*second, 3*second, 3*second)
		update(t, r, WithMaxAttempts(9)) // the method has its own
		call(3*second, 3*second, 3*second)
		update(t, r, WithCodes(codes.Aborted))
		call()
		update(t, r, WithIdempotencyLevel(noSideEffects, WithCodes(codes.Unavailable)))
		call(3*second, 3*second, 3*second)
		update(t, r)
		call(3*second, 3*second, 3*second)
	})
}

// A call that is in flight keeps its policy to its end, also while it waits.
func TestUpdateLeavesCallsInFlightAlone(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(unavailable().after(second)))
		r := retrierOf(t, WithMaxAttempts(3), WithBackoff(Constant(second)), WithBudget(Unlimited), WithPatience(0))
		client := echov1.NewEchoServiceClient(server.conn(t, r.DialOptions()...))
		go func() {
			time.Sleep(1500 * time.Millisecond)
			if err := r.Update(Disable()); err != nil {
				t.Error(err)
			}
		}()
		_, err := client.Echo(t.Context(), request())
		wantStop(t, err, codes.Unavailable, ErrAttemptsExhausted, 3)
		wantTimes(t, server, 0, 2*second, 4*second)
		_, err = client.Echo(t.Context(), request())
		wantUntouched(t, err, codes.Unavailable, "db-down")
		wantTimes(t, server, 0, 2*second, 4*second, 5*second)
	})
}

// The switch reaches the retries that are left to gRPC, and gives them back.
func TestUpdateDisableReachesGRPC(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(unavailable()))
		r := retrierOf(t)
		cc := server.conn(t, grpc.WithDefaultServiceConfig(builtInPolicy), grpc.WithChainUnaryInterceptor(r.UnaryClientInterceptor()),
			grpc.WithChainStreamInterceptor(r.StreamClientInterceptor()))
		client := echov1.NewEchoServiceClient(cc)
		for _, step := range []struct {
			opts []Option
			want int
		}{
			{nil, 3}, {[]Option{Disable()}, 1}, {[]Option{WithMaxAttempts(2)}, 3},
		} {
			update(t, r, step.opts...)
			before := len(server.attempts())
			_, err := client.Echo(t.Context(), request())
			if got := len(server.attempts()) - before; got != step.want || status.Code(err) != codes.Unavailable {
				t.Errorf("after %d options %d attempts and %v, want %d", len(step.opts), got, err, step.want)
			}
		}
	})
}

// Among the options of one Update, as among those of New, hedging does not take the switch back.
func TestHedgingDoesNotTakeDisableBack(t *testing.T) {
	h := Hedging{Delay: HedgeAfter(second), AllMethodsAreSafe: true}
	for _, opts := range [][]Option{
		{Disable(), WithHedging(h)}, {WithPolicy(Policy{MaxAttempts: 1, Hedging: &h})}, {WithPolicy(Policy{MaxAttempts: 1}), WithHedging(h)},
	} {
		for way, r := range map[string]*Retrier{"New": retrierOf(t, opts...), "Update": retrierOf(t)} {
			if way == "Update" {
				update(t, r, opts...)
			}
			if got := r.Policy(echoMethod).MaxAttempts; got != 1 {
				t.Errorf("%s with %d options: %d attempts, want 1", way, len(opts), got)
			}
			update(t, r, WithMaxAttempts(3))
			if p := r.Policy(echoMethod); p.MaxAttempts != 3 || p.Hedging == nil {
				t.Errorf("%s with %d options, and then 3 attempts: %d, hedging %v", way, len(opts), p.MaxAttempts, p.Hedging)
			}
		}
	}
}

// A rejected Update names the option and the value, and changes nothing.
func TestUpdateRejects(t *testing.T) {
	r := retrierOf(t, WithMaxAttempts(3), WithMethod(echoMethod, WithMaxElapsed(second)))
	before := fmt.Sprintf("%+v", r.Policy(echoMethod))
	current := r.settings.current()
	for _, tt := range badOptions {
		err := r.Update(WithMaxAttempts(7), tt.opt)
		wantRefused(t, err, tt.words...)
		wantRefused(t, r.Update(WithMethod(echoMethod, WithMaxAttempts(7), tt.opt)), append([]string{echoMethod}, tt.words...)...)
	}
	for name, o := range map[string]Option{
		"WithObserver":             WithObserver(func(context.Context, Event) {}),
		"WithLogger":               WithLogger(slog.Default()),
		"WithTracerProvider":       WithTracerProvider(nil),
		"WithCallSpan":             WithCallSpan(true),
		"WithMeterProvider":        WithMeterProvider(nil),
		"withRandom":               withRandom(nil),
		"WithBuiltInRetryDisabled": WithBuiltInRetryDisabled(),
	} {
		wantRefused(t, r.Update(WithMaxAttempts(7), o), "Update", name, "New only")
	}
	wantRefused(t, r.Update(WithMaxAttempts(7), nil), "Update", "number 2", "nil")
	wantRefused(t, r.Update(WithMaxAttempts(7), WithMethod("nonsense")), "WithMethod", `"nonsense"`)
	wantRefused(t, r.Update(WithPolicy(Policy{MaxAttempts: 2, Hedging: &Hedging{Delay: HedgeAfter(1)}})), "WithHedging", "AllMethodsAreSafe")
	wantRefused(t, r.Update(WithMaxAttempts(7), WithServiceConfig(`{"retryThrottling": {"maxTokens": 2000, "tokenRatio": 1}}`)),
		"WithServiceConfig", "retryThrottling.maxTokens", "2000")
	if r.settings.current() != current {
		t.Error("a rejected Update has taken effect")
	}
	update(t, r) // which would show what a rejected Update has left behind
	if got := fmt.Sprintf("%+v", r.Policy(echoMethod)); got != before {
		t.Errorf("after rejected Updates the policy is\n%s, want\n%s", got, before)
	}
}

// Budgets whose settings stay the same keep their state; others start anew.
func TestUpdateKeepsBudgets(t *testing.T) {
	ratio := RatioBudget{Ratio: Nothing, Reserve: 5}
	throttled := func(maxTokens int) Option {
		return WithServiceConfig(fmt.Sprintf(`{"retryThrottling": {"maxTokens": %d, "tokenRatio": 0.1}}`, maxTokens))
	}
	own := NewRateBudget(rate.NewLimiter(rate.Every(time.Hour), 5))
	for _, tt := range []struct {
		name   string
		before Option // with a budget of 3 to 5 retries
		after  Option
		kept   bool
	}{
		{"the default", WithMaxAttempts(3), WithMaxAttempts(2), true},
		{"the same settings again", WithRatioBudget(ratio), WithRatioBudget(ratio), true},
		{"other settings", WithRatioBudget(ratio), WithRatioBudget(RatioBudget{Ratio: Nothing, Reserve: 4}), false},
		{"a budget that is passed again", WithBudget(own), WithBudget(own), true},
		{"for one method", WithMethod(echoMethod, WithRatioBudget(ratio)), WithMethod(echoMethod, WithRatioBudget(ratio)), true},
		{"for another scope", WithMethod("/grpcretry.test.v1.EchoService/", WithRatioBudget(ratio)),
			WithMethod(echoMethod, WithRatioBudget(ratio)), false},
		{"a service config's throttle", throttled(8), throttled(8), true},
		{"another kind", throttled(8), WithRatioBudget(ratio), false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := retrierOf(t, tt.before)
			budget := r.Policy(echoMethod).Budget
			for range 20 {
				budget.Withdraw(time.Now())
				budget.Deposit(Outcome{Attempt: 1, Result: Failed})
			}
			update(t, r, tt.after)
			now := r.Policy(echoMethod).Budget
			if empty := !now.Withdraw(time.Now()); empty != tt.kept {
				t.Errorf("the budget was empty: %v, became %v, and is empty: %v, want %v", budget, now, empty, tt.kept)
			}
		})
	}
}

// So do measured latencies.
func TestUpdateKeepsQuantiles(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		hedging := func(q float64) CallOption {
			return WithPolicy(Policy{MaxAttempts: 3, Hedging: &Hedging{Delay: HedgeAtQuantile(q, time.Millisecond, second)}})
		}
		r := retrierOf(t, WithMethod(echoMethod, hedging(0.9)))
		delay := r.Policy(echoMethod).Hedging.Delay
		for range 200 {
			delay.Answered(echoMethod, 100*time.Millisecond, false, time.Now())
		}
		time.Sleep(2 * second)
		known, _ := delay.Delay(echoMethod, time.Now())
		if known < 100*time.Millisecond {
			t.Fatalf("delay %v, want 100ms or a little more", known)
		}
		update(t, r, WithMethod(echoMethod, WithMaxElapsed(second), hedging(0.9)))
		if got, ok := r.Policy(echoMethod).Hedging.Delay.Delay(echoMethod, time.Now()); !ok || got != known {
			t.Errorf("after an Update with the same quantile the delay is %v, %v, want %v", got, ok, known)
		}
		update(t, r, WithMethod(echoMethod, WithPolicy(Policy{Hedging: &Hedging{Delay: HedgeAtQuantile(0.9, time.Millisecond, second)}})))
		if got, ok := r.Policy(echoMethod).Hedging.Delay.Delay(echoMethod, time.Now()); !ok || got != known {
			t.Errorf("after an Update with a policy the delay is %v, %v, want %v", got, ok, known)
		}
		if got := r.Policy(echoMethod).MaxAttempts; got != 3 {
			t.Errorf("%d attempts, want those set before, 3", got)
		}
		for _, other := range []HedgeDelay{HedgeAtQuantile(0.8, time.Millisecond, second),
			HedgeAtQuantile(0.9, 2*time.Millisecond, second), HedgeAtQuantile(0.9, time.Millisecond, 2*second), HedgeAfter(0)} {
			update(t, r, WithMethod(echoMethod, WithPolicy(Policy{MaxAttempts: 2, Hedging: &Hedging{Delay: delay}})))
			update(t, r, WithMethod(echoMethod, WithPolicy(Policy{MaxAttempts: 2, Hedging: &Hedging{Delay: other}})))
			if got := r.Policy(echoMethod).Hedging.Delay; got != other {
				t.Errorf("after an Update to %v the delay is %v", other, got)
			}
		}
	})
}

// What is doubtful about the options of an Update is logged when it takes effect.
func TestAnUpdateWarns(t *testing.T) {
	logs := &logRecorder{}
	r := retrierOf(t, WithLogger(slog.New(logs)))
	for range 2 {
		if err := r.Update(WithMethod("/x.Y/", WithMaxAttempts(2))); err != nil {
			t.Fatal(err)
		}
	}
	wantLines(t, logs, "WithMethod /x.Y/") // once
}

func TestWarnings(t *testing.T) {
	never := WithRatioBudget(RatioBudget{Ratio: Nothing, Reserve: Nothing, Window: second})
	for _, tt := range []struct {
		name string
		opts []Option
		want []string // parts of each warning, in order
	}{
		{"the defaults", nil, nil},
		{"known methods", []Option{WithMethod(echoMethod, WithMaxAttempts(2)),
			WithMethod("/grpcretry.test.v1.EchoService/", WithMaxAttempts(2))}, nil},
		{"a misspelled method", []Option{WithMethod("/grpcretry.test.v1.EchoService/Ehco", WithMaxAttempts(2))},
			[]string{"WithMethod /grpcretry.test.v1.EchoService/Ehco: service grpcretry.test.v1.EchoService has no method Ehco"}},
		{"a method with a slash too many", []Option{WithMethod(echoMethod+"/", Disable())},
			[]string{"WithMethod /grpcretry.test.v1.EchoService/Echo/: a slash after a method matches nothing"}},
		{"a misspelled service", []Option{WithMethod("/grpcretry.test.v1.EchoServcie/Echo", WithMaxAttempts(2)),
			WithMethod("/x.Y/", WithMaxAttempts(2))},
			[]string{"WithMethod /grpcretry.test.v1.EchoServcie/Echo: the program links no proto with a service grpcretry.test.v1.EchoServcie",
				"WithMethod /x.Y/: the program links no proto with a service x.Y"}},
		{"a service without its package", []Option{WithMethod("/EchoService/Put", Disable()), WithMethod("/sql/", Disable())},
			[]string{"WithMethod /EchoService/Put: if it is for the linked service, its name is /grpcretry.test.v1.EchoService/"}},
		{"nanoseconds by mistake", []Option{WithAttemptTimeout(500)},
			[]string{"all methods: WithAttemptTimeout is 500ns, and no attempt takes less"}},
		{"only once for all scopes",
			[]Option{WithAttemptTimeout(500), WithMethod(echoMethod, WithMaxAttempts(2)), WithIdempotencyLevel(idempotent, WithMaxAttempts(2))},
			[]string{"all methods: WithAttemptTimeout is 500ns"}},
		{"twice for a level that has a policy of its own",
			[]Option{WithAttemptTimeout(500), WithIdempotencyLevel(idempotent, WithAttemptTimeout(400))},
			[]string{"all methods of level IDEMPOTENT: WithAttemptTimeout is 400ns", "all methods: WithAttemptTimeout is 500ns"}},
		{"only once for a service and its methods",
			[]Option{WithMethod("/grpcretry.test.v1.EchoService/", WithAttemptTimeout(500)), WithMethod(echoMethod, WithMaxAttempts(2))},
			[]string{"/grpcretry.test.v1.EchoService/: WithAttemptTimeout is 500ns"}},
		{"only once for all methods and one of them", []Option{WithAttemptTimeout(500), WithMethod(echoMethod, WithMaxAttempts(2))},
			[]string{"all methods: WithAttemptTimeout is 500ns"}},
		{"a method has one level only",
			[]Option{WithIdempotencyLevel(idempotent, WithMaxAttempts(2)), WithMethod(putMethod, WithAttemptTimeout(500))},
			[]string{putMethod + " of level IDEMPOTENT: WithAttemptTimeout is 500ns"}},
		{"a dry run", []Option{WithDryRun(true)}, []string{"all methods: WithDryRun is on, so nothing is retried"}},
		{"timeout beyond the end", []Option{WithMethod(putMethod, WithAttemptTimeout(second), WithMaxElapsed(second))},
			[]string{putMethod + ": WithAttemptTimeout is 1s, and WithMaxElapsed is 1s: no retry can follow"}},
		{"a backoff that is too long", []Option{WithBackoff(Exponential{Base: second, Jitter: NoJitter}), WithMaxElapsed(second)},
			[]string{"WithMaxElapsed is 1s, and the backoff waits 1s or more: no retry is ever made"}},
		{"a patience that is too short", []Option{WithPatience(10 * time.Millisecond)},
			[]string{"WithPatience is 10ms, and WithBackoff waits 50ms or more: no retry follows UNAVAILABLE unless the server names a time"}},
		{"a patience that is just long enough", []Option{WithPatience(50 * time.Millisecond)}, nil},
		{"a backoff that is short enough", []Option{WithBackoff(Exponential{Base: second}), WithMaxElapsed(second)}, nil},
		{"an empty budget", []Option{never}, []string{"all methods: the budget never allows a retry"}},
		{"a reserve and a floor that never hold a token",
			[]Option{WithRatioBudget(RatioBudget{Ratio: Nothing, Reserve: 0.3, MinPerSecond: 0.05, Window: 10 * second})},
			[]string{"all methods: the budget never allows a retry"}},
		{"a floor that holds a token",
			[]Option{WithRatioBudget(RatioBudget{Ratio: Nothing, Reserve: Nothing, MinPerSecond: 0.1, Window: 10 * second})}, nil},
		{"an empty budget among others", []Option{WithBudget(AllBudgets(Unlimited, emptyBudget(t)))},
			[]string{"all methods: the budget never allows a retry"}},
		{"budgets that are not empty", []Option{WithBudget(AllBudgets(Unlimited, newRatioBudget(RatioBudget{Reserve: 1, Window: second}))),
			WithMethod(echoMethod, WithBudget(newRatioBudget(RatioBudget{Ratio: 0.1, Reserve: Nothing, Window: second}))),
			WithMethod(putMethod, WithBudget(PerTarget(func() Budget { return Unlimited })))}, nil},
		{"an empty budget of hedges",
			[]Option{WithMethod(echoMethod,
				WithPolicy(Policy{MaxAttempts: 2, Hedging: &Hedging{Delay: HedgeAfter(second), Budget: emptyBudget(t)}}))},
			[]string{echoMethod + ": the budget of hedges never allows one"}},
		{"an empty budget for calls that make no retry", []Option{never, Disable()}, nil},
		{"a hedge that comes too late",
			[]Option{WithMethod(echoMethod, WithAttemptTimeout(second),
				WithPolicy(Policy{MaxAttempts: 2, Hedging: &Hedging{Delay: HedgeAfter(second)}}))},
			[]string{"WithHedging has a delay of 1s, and WithAttemptTimeout is 1s: no hedge is ever sent"}},
		{"a hedge that comes after the end",
			[]Option{WithMethod(echoMethod, WithMaxElapsed(second),
				WithPolicy(Policy{MaxAttempts: 2, Hedging: &Hedging{Delay: HedgeAfter(second)}}))},
			[]string{"WithHedging has a delay of 1s, and WithMaxElapsed is 1s: no hedge is ever sent"}},
		{"hedging without a second attempt",
			[]Option{WithMethod(echoMethod, WithMaxAttempts(1), WithHedging(Hedging{Delay: HedgeAfter(second)}))},
			[]string{echoMethod + ": WithMaxAttempts is 1, so WithHedging has no effect"}},
		{"a hedge that might run a method twice",
			[]Option{WithMethod(echoMethod, WithUnsentOnly(true), WithPolicy(Policy{MaxAttempts: 2, Hedging: &Hedging{Delay: HedgeAfter(second)}}))},
			[]string{echoMethod + ": WithUnsentOnly is on, so WithHedging has no effect"}},
		{"a service config",
			[]Option{WithServiceConfig(`{"methodConfig": [{"name": [{"service": "grpcretry.test.v1.EchoService", "method": "Ehco"},
			{"service": "not.linked"}, {}], "hedgingPolicy": {"maxAttempts": 7}}]}`)},
			[]string{"WithServiceConfig: methodConfig[0].hedgingPolicy applies to all methods",
				"WithServiceConfig: methodConfig[0].hedgingPolicy.maxAttempts", "has no method Ehco"}},
		{"a service config that hedges a service, and retries all others",
			[]Option{WithServiceConfig(`{"methodConfig": [{"name": [{"service": "not.linked"}], "hedgingPolicy": {"maxAttempts": 2}},
			{"name": [{}], "retryPolicy": {"maxAttempts": 2, "initialBackoff": "1s", "maxBackoff": "1s", "backoffMultiplier": 1,
			"retryableStatusCodes": ["UNAVAILABLE"]}}]}`)}, nil},
		{"only OK is retried",
			[]Option{WithServiceConfig(`{"methodConfig": [{"name": [{"service": "not.linked"}], "retryPolicy": {"maxAttempts": 2,
			"initialBackoff": "1s", "maxBackoff": "1s", "backoffMultiplier": 1, "retryableStatusCodes": ["OK"]}}]}`)},
			[]string{"/not.linked/: no status code is retried", "WithServiceConfig: methodConfig[0].retryPolicy.retryableStatusCodes[0]"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			logs := &logRecorder{}
			r := retrierOf(t, append(tt.opts, WithLogger(slog.New(logs)))...)
			got := r.settings.current().warnings()
			if len(got) != len(tt.want) {
				t.Fatalf("warnings %q, want %d", got, len(tt.want))
			}
			for i, want := range tt.want {
				if !strings.Contains(got[i], want) {
					t.Errorf("warning %q, want it to say %q", got[i], want)
				}
			}
			if lines := logs.lines(); len(lines) != len(got) {
				t.Errorf("logged %q, want each warning once", lines)
			}
			update(t, r) // says nothing new
			if lines := logs.lines(); len(lines) != len(got) {
				t.Errorf("after an Update logged %q, want each warning once", lines)
			}
		})
	}
}

func emptyBudget(t *testing.T) Budget {
	t.Helper()
	b, err := NewRatioBudget(RatioBudget{Ratio: Nothing, Reserve: Nothing, Window: second})
	if err != nil {
		t.Fatal(err)
	}
	return b
}
