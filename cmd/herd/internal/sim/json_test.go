package sim

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"reflect"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/grpcretry/grpcretry"
)

func TestShippedScenariosCanBeWrittenAndRead(t *testing.T) {
	for _, study := range Studies() {
		got, err := ReadScenarios(strings.NewReader(text(t, study.Scenarios)))
		if err != nil {
			t.Errorf("%s: %v", study.Name, err)
		} else if !reflect.DeepEqual(got, study.Scenarios) {
			t.Errorf("%s: read %+v, want %+v", study.Name, got, study.Scenarios)
		}
	}
}

// Every field has its form.
func TestScenarioAsJSON(t *testing.T) {
	const file = `{
		"name": "all", "title": "everything", "see": "nothing", "seed": 18446744073709551615,
		"duration": "1m30s", "bucket": "100ms",
		"network": {"shape": "normal", "mean": "10ms", "spread": "2ms"},
		"groups": [{"name": "g", "rate": 12.5, "even": true, "start": "1s", "stop": "2s", "deadline": "3s",
			"target": "b", "processes": 4, "strategy": {"name": "own", "ignorePushback": true,
				"hedging": {"kind": "after", "budget": {"kind": "unlimited"}, "maxAttempts": 3, "delay": "20ms", "nonFatalCodes": []},
				"policy": {"maxAttempts": 7, "codes": ["CANCELLED", "DEADLINE_EXCEEDED"], "attemptTimeout": "1s",
					"maxElapsed": "2s", "maxServerDelay": "-1ns", "bufferLimit": -1, "commitOnHeaders": true,
					"backoff": {"kind": "exponential", "base": "1ms", "max": "2s", "multiplier": 1.5, "jitter": "proportional"},
					"overloadBackoff": {"kind": "decorrelated", "base": "3ms", "max": "4s"}},
				"budget": {"kind": "all", "of": [{"kind": "unlimited"}, {"kind": "ratio", "ratio": 0.1, "reserve": 4, "minPerSecond": 2, "window": "5s"}, {"kind": "finagle", "ratio": 0.2, "minPerSecond": 10},
					{"kind": "throttle", "maxTokens": 10, "tokenRatio": 0.1}, {"kind": "rate", "perSecond": 3, "burst": 4},
					{"kind": "concurrency", "limit": 5}]}}},
			{"clients": 3, "spread": "4s", "strategy": {"policy": {"backoff": {"kind": "constant", "delay": "5ms"}}}}],
		"servers": [{"name": "a", "replicas": 3, "capacity": 10, "queue": -1, "latency": {"shape": "pareto", "mean": "1ms", "tail": 1.5},
				"rejectCost": 0.5, "rejectCode": "UNAVAILABLE", "ignoresCancel": true,
				"outages": [{"from": "1s", "for": "2s", "left": 0.5, "slowStart": "3s"}, {"from": "9s", "for": "1s", "replica": 2, "code": "INTERNAL"}],
				"pushback": {"kind": "spread", "rate": 9},
				"calls": {"target": "b", "deadline": "1s", "stopCallers": true, "oneAttempt": true}},
			{"name": "b", "optimistic": true, "outages": [{"from": "1s", "for": "2s", "silent": true}]}],
		"strategies": [{"name": "s", "untried": true, "stopCallers": true, "oneAttempt": true, "hedging": {"kind": "quantile", "quantile": 0.95, "atLeast": "5ms", "atMost": "1s", "nonFatalCodes": ["INTERNAL"]}}]
	}`
	all, err := ReadScenarios(strings.NewReader(file))
	if err != nil {
		t.Fatal(err)
	}
	s := all[0]
	if got := s.Groups[0].Strategy.Policy; got.Backoff != (grpcretry.Exponential{Base: ms, Max: 2 * sec, Multiplier: 1.5, Jitter: grpcretry.ProportionalJitter}) ||
		got.OverloadBackoff != (grpcretry.Decorrelated{Base: 3 * ms, Max: 4 * sec}) || got.Codes[0] != codes.Canceled || got.MaxServerDelay != -1 {
		t.Errorf("policy %+v", got)
	}
	if got := s.Groups[0].Strategy.Hedging; got.Kind != HedgeAfter || got.Delay != 20*ms || got.NonFatalCodes == nil || len(got.NonFatalCodes) > 0 {
		t.Errorf("hedging %+v, want a list of codes that is empty, and there", got)
	}
	if got := s.Groups[1].Strategy.Policy.Backoff; got != grpcretry.Constant(5*ms) {
		t.Errorf("constant backoff %v", got)
	}
	if s.Seed != math.MaxUint64 || s.Duration != 90*sec || s.Servers[0].Outages[0].SlowStart != 3*sec {
		t.Errorf("scenario %+v", s)
	}
	again, err := ReadScenarios(strings.NewReader(text(t, s)))
	if err != nil || !reflect.DeepEqual(again, all) {
		t.Errorf("written and read again: %v\n%+v, want\n%+v", err, again, all)
	}
}

