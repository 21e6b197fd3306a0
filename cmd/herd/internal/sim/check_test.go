package sim

import (
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/grpcretry/grpcretry"
)

func TestCheckNamesTheFieldAndTheValue(t *testing.T) {
	strategy := func(one Strategy) func(*Scenario) {
		return func(s *Scenario) { s.Strategies = []Strategy{one} }
	}
	budget := func(b Budget) func(*Scenario) { return strategy(Strategy{Budget: b}) }
	group := func(g Group) func(*Scenario) { return func(s *Scenario) { s.Groups[0] = g } }
	server := func(all ...Server) func(*Scenario) { return func(s *Scenario) { s.Servers = all } }
	for _, tt := range []struct {
		change func(*Scenario)
		want   string
	}{
		{func(s *Scenario) { s.Duration = -sec }, "duration is -1s, want 0s to 24h0m0s"},
		{func(s *Scenario) { s.Duration = 25 * time.Hour }, "duration is 25h0m0s, want 0s to 24h0m0s"},
		{func(s *Scenario) { s.Bucket = 1000 }, "bucket is 1µs, want 1ms to 24h0m0s"},
		{func(s *Scenario) { s.Network.Shape = "square" }, `network.shape is "square", want one of`},
		{func(s *Scenario) { s.Network.Shape = NormalShape }, "network.mean is 0s, want a time above 0"},
		{func(s *Scenario) { s.Network = Distribution{Mean: ms, Spread: ms} }, "network.spread is 1ms, want 0 with this shape"},
		{strategy(Strategy{Name: "x", Policy: grpcretry.Policy{Backoff: grpcretry.Exponential{Base: 9 * sec, Max: sec}}}),
			`strategies[0]: strategy "x": policy: grpcretry: WithPolicy: Backoff: Exponential.Max is 1s, below Base 9s`},
		{strategy(Strategy{Policy: grpcretry.Policy{MaxAttempts: -2}}), "MaxAttempts: -2 attempts, want at least 1"},
		{strategy(Strategy{Policy: grpcretry.Policy{Budget: grpcretry.Unlimited}}), `strategies[0].policy.budget is "set", want none`},
		{budget(Budget{Kind: "plenty"}), `strategies[0].budget.kind is "plenty", want one of`},
		{budget(Budget{Kind: FinagleBudget, Ratio: -1}), "strategies[0].budget.ratio is -1, want at least 0"},
		{budget(Budget{Kind: RatioBudget, Reserve: -1}), "RatioBudget.Reserve is -1, want a finite number of at least 0"},
		{budget(Budget{Kind: ThrottleBudget, MaxTokens: 2000, TokenRatio: 1}), "NewThrottle: maxTokens is 2000, want at least 0.001"},
		{strategy(Strategy{Hedging: &Hedging{Kind: HedgeAfter, Budget: Budget{Kind: RateBudget}}}),
			"strategies[0].hedging.budget.perSecond is 0, want above 0"},
		{func(s *Scenario) { s.Groups = nil }, "groups is 0, want 1 to 1000 of them"},
		{func(s *Scenario) { s.Servers = nil }, "servers is 0, want 1 to 1000 of them"},
		{group(Group{}), "groups[0].clients is 0, want clients that call once, or a rate"},
		{group(Group{Clients: 1, Rate: 1}), "groups[0].rate is 1, want either"},
		{group(Group{Clients: -1}), "groups[0].clients is -1, want 0 to 100000000"},
		{group(Group{Rate: 1}), "groups[0].stop is 0s, want an end of the arrivals"},
		{group(Group{Rate: 1, Start: 2 * sec, Stop: sec}), "groups[0].stop is 1s, want later than start"},
		{group(Group{Clients: 1, Target: "x"}), `groups[0].target is "x", want the name of a server`},
		{group(Group{Clients: 1, Deadline: -sec}), "groups[0].deadline is -1s, want 0s to 24h0m0s"},
		{group(Group{Clients: 1, Strategy: &Strategy{Policy: grpcretry.Policy{MaxElapsed: -sec}}}), "groups[0].strategy: "},
		{server(Server{}, Server{}), `servers[0].name is "", want a name`},
		{server(Server{Name: "a"}, Server{Name: "a"}), `servers[1].name is "a", want a name of its own`},
		{server(Server{Replicas: -1}), "servers[0].replicas is -1, want 0 to 10000"},
		{server(Server{Capacity: math.NaN()}), "servers[0].capacity is NaN, want 0 to 1e+07"},
		{server(Server{Window: sec}), "servers[0].window is 1s, want a capacity to count"},
		{server(Server{Queue: 1}), "servers[0].queue is 1, want 0 without workers"},
		{server(Server{Queue: -2}), "servers[0].queue is -2, want -1"},
		{server(Server{RejectCost: 1.5}), "servers[0].rejectCost is 1.5, want 0 to 1"},
		{server(Server{Outages: []Outage{{From: sec}}}), "servers[0].outages[0].for is 0s, want 1ns to 24h0m0s"},
		{server(Server{Outages: []Outage{{For: 2 * sec}, {From: sec, For: sec}}}), "servers[0].outages[1].from is 1s, want 2s to 24h0m0s"},
		{server(Server{Outages: []Outage{{For: 2 * sec, Left: 0.5}}}), "servers[0].outages[0].left is 0.5, want 0 where"},
		{server(Server{Pushback: Pushback{Kind: SpreadPushback}}), "servers[0].pushback.rate is 0, want a rate"},
		{server(Server{Name: "a", Calls: &Downstream{Target: "b"}}), `servers[0].calls.target is "b", want the name of a server`},
		{server(Server{Name: "a", Calls: &Downstream{Target: "b"}}, Server{Name: "b", Calls: &Downstream{Target: "a"}}),
			`servers[0].calls.target is "b", want no call that comes back`},
	} {
		s := small()
		tt.change(&s)
		if err := s.Check(); err == nil || !strings.Contains(err.Error(), tt.want) || !strings.HasPrefix(err.Error(), "sim: ") {
			t.Errorf("Check = %v, want an error with %q", err, tt.want)
		}
	}
}

func TestCodeNames(t *testing.T) {
	for c := codes.OK; c <= codes.Unauthenticated; c++ {
		var got codes.Code
		if err := got.UnmarshalJSON(fmt.Appendf(nil, "%q", CodeName(c))); err != nil || got != c {
			t.Errorf("gRPC reads %s as %v, %v; want %v", CodeName(c), got, err, c)
		}
	}
}
