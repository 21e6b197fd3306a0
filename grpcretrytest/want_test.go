package grpcretrytest_test

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/grpcretry/grpcretry"
	. "github.com/grpcretry/grpcretry/grpcretrytest"
)

// A failing test keeps what the kit reports instead of failing.
type failing struct {
	testing.TB
	reports []string
}

func (f *failing) Helper() {}

func (f *failing) Errorf(format string, args ...any) {
	f.reports = append(f.reports, fmt.Sprintf(format, args...))
}

func (f *failing) Fatalf(format string, args ...any) {
	f.Errorf(format, args...)
	panic(f)
}

// reports returns what the kit reports in f.
func reports(t *testing.T, f func(t testing.TB)) string {
	t.Helper()
	fake := &failing{TB: t}
	func() {
		defer func() {
			if r := recover(); r != nil && r != any(fake) {
				panic(r)
			}
		}()
		f(fake)
	}()
	return strings.Join(fake.reports, "\n")
}

// wantText compares a report with a text that is indented as in the source.
func wantText(t *testing.T, got, want string) {
	t.Helper()
	var lines []string
	for line := range strings.Lines(strings.TrimLeft(want, "\n")) {
		lines = append(lines, strings.TrimPrefix(line, "\t\t\t"))
	}
	if want := strings.TrimRight(strings.Join(lines, ""), "\n\t"); got != want {
		t.Errorf("the report is\n%s\nwant\n%s", got, want)
	}
}

// Every report names the method, and shows both timelines with a mark at what differs.
func TestWantReports(t *testing.T) {
	unavailable := Fail(codes.Unavailable, "db-down")
	for _, tt := range []struct {
		name   string
		steps  []Step
		calls  int
		wanted []string
		report string
	}{
		{"nothing", []Step{unavailable}, 1, []string{"0s attempt 1 UNAVAILABLE; wait 75ms backoff; 75ms attempt 2 OK"}, ""},
		{"another wait", []Step{unavailable.Pushback(120 * time.Millisecond)}, 1,
			[]string{"0s attempt 1 UNAVAILABLE; wait 75ms backoff; 75ms attempt 2 OK"}, `
			/grpcretry.test.v1.EchoService/Echo:
			  got                        want
			  0s attempt 1 UNAVAILABLE   0s attempt 1 UNAVAILABLE
			! wait 120ms pushback        wait 75ms backoff
			! 120ms attempt 2 OK         75ms attempt 2 OK`},
		{"an attempt too many", []Step{unavailable.Times(2)}, 1,
			[]string{"0s attempt 1 UNAVAILABLE; wait 75ms backoff; 75ms attempt 2 UNAVAILABLE"}, `
			/grpcretry.test.v1.EchoService/Echo:
			  got                          want
			  0s attempt 1 UNAVAILABLE     0s attempt 1 UNAVAILABLE
			  wait 75ms backoff            wait 75ms backoff
			  75ms attempt 2 UNAVAILABLE   75ms attempt 2 UNAVAILABLE
			! wait 300ms backoff
			! 375ms attempt 3 OK`},
		{"no retry", []Step{unavailable.NoRetry()}, 1, []string{"0s attempt 1 UNAVAILABLE\n wait 75ms backoff\n 75ms attempt 2 OK\n"}, `
			/grpcretry.test.v1.EchoService/Echo:
			  got                        want
			  0s attempt 1 UNAVAILABLE   0s attempt 1 UNAVAILABLE
			! 0s stop pushback           wait 75ms backoff
			!                            75ms attempt 2 OK`},
		{"an entry in the middle", nil, 1, []string{"0s attempt 1 UNAVAILABLE; wait 1s; 0s attempt 1 OK"}, `
			/grpcretry.test.v1.EchoService/Echo:
			  got               want
			!                   0s attempt 1 UNAVAILABLE
			!                   wait 1s
			  0s attempt 1 OK   0s attempt 1 OK`},
		{"another method", nil, 1, []string{"/shop.v1.Shop/Checkout; 0s attempt 1 OK"}, `
			/grpcretry.test.v1.EchoService/Echo:
			  got                                   want
			! /grpcretry.test.v1.EchoService/Echo   /shop.v1.Shop/Checkout
			  0s attempt 1 OK                       0s attempt 1 OK`},
		{"outside of the ranges", []Step{unavailable.After(time.Second)}, 1,
			[]string{"attempt 1 UNAVAILABLE after 0s..1s; wait 76ms..100ms; 1s..2s attempt 2 OK"}, `
			/grpcretry.test.v1.EchoService/Echo:
			  got                                 want
			  0s attempt 1 UNAVAILABLE after 1s   attempt 1 UNAVAILABLE after 0s..1s
			! wait 75ms backoff                   wait 76ms..100ms
			  1.075s attempt 2 OK                 1s..2s attempt 2 OK`},
		{"an attempt that took no time", []Step{unavailable.After(time.Second)}, 1,
			[]string{"attempt 1 UNAVAILABLE after 0s; wait; attempt 2 OK after 0s"}, `
			/grpcretry.test.v1.EchoService/Echo:
			  got                                 want
			! 0s attempt 1 UNAVAILABLE after 1s   attempt 1 UNAVAILABLE after 0s
			  wait 75ms backoff                   wait
			  1.075s attempt 2 OK                 attempt 2 OK after 0s`},
		{"the second of two calls", []Step{OK()}, 2, []string{"attempt 1 OK", "attempt 1 ABORTED"}, `
			call 2, /grpcretry.test.v1.EchoService/Echo:
			  got               want
			! 0s attempt 1 OK   attempt 1 ABORTED`},
		{"a call too many", nil, 2, []string{"attempt 1 OK"}, `
			got 2 calls, want 1:
			/grpcretry.test.v1.EchoService/Echo
			  0s attempt 1 OK
			/grpcretry.test.v1.EchoService/Echo
			  0s attempt 1 OK`},
		{"no call", nil, 0, []string{"attempt 1 OK"}, `
			got 0 calls, want 1`},
		{"a wait that was not started", []Step{unavailable.Pushback(time.Hour)},
			1, []string{"attempt 1 UNAVAILABLE; 0s stop pushback instead of wait 1m0s"}, `
			/grpcretry.test.v1.EchoService/Echo:
			  got                                                want
			  0s attempt 1 UNAVAILABLE                           attempt 1 UNAVAILABLE
			! 0s stop pushback instead of wait 1h0m0s pushback   0s stop pushback instead of wait 1m0s`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				wantText(t, reports(t, func(fake testing.TB) {
					server := NewServer(fake, register)
					server.On(echoMethod, tt.steps...)
					client := clientOf(server.Dial())
					for range tt.calls {
						client.Echo(t.Context(), hello())
					}
					server.Want(tt.wanted...)
				}), tt.report)
			})
		})
	}
}

func TestWantReportsACallThatHasNotEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		wantText(t, reports(t, func(fake testing.TB) {
			server := NewServer(fake, register)
			if _, err := clientOf(server.Dial()).Chat(t.Context()); err != nil {
				t.Fatal(err)
			}
			server.Want("attempt 1 OK")
		}), `
			1 call has not ended
			got 0 calls, want 1`)
	})
}

func TestInvalidScripts(t *testing.T) {
	unavailable := Fail(codes.Unavailable, "db-down")
	for _, tt := range []struct {
		pattern string
		step    Step
		report  string
	}{
		{echoMethod, Fail(codes.OK, ""), "step 1: Fail: the code is OK"},
		{echoMethod, unavailable.After(-time.Second), "step 1: Fail: After(-1s) is negative"},
		{echoMethod, unavailable.Pushback(time.Microsecond), "step 1: Fail: Pushback(1µs), want whole milliseconds, from 0 to 2147483647"},
		{echoMethod, unavailable.Pushback(-time.Second), "step 1: Fail: Pushback(-1s), want whole milliseconds, from 0 to 2147483647"},
		{echoMethod, unavailable.Pushback(2147483648 * time.Millisecond),
			"step 1: Fail: Pushback(596h31m23.648s), want whole milliseconds, from 0 to 2147483647"},
		{echoMethod, OK().RetryInfo(time.Second), "step 1: OK: RetryInfo is for Fail"},
		{echoMethod, OK().Header("a"), `step 1: OK: Header: a key without a value: ["a"]`},
		{echoMethod, OK().Header("two words", "b"), `step 1: OK: Header: "two words" is not a key of metadata`},
		{echoMethod, OK().Header("", "b"), `step 1: OK: Header: "" is not a key of metadata`},
		{echoMethod, unavailable.Trailer("a", "b", "c"), `step 1: Fail: Trailer: a key without a value: ["a" "b" "c"]`},
		{echoMethod, unavailable.PushbackValue(), "step 1: Fail: PushbackValue(), want at least one value"},
		{echoMethod, unavailable.PushbackValue("5", "\n"), `step 1: Fail: PushbackValue("\n"): it is not printable ASCII`},
		{echoMethod, unavailable.Trailer("Grpc-Status", "0"), `step 1: Fail: Trailer: "grpc-status" is gRPC's own`},
		{echoMethod, unavailable.Trailer("a", "é"),
			`step 1: Fail: Trailer: "é" is not a value of metadata, except for a key that ends in -bin`},
		{echoMethod, Hang().Trailer("a", "b"), "step 1: Hang: no trailer reaches the client"},
		{echoMethod, Cut().Pushback(0), "step 1: Cut: no trailer reaches the client, so no pushback does"},
		{echoMethod, Fail(17, ""), "step 1: Fail: gRPC has no code 17"},
		{echoMethod, unavailable.Times(0), "step 1: Fail: Times(0), want at least 1"},
		{expandMethod, Cut().AfterSending(-1), "step 1: Cut: AfterSending(-1) is negative"},
		{expandMethod, OK().AfterSending(1), "step 1: OK: AfterSending is for Fail, Hang and Cut"},
		{expandMethod, OK().AfterReceiving(1), "step 1: OK: AfterReceiving is for Fail, Hang and Cut"},
		{expandMethod, Cut().AfterReceiving(-1), "step 1: Cut: AfterReceiving(-1) is negative"},
		{echoMethod, Cut().AfterSending(2), "step 1: AfterSending(2) is for server and bidirectional streams, and the method is neither"},
		{collectMethod, Cut().AfterSending(1), "step 1: AfterSending(1) is for server and bidirectional streams, and the method is neither"},
		{echoMethod, Cut().AfterReceiving(2), "step 1: AfterReceiving(2) is for streams, and the method is unary"},
		{"", unavailable, `want "/pkg.Service/Method", "/pkg.Service/" or "/"`},
		{"grpcretry.test.v1.EchoService/Echo", unavailable, `want "/pkg.Service/Method", "/pkg.Service/" or "/"`},
		{"/shop.v1.Shop/Checkout", unavailable, "the server has no service shop.v1.Shop; it has grpcretry.test.v1.EchoService"},
		{"/grpcretry.test.v1.EchoService/Ekko", unavailable, "the service has no method Ekko; it has Append, Chat, Collect, Echo, Expand, Put"},
	} {
		synctest.Test(t, func(t *testing.T) {
			for name, script := range map[string]func(*Server, string, ...Step){"On": (*Server).On, "Next": (*Server).Next} {
				got := reports(t, func(fake testing.TB) { script(NewServer(fake, register), tt.pattern, tt.step) })
				if want := fmt.Sprintf("grpcretrytest: %s %q: %s", name, tt.pattern, tt.report); got != want {
					t.Errorf("the report is\n%s\nwant\n%s", got, want)
				}
			}
		})
	}
}