// An error of a file says where, what, and what instead.
func TestReadScenariosSaysWhatIsWrong(t *testing.T) {
	with := func(fields string) string {
		return `{"groups":[{"clients":1}],"servers":[{}],` + fields + `}`
	}
	for _, tt := range []struct{ file, want string }{
		{``, "not JSON"},
		{`{"groups":`, "not JSON"},
		{`[]`, "the list has no scenario"},
		{`{} {}`, "more text after"},
		{`7`, "the scenario is 7, want an object"},
		{`[{"seeds":1}]`, "[0].seeds: there is no such field, want one of name, title"},
		{with(`"seed":-1`), "seed is -1, want a whole number of at least 0"},
		{with(`"seed":1.5`), "seed is 1.5, want a whole number"},
		{with(`"name":1`), "name is 1, want a string"},
		{with(`"duration":10`), `duration is 10, want a duration such as "100ms"`},
		{with(`"duration":"10 parsecs"`), `duration is "10 parsecs", want a duration`},
		{with(`"duration":"-1s"`), `duration is -1s, want 0s to 24h0m0s`},
		{with(`"duration":"25h"`), `duration is 25h0m0s, want 0s to 24h0m0s`},
		{with(`"bucket":"1us"`), `bucket is 1µs, want 1ms to 24h0m0s`},
		{with(`"network":{"shape":"square"}`), `network.shape is "square", want one of`},
		{with(`"network":{"shape":"normal"}`), `network.mean is 0s, want a time above 0`},
		{with(`"network":{"mean":"1ms","spread":"1ms"}`), `network.spread is 1ms, want 0 with this shape`},
		{with(`"strategies":[{"policy":{"backoff":{"kind":"linear"}}}]`), `strategies[0].policy.backoff.kind is "linear", want "exponential"`},
		{with(`"strategies":[{"policy":{"backoff":{"kind":"constant","base":"1s"}}}]`), `strategies[0].policy.backoff.base: there is no such field, want one of delay`},
		{with(`"strategies":[{"policy":{"backoff":{"kind":"exponential","jitter":"some"}}}]`), `strategies[0].policy.backoff.jitter is "some", want "full"`},
		{with(`"strategies":[{"name":"x","policy":{"backoff":{"kind":"exponential","base":"9s","max":"1s"}}}]`), `strategies[0]: strategy "x": policy: grpcretry: WithPolicy: Backoff: Exponential.Max is 1s, below Base 9s`},
		{with(`"strategies":[{"policy":{"maxAttempts":-2}}]`), `MaxAttempts: -2 attempts, want at least 1`},
		{with(`"strategies":[{"policy":{"codes":["BUSY"]}}]`), `strategies[0].policy.codes[0] is "BUSY", want a status code`},
		{with(`"strategies":[{"policy":{"budget":{}}}]`), `strategies[0].policy.budget: there is no such field`},
		{with(`"strategies":[{"budget":{"kind":"ratio","limit":3}}]`), `strategies[0].budget.limit is 3, want 0 unless the kind is "concurrency"`},
		{with(`"strategies":[{"budget":{"kind":"finagle","reserve":3}}]`), `strategies[0].budget.reserve is 3, want 0 unless the kind is "ratio"`},
		{with(`"strategies":[{"budget":{"kind":"throttle","ratio":0.2}}]`), `strategies[0].budget.ratio is 0.2, want 0 unless the kind is "ratio" or "finagle"`},
		{with(`"strategies":[{"budget":{"kind":"finagle","ratio":-1}}]`), `strategies[0].budget.ratio is -1, want at least 0`},
		{with(`"strategies":[{"budget":{"kind":"ratio","reserve":-1}}]`), `RatioBudget.Reserve is -1, want a number of at least 0`},
		{with(`"strategies":[{"hedging":{"kind":"after","budget":{"kind":"rate"}}}]`), `strategies[0].hedging.budget.perSecond is 0, want above 0`},
		{with(`"strategies":[{"budget":{"kind":"throttle","maxTokens":2000,"tokenRatio":1}}]`), `NewThrottle: maxTokens is 2000, want above 0 and at most 1000`},
		{with(`"strategies":[{"budget":{"kind":"all"}}]`), `strategies[0].budget.of is 0, want at least one budget`},
		{with(`"strategies":[{"budget":{"kind":"all","of":[{}]}}]`), `strategies[0].budget.of[0].kind is "", want a kind of budget`},
		{with(`"strategies":[{"budget":{"kind":"all","of":[{"kind":"rate"}]}}]`), `strategies[0].budget.of[0].perSecond is 0, want above 0`},
		{with(`"strategies":[{"policy":{"hedging":{"maxAttempts":2}}}]`), `strategies[0].policy.hedging is "set", want none`},
		{`{"servers":[{}]}`, `groups is 0, want 1 to 1000 of them`},
		{`{"groups":[{"clients":1}]}`, `servers is 0, want 1 to 1000 of them`},
		{`{"groups":[{}],"servers":[{}]}`, `groups[0].clients is 0, want clients that call once, or a rate`},
		{`{"groups":[{"clients":1,"rate":1}],"servers":[{}]}`, `groups[0].rate is 1, want either`},
		{`{"groups":[{"clients":-1}],"servers":[{}]}`, `groups[0].clients is -1, want 0 to 100000000`},
		{`{"groups":[{"rate":1}],"servers":[{}]}`, `groups[0].stop is 0s, want an end of the arrivals`},
		{`{"groups":[{"rate":1,"start":"2s","stop":"1s"}],"servers":[{}]}`, `groups[0].stop is 1s, want later than start`},
		{`{"groups":[{"clients":1,"target":"x"}],"servers":[{}]}`, `groups[0].target is "x", want the name of a server`},
		{`{"groups":[{"clients":1,"deadline":"-1s"}],"servers":[{}]}`, `groups[0].deadline is -1s, want 0s to 24h0m0s`},
		{`{"groups":[{"clients":1,"strategy":{"policy":{"maxElapsed":"-1s"}}}],"servers":[{}]}`, `groups[0].strategy: strategy "": policy: grpcretry: WithPolicy: MaxElapsed: -1s is negative`},
		{`{"groups":[{"clients":1}],"servers":[{},{}]}`, `servers[0].name is "", want a name`},
		{`{"groups":[{"clients":1}],"servers":[{"name":"a"},{"name":"a"}]}`, `servers[1].name is "a", want a name of its own`},
		{`{"groups":[{"clients":1}],"servers":[{"replicas":-1}]}`, `servers[0].replicas is -1, want 0 to 10000`},
		{`{"groups":[{"clients":1}],"servers":[{"replicas":2,"optimistic":true}]}`, `servers[0].replicas is 2, want one of an optimistic server`},
		{with(`"strategies":[{"policy":{"codes":[]}}]`), `Codes: `},
		{`{"groups":[{"clients":1}],"servers":[{"capacity":-1}]}`, `servers[0].capacity is -1, want 0 to 1e+07`},
		{`{"groups":[{"clients":1}],"servers":[{"window":"1s"}]}`, `servers[0].window is 1s, want a capacity to count`},
		{`{"groups":[{"clients":1}],"servers":[{"queue":1}]}`, `servers[0].queue is 1, want 0 without workers`},
		{`{"groups":[{"clients":1}],"servers":[{"queue":-2}]}`, `servers[0].queue is -2, want -1`},
		{`{"groups":[{"clients":1}],"servers":[{"rejectCost":1.5}]}`, `servers[0].rejectCost is 1.5, want 0 to 1`},
		{`{"groups":[{"clients":1}],"servers":[{"outages":[{"from":"1s"}]}]}`, `servers[0].outages[0].for is 0s, want 1ns to 24h0m0s`},
		{`{"groups":[{"clients":1}],"servers":[{"outages":[{"for":"2s"},{"from":"1s","for":"1s"}]}]}`, `servers[0].outages[1].from is 1s, want 2s to 24h0m0s`},
		{`{"groups":[{"clients":1}],"servers":[{"outages":[{"for":"2s","left":0.5}]}]}`, `servers[0].outages[0].left is 0.5, want 0 where`},
		{`{"groups":[{"clients":1}],"servers":[{"pushback":{"kind":"spread"}}]}`, `servers[0].pushback.rate is 0, want a rate`},
		{`{"groups":[{"clients":1}],"servers":[{"pushback":{"kind":"maybe"}}]}`, `servers[0].pushback.kind is "maybe", want one of`},
		{`{"groups":[{"clients":1}],"servers":[{"name":"a","calls":{"target":"b"}}]}`, `servers[0].calls.target is "b", want the name of a server`},
		{`{"groups":[{"clients":1}],"servers":[{"name":"a","calls":{"target":"b"}},{"name":"b","calls":{"target":"a"}}]}`, `servers[0].calls.target is "b", want no call that comes back`},
	} {
		_, err := ReadScenarios(strings.NewReader(tt.file))
		if err == nil || !strings.Contains(err.Error(), tt.want) || !strings.HasPrefix(err.Error(), "sim: ") {
			t.Errorf("ReadScenarios(%s) = %v, want an error with %q", tt.file, err, tt.want)
		}
	}
}

