package debug

import (
	"testing"

	"google.golang.org/grpc/codes"

	"github.com/grpcretry/grpcretry"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// A method that is off is shown as that: else its absence could mean that nobody calls it.
func TestMethodsThatAreOffAreShown(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := retrier(t, grpcretry.WithMethod(echov1.EchoService_Put_FullMethodName, grpcretry.Disable()))
		page := handler(t, r)
		c := dial(t, r, "passthrough:///echo")
		want(t, "code", c.echo("ok"), codes.OK)
		want(t, "code of a call that is off by itself", c.echo("ok", grpcretry.Disable()), codes.OK)
		for range 3 {
			if _, err := c.Put(t.Context(), &echov1.EchoRequest{Message: "ok"}); err != nil {
				t.Fatal(err)
			}
		}
		var got []string
		for _, m := range page.Snapshot().Methods {
			line := m.Target + " " + m.Method
			if m.Off {
				line += " off: " + m.Policy.Text[0]
			}
			got = append(got, line)
		}
		want(t, "methods", got, []string{
			"passthrough:///echo " + echoMethod,
			"passthrough:///echo " + echov1.EchoService_Put_FullMethodName + " off: off: every call makes one attempt, and passes straight through",
		})
		wantIn(t, get(t, page, "").Body.String(),
			`<td role="cell" colspan="7" class="quiet">off: every call makes one attempt, and passes straight through</td>`)
		want(t, "filtered", len(getJSON(t, page, "method="+echoMethod).Methods), 1)
	})
}

func TestMethodsThatAreOffAreLimited(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := retrier(t, grpcretry.Disable())
		page := handler(t, r)
		c := dial(t, r, "passthrough:///echo")
		for i := range 2 * maxRows {
			_ = c.Invoke(t.Context(), "/proxy.Service/"+string(rune('a'+i)), &echov1.EchoRequest{}, &echov1.EchoResponse{})
		}
		want(t, "methods", len(page.Snapshot().Methods), maxRows)
	})
}
