package debug

import (
	"context"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// The page shows a function as it shows a method, but says nothing about it that is for RPCs only.
func TestFunctionsAreOnThePage(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := retrier(t)
		p := handler(t, r)
		calls := 0
		err := r.Do(t.Context(), "/sql/orders.read", func(context.Context) error {
			if calls++; calls == 1 {
				return status.Error(codes.Unavailable, "the database is down")
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
		s := getJSON(t, p, "")
		call := s.Calls[0]
		want(t, "the call", []any{call.Target, call.Method, call.Function, call.Outcome, call.Made},
			[]any{"/sql", "/sql/orders.read", true, "recovered", 2})
		text := strings.Join(s.Methods[0].Policy.Text, "\n")
		page := get(t, p, "").Body.String()
		wantIn(t, page, "the database is down")
		for _, part := range []string{"stream", "connection"} {
			if strings.Contains(text, part) {
				t.Errorf("the policy of a function speaks of a %s:\n%s", part, text)
			}
		}
		if strings.Contains(page, "none reached") {
			t.Error("the page says that a function reached no server")
		}
	})
}

// A function and a method of the same name to the same target are two rows.
func TestAFunctionIsNoMethod(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := retrier(t)
		p := handler(t, r)
		dial(t, r, "passthrough:///echo").echo("ok")
		if err := r.Do(t.Context(), echoMethod, func(context.Context) error { return nil }); err != nil {
			t.Error(err)
		}
		want(t, "rows", len(getJSON(t, p, "").Methods), 2)
	})
}