func TestReadScenariosStopsAtItsLimit(t *testing.T) {
	if _, err := ReadScenarios(strings.NewReader(strings.Repeat(" ", mostBytes+1))); err == nil || !strings.Contains(err.Error(), "over") {
		t.Errorf("ReadScenarios(too long) = %v, want an error", err)
	}
	if _, err := ReadScenarios(failing{}); err == nil || !strings.Contains(err.Error(), "broken") {
		t.Errorf("ReadScenarios(broken) = %v, want its error", err)
	}
}

type failing struct{}

func (failing) Read([]byte) (int, error) { return 0, errors.New("broken") }

type ownBackoff struct{}

func (ownBackoff) Delay(int, time.Duration, float64) time.Duration { return 0 }

// What only Go can hold is not lost silently.
func TestScenarioOfGoCannotBeWritten(t *testing.T) {
	s := small()
	for _, strategy := range []Strategy{
		{Policy: grpcretry.Policy{Backoff: ownBackoff{}}},
		{Budget: Budget{New: func() (grpcretry.Budget, error) { return grpcretry.Unlimited, nil }}},
		{Policy: grpcretry.Policy{Budget: grpcretry.Unlimited}},
		{Hedging: &Hedging{New: func() grpcretry.HedgeDelay { return grpcretry.HedgeAfter(sec) }}},
	} {
		s.Strategies = []Strategy{strategy}
		if b, err := json.Marshal(s); err == nil {
			t.Errorf("json.Marshal(%+v) = %s, want an error", strategy, b)
		}
	}
}