func TestInvalidTimelines(t *testing.T) {
	for text, report := range map[string]string{
		"":                                    `the timeline "" is empty`,
		"/grpcretry.test.v1.EchoService/Echo": `the timeline "/grpcretry.test.v1.EchoService/Echo" is empty`,
		"attempt 1":                           `"attempt 1": want a number and a code`,
		"attempt one OK":                      `"attempt one OK": "one" is not the number of an attempt`,
		"attempt +1 OK":                       `"attempt +1 OK": "+1" is not the number of an attempt`,
		"attempt 1 UNAVAILABLE; wait 1 s":     `"wait 1 s": time: missing unit in duration "1"`,
		"wait 2s..1s":                         `"wait 2s..1s": "2s..1s" is not a range`,
		"wait -1s":                            `"wait -1s": "-1s" is not a range`,
		"wait 1s bakcoff":                     `"wait 1s bakcoff": "bakcoff" is none of backoff, pushback, retry_info, connect`,
		"0s attempt 1 OK in 3s":               `"0s attempt 1 OK in 3s": what does "in 3s" mean?`,
		"0s attempt 1 OK after three":         `"0s attempt 1 OK after three": time: invalid duration "three"`,
		"stop exhausted instead of wait 5":    `"stop exhausted instead of wait 5": time: missing unit in duration "5"`,
		"0s attempt 1 OK unsent":              `"0s attempt 1 OK unsent": what does "unsent" mean?`,
		"attempt 1 OK; /shop.v1.Shop/Check":   `"/shop.v1.Shop/Check": the method comes first`,
		"stop exhausted now":                  `"stop exhausted now": what does "now" mean?`,
	} {
		got := reports(t, func(fake testing.TB) { Record(fake, newRetrier(t)).Want(text) })
		if want := "grpcretrytest: Want: " + report; got != want {
			t.Errorf("the report is\n%s\nwant\n%s", got, want)
		}
	}
	for text, part := range map[string]string{
		"1s wait 2s":             `want "[time] attempt 1 CODE`,
		"attempt 1 Unavailable":  `"Unavailable" is none of lost, timeout, OK, CANCELLED,`,
		"stop budget_exhausted":  `"budget_exhausted" is none of probe, `,
		"1s /shop.v1.Shop/Check": `want "[time] attempt 1 CODE`,
	} {
		if got := reports(t, func(fake testing.TB) { Record(fake, newRetrier(t)).Want(text) }); !strings.Contains(got, part) {
			t.Errorf("the report on %q is\n%s\nwant one with\n%s", text, got, part)
		}
	}
}

