package grpcretry

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

func TestObserverSeesEverythingInOrder(t *testing.T) {
	for _, tt := range []struct {
		name   string
		script func(int) answer
		opts   []Option
		cancel time.Duration
		want   []string
	}{
		{name: "success", script: script(ok().after(second)), want: []string{
			"0s attempt_start #1", "1s attempt_end #1 OK in 1s", "1s call_end #1 first_try after 1s"}},
		{name: "recovered", script: script(unavailable().after(second), overloaded().pushback("7000"), ok()), want: []string{
			"0s attempt_start #1", "1s attempt_end #1 UNAVAILABLE in 1s", "1s decision #1 retry after 1s by backoff",
			"2s attempt_start #2", "2s attempt_end #2 RESOURCE_EXHAUSTED in 0s", "2s decision #2 retry after 7s by pushback",
			"9s attempt_start #3", "9s attempt_end #3 OK in 0s",
			"9s call_end #3 recovered after 9s, attempts #1 UNAVAILABLE #2 RESOURCE_EXHAUSTED #3 OK"}},
		{name: "gave up", script: always(unavailable()), opts: []Option{WithMaxAttempts(2)}, want: []string{
			"0s attempt_start #1", "0s attempt_end #1 UNAVAILABLE in 0s", "0s decision #1 retry after 1s by backoff",
			"1s attempt_start #2", "1s attempt_end #2 UNAVAILABLE in 0s", "1s decision #2 stop: exhausted",
			"1s call_end #2 exhausted after 1s, attempts #1 UNAVAILABLE #2 UNAVAILABLE"}},
		{name: "target down", script: always(unavailable()), opts: []Option{WithBudget(stingy{}), WithPatience(5 * second)}, want: []string{
			"0s attempt_start #1", "0s attempt_end #1 UNAVAILABLE in 0s", "0s decision #1 retry after 1s by backoff",
			"5s call_end #1 target_down after 5s"}},
		{name: "cancelled in the wait", script: script(unavailable()), cancel: second / 2, want: []string{
			"0s attempt_start #1", "0s attempt_end #1 UNAVAILABLE in 0s", "0s decision #1 retry after 1s by backoff",
			"500ms call_end #1 cancelled after 500ms"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, tt.script)
				recorder := &eventRecorder{start: server.start}
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				if tt.cancel > 0 {
					time.AfterFunc(tt.cancel, cancel)
				}
				_, err := server.client(t, append([]Option{steady, WithObserver(recorder.observe)}, tt.opts...)...).Echo(ctx, request())
				if !slices.Equal(recorder.lines, tt.want) {
					t.Errorf("events are\n%s\nwant\n%s", strings.Join(recorder.lines, "\n"), strings.Join(tt.want, "\n"))
				}
				last := recorder.last
				if last.Err != err || last.Attempt.Method != "/grpcretry.test.v1.EchoService/Echo" || last.Target != "passthrough:///echo" ||
					last.budget == nil {
					t.Errorf("the last event is %+v, want method, target, budget and the call's error %v", last, err)
				}
				var e *Error
				if errors.As(err, &e) && last.Reason != e.Reason {
					t.Errorf("reason of the last event is %v, want %v", last.Reason, e.Reason)
				}
			})
		})
	}
}

// A server may send megabytes for each attempt, so of very many only the latest are kept, whatever the end of the call.
func TestTheLatestAttemptsAreKept(t *testing.T) {
	for _, last := range []answer{ok(), unavailable()} {
		bubble(t, func(t *testing.T) {
			const made = maxKept + 4
			server := serve(t, func(n int) answer {
				if n < made {
					return unavailable()
				}
				return last
			})
			recorder := &eventRecorder{}
			client := server.client(t, WithBackoff(Constant(second)), WithMaxAttempts(made), WithBudget(Unlimited), WithPatience(time.Hour),
				WithObserver(recorder.observe))
			_, err := client.Echo(t.Context(), request())
			kept := recorder.last.Attempts
			if len(kept) != maxKept || kept[0].Number != made-maxKept+1 || kept[maxKept-1].Number != made {
				t.Errorf("Echo = %v; the end of the call has %d attempts, want the latest %d of %d", err, len(kept), maxKept, made)
			}
		})
	}
}