func TestResultAsJSON(t *testing.T) {
	s := classic().Scenarios[0]
	r := mustRun(t, s, strategyOf(t, s, "exponential"))
	var got struct {
		Strategy string
		End      float64
		Complete bool
		Summary  map[string]float64
		Groups   []struct {
			Outcomes map[string]int
			Latency  map[string]float64
		}
		Servers []struct {
			Series []struct{ Offered, Accepted, Capacity float64 }
		}
	}
	if err := json.Unmarshal([]byte(text(t, r)), &got); err != nil {
		t.Fatal(err)
	}
	if got.End != 52.7 || !got.Complete || got.Summary["p99"] != 52.7 || got.Summary["wasted"] != 9000 || got.Summary["over"] != 800 ||
		got.Groups[0].Outcomes["recovered"] != 1000 || got.Groups[0].Latency["p50"] != 32.7 ||
		got.Servers[0].Series[12].Offered != 1000 || got.Servers[0].Series[12].Capacity != 200 {
		t.Errorf("%+v", got)
	}
	b, err := encoder{}.bytes(struct{ A, B float64 }{math.NaN(), math.Inf(1)})
	if err != nil || string(b) != `{"a":null,"b":null}` {
		t.Errorf("no numbers: %s, %v", b, err)
	}
}