// A hedge that is in flight when another attempt replaces the overdue first one is none that this one has waited for.
func TestAReplacementBesideAHedge(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := NewServer(t, register)
		server.On("/", Hang(), OK().After(time.Minute))
		hedging := grpcretry.Hedging{Delay: grpcretry.HedgeAfter(30 * time.Millisecond), Budget: grpcretry.Unlimited}
		client := clientOf(server.Dial(grpcretry.WithMethod(echoMethod,
			grpcretry.WithAttemptTimeout(60*time.Millisecond), grpcretry.WithHedging(hedging))))
		client.Echo(t.Context(), hello())
		server.Want("attempt 1 timeout; hedge 2 lost; wait backoff; attempt 3 OK")
	})
}

// Nor has it waited for one that fails meanwhile.
func TestAReplacementBesideAHedgeThatFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := NewServer(t, register)
		server.On("/", Hang(), Fail(codes.Unavailable, "").After(20*time.Millisecond), OK())
		hedging := grpcretry.Hedging{Delay: grpcretry.HedgeAfter(50 * time.Millisecond), Budget: grpcretry.Unlimited}
		client := clientOf(server.Dial(grpcretry.WithMethod(echoMethod, grpcretry.WithMaxAttempts(3),
			grpcretry.WithBackoff(grpcretry.Constant(60*time.Millisecond)), grpcretry.WithAttemptTimeout(60*time.Millisecond),
			grpcretry.WithHedging(hedging))))
		client.Echo(t.Context(), hello())
		server.Want("attempt 1 timeout; hedge 2 UNAVAILABLE; wait; attempt 3 OK")
	})
}

// What a timeline prints can be wanted, word for word, whatever has happened.
func TestWhatIsPrintedCanBeWanted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		server := NewServer(t, register)
		server.Next("/", Fail(codes.Unavailable, "").After(time.Second), Cut(), Fail(codes.Unavailable, "").Pushback(7*time.Second),
			Fail(codes.ResourceExhausted, "").RetryInfo(time.Second), Hang().Times(3), Fail(codes.NotFound, ""))
		client := clientOf(server.Dial(generous, grpcretry.WithAttemptTimeout(3*time.Second), grpcretry.WithMaxAttempts(6)))
		for range 4 {
			client.Echo(t.Context(), hello())
		}
		client.Echo(t.Context(), hello(), grpcretry.Disable())
		server.Down()
		client.Echo(t.Context(), hello(), grpcretry.WithMaxElapsed(2*time.Second))
		var wanted []string
		for line := range strings.Lines(server.String()) {
			if strings.HasPrefix(line, "/") {
				wanted = append(wanted, "")
			}
			wanted[len(wanted)-1] += line
		}
		t.Log(server.Calls)
		if len(wanted) != 6 {
			t.Errorf("%d calls, want 6", len(wanted))
		}
		server.Want(wanted...)
	})
}
