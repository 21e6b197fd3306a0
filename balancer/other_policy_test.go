package balancer_test

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/balancer"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// If a channel has another policy, the error says so.
const note = "the channel's load-balancing policy is not grpcretry_round_robin"

// wantNote fails the test unless an error of two attempts has the note, or does not have it.
func wantNote(t *testing.T, err error, want bool) {
	t.Helper()
	wantNoteAfter(t, err, 2, want)
}

func wantNoteAfter(t *testing.T, err error, attempts int, want bool) {
	t.Helper()
	wantGiveUp(t, err, attempts)
	if got := strings.Contains(err.Error(), note); got != want {
		t.Errorf("err = %v, want the note %q: %v", err, note, want)
	}
}

// retrier returns a Retrier for two attempts, and the lines that it logs.
func retrier(t *testing.T, opts ...grpcretry.Option) (*grpcretry.Retrier, *bytes.Buffer) {
	t.Helper()
	var lines bytes.Buffer
	r, err := grpcretry.New(append(append(fast(), grpcretry.WithMaxAttempts(2),
		grpcretry.WithLogger(slog.New(slog.NewTextHandler(&lines, nil)))), opts...)...)
	if err != nil {
		t.Fatal(err)
	}
	return r, &lines
}

func TestTheErrorNamesTheProblemOfAnotherPolicy(t *testing.T) {
	stream := func(ctx context.Context, cc *client) error {
		s, err := cc.Expand(ctx, &echov1.EchoRequest{})
		if err == nil {
			_, err = s.Recv()
		}
		return err
	}
	unary := func(ctx context.Context, cc *client) error {
		_, err := cc.echo(ctx, "call")
		return err
	}
	hedging := grpcretry.WithPolicy(grpcretry.Policy{MaxAttempts: 2,
		Hedging: &grpcretry.Hedging{Delay: grpcretry.HedgeAfter(second), AllMethodsAreSafe: true, Budget: grpcretry.Unlimited}})
	for _, tt := range []struct {
		name   string
		policy string // by the resolver's service config; none if empty
		dial   grpc.DialOption
		opts   []grpcretry.Option
		call   func(context.Context, *client) error
		want   bool
	}{
		{"the service config names another", "round_robin", balancer.DialOption(), nil, unary, true},
		{"the same, stream", "pick_first", balancer.DialOption(), nil, stream, true},
		{"the same, hedged", "round_robin", balancer.DialOption(), []grpcretry.Option{hedging}, unary, true},
		{"dialed without it", "", grpc.EmptyDialOption{}, nil, unary, true},
		{"a later default", "", grpc.WithDefaultServiceConfig(`{}`), nil, unary, true},
		{"the service config names it", ours, grpc.EmptyDialOption{}, nil, unary, false},
		{"the default", "", balancer.DialOption(), nil, unary, false},
		{"the default, stream", "", balancer.DialOption(), nil, stream, false},
		{"the default, hedged", "", balancer.DialOption(), []grpcretry.Option{hedging}, unary, false},
		{"the resolver's config is not obeyed", "round_robin", joined{balancer.DialOption()}, nil, unary, false},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T, c *cluster) {
				c.fail("a", "b")
				r, _ := retrier(t, tt.opts...)
				dial := append(r.DialOptions(), tt.dial)
				if own, ok := tt.dial.(joined); ok {
					dial = append(r.DialOptions(), own.DialOption, grpc.WithDisableServiceConfig())
				}
				cc := c.dialEndpoints(t, nil, dial...)
				if tt.policy == "" {
					cc.resolve("a", "b")
				} else {
					cc.use(tt.policy, "a", "b")
				}
				err := tt.call(t.Context(), cc)
				wantNote(t, err, tt.want)
				if got := status.Convert(err); got.Code() != codes.Unavailable || got.Message() != "db-down" {
					t.Errorf("the status is %v, want the server's", got)
				}
			}, "a", "b")
		})
	}
}

// joined stands for the option and WithDisableServiceConfig.
type joined struct{ grpc.DialOption }

// Attempts that reached no server say nothing about the policy.
func TestNoNoteWithoutAServer(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		balancer.DialOption()
		r, _ := retrier(t, grpcretry.WithPatience(0))
		_, err := c.dialPolicy(t, plain, []string{"a"}, r.DialOptions()...).echo(t.Context(), "call")
		wantNoteAfter(t, err, 1, false)
	})
}

// The warning comes once for each target.
func TestWarningOfAnotherPolicy(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		balancer.DialOption()
		c.fail("a", "b")
		r, lines := retrier(t)
		for range 2 {
			cc := c.dialPolicy(t, plain, []string{"a", "b"}, r.DialOptions()...)
			for range 2 {
				_, err := cc.echo(t.Context(), "call")
				wantNote(t, err, true)
			}
		}
		got := r.Warnings()
		if len(got) != 1 || !strings.HasPrefix(got[0], "calls to cluster:///echo: "+note) {
			t.Errorf("Warnings = %q, want one about the target", got)
		}
		if n := strings.Count(lines.String(), `msg="grpcretry: calls to cluster:///echo: `+note); n != 1 {
			t.Errorf("%d lines of the warning, want one:\n%s", n, lines)
		}
	}, "a", "b")
}

// Functions have no channel, and calls that pass through are not retried here.
func TestNoNoteForOtherCalls(t *testing.T) {
	balancer.DialOption()
	r, _ := retrier(t)
	err := r.Do(t.Context(), "/sql/read", func(context.Context) error { return errDown })
	wantNote(t, err, false)
}

// One attempt says nothing about the policy either.
func TestNoNoteAfterOneAttempt(t *testing.T) {
	bubble(t, func(t *testing.T, c *cluster) {
		balancer.DialOption()
		c.fail("a")
		r, _ := retrier(t, grpcretry.WithRatioBudget(grpcretry.RatioBudget{Ratio: 1, Reserve: grpcretry.Nothing}))
		_, err := c.dialPolicy(t, plain, []string{"a"}, r.DialOptions()...).echo(t.Context(), "call")
		wantGiveUp(t, err, 1)
		if strings.Contains(err.Error(), note) {
			t.Errorf("err = %v, want no note", err)
		}
	}, "a")
}