func TestCodeNames(t *testing.T) {
	for c := codes.OK; c <= codes.Unauthenticated; c++ {
		var got codes.Code
		if err := got.UnmarshalJSON([]byte(fmt.Sprintf("%q", CodeName(c)))); err != nil || got != c {
			t.Errorf("gRPC reads %s as %v, %v; want %v", CodeName(c), got, err, c)
		}
	}
}

// Whatever a file says: no panic, and what is accepted can be written and read again, and
// run.
func FuzzReadScenarios(f *testing.F) {
	for _, study := range Studies() {
		f.Add(text(f, study.Scenarios[:1]))
	}
	f.Add(text(f, randomScenario(1)))
	f.Add(text(f, randomScenario(2)))
	f.Add(`{"groups":[{"clients":1,"strategy":{"policy":{"codes":["OK"]}}}],"servers":[{"outages":[{"for":"1s"}]}]}`)
	f.Fuzz(func(t *testing.T, file string) {
		scenarios, err := ReadScenarios(strings.NewReader(file))
		if err != nil {
			if !strings.HasPrefix(err.Error(), "sim: ") {
				t.Errorf("error %q, want it to begin with sim:", err)
			}
			return
		}
		again, err := ReadScenarios(strings.NewReader(text(t, scenarios)))
		if err != nil || text(t, again) != text(t, scenarios) {
			t.Errorf("read again: %v\n%s, want\n%s", err, text(t, again), text(t, scenarios))
		}
		for _, s := range scenarios {
			runALittle(t, s)
		}
	})
}

// runALittle runs the start of a scenario, unless even that is long.
func runALittle(t *testing.T, s Scenario) {
	for _, g := range s.Groups {
		if g.Clients > 1000 || g.Rate > 1e5 || g.Processes > 1000 {
			return
		}
	}
	if s.Duration == 0 || s.Duration > sec {
		s.Duration = sec
	}
	for i := range s.Groups {
		if s.Groups[i].Stop > s.Duration {
			s.Groups[i].Stop = 0
		}
	}
	strategy := Strategy{}
	if len(s.Strategies) > 0 {
		strategy = s.Strategies[0]
	}
	if s.check(&strategy) != nil {
		return // the bucket, with the other duration
	}
	r, err := newRun(&s, &strategy)
	if err != nil {
		t.Fatal(err)
	}
	for range 10_000 {
		e, ok := r.queue.take()
		if !ok {
			break
		}
		if e.at < r.now {
			t.Fatalf("time goes back from %d to %d", r.now, e.at)
		}
		r.now, r.clock = e.at, time.Time{}
		r.handle(e)
	}
	r.result(false)
}