func TestAttemptShowsHeaderAndTrailerToClassifierAndObservers(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(unavailable().withHeader("k", "head").withTrailer("k", "tail")))
		var seen []Attempt
		client := server.client(t, WithClassifier(func(_ context.Context, a Attempt) Classification {
			seen = append(seen, a)
			return Stop
		}), WithObserver(func(_ context.Context, e Event) {
			if e.Kind == AttemptEnd {
				seen = append(seen, e.Attempt)
			}
		}))
		client.Echo(t.Context(), request())
		if len(seen) != 2 {
			t.Fatalf("%d attempts were shown, want 2", len(seen))
		}
		for _, a := range seen {
			if first(a.Header["k"]) != "head" || first(a.Trailer["k"]) != "tail" || a.Peer == nil {
				t.Errorf("attempt is %+v, want header, trailer and peer", a)
			}
		}
	})
}

// The names may come from others, as those of HTTP requests do.
func TestMethodsWithLongNamesAreNotRemembered(t *testing.T) {
	r := retrierOf(t, Disable(), WithObserver(func(context.Context, Event) {}))
	longest := "/sql/" + strings.Repeat("x", maxPassedName-len("/sql/"))
	for _, name := range []string{longest, longest + "x", longest} {
		if err := r.Do(t.Context(), name, func(context.Context) error { return nil }); err != nil {
			t.Error(err)
		}
	}
	if got := slices.Collect(maps.Keys(r.report.observers.passed.All())); len(got) != 1 || got[0].Method != longest {
		t.Errorf("the methods that passed are %q, want the one with %d bytes", got, maxPassedName)
	}
}

func TestObserveAddsAndTakesAway(t *testing.T) {
	var seen []string
	note := func(name string) func(context.Context, Event) {
		return func(_ context.Context, e Event) { seen = append(seen, name+" "+string(e.Kind)) }
	}
	bubble(t, func(t *testing.T) {
		server := serve(t, always(ok()))
		r := retrierOf(t, WithObserver(note("always")))
		client := echov1.NewEchoServiceClient(server.conn(t, r.DialOptions()...))
		stop := r.report.observers.list.Add(func(ctx context.Context, e Event) {
			if e.Kind == CallEnd {
				note("later")(ctx, e)
			}
		})
		client.Echo(t.Context(), request())
		stop()
		stop() // a second time does nothing
		client.Echo(t.Context(), request())
	})
	once := []string{"always attempt_start", "always attempt_end", "always call_end"}
	if want := append(append(slices.Clone(once), "later call_end"), once...); !slices.Equal(seen, want) {
		t.Errorf("observers saw %q, want %q", seen, want)
	}
}

// The caller's variable has the header of a call that had no observer when it started.
func TestAnObserverThatIsAddedDuringACallSeesTheHeader(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(ok().withHeader("k", "v").after(second)))
		r := retrierOf(t)
		client := echov1.NewEchoServiceClient(server.conn(t, r.DialOptions()...))
		var seen []EventKind
		time.AfterFunc(second/2, func() {
			r.report.observers.list.Add(func(_ context.Context, e Event) {
				if seen = append(seen, e.Kind); first(e.Attempt.Header.Get("k")) != "v" {
					t.Errorf("%s has the header %v", e.Kind, e.Attempt.Header)
				}
			})
		})
		client.Echo(t.Context(), request(), grpc.Header(new(metadata.MD)))
		if want := []EventKind{AttemptEnd, CallEnd}; !slices.Equal(seen, want) {
			t.Errorf("the observer saw %q, want %q", seen, want)
		}
	})
}
