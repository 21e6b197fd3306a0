package reconcile_test

import (
	"cmp"
	"testing"
	"time"

	"go.uber.org/goleak"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/grpcretry/grpcretry"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const name = "/reconcile/orders"

func newRetrier(t testing.TB, opts ...grpcretry.Option) *grpcretry.Retrier {
	t.Helper()
	r, err := grpcretry.New(opts...)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func ratio(t testing.TB, ratio, reserve float64) grpcretry.Budget {
	t.Helper()
	b, err := grpcretry.NewRatioBudget(grpcretry.RatioBudget{
		Ratio: cmp.Or(ratio, grpcretry.Nothing), Reserve: cmp.Or(reserve, grpcretry.Nothing),
	})
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// doubling is a backoff without jitter: 100 ms, 200 ms, 400 ms.
var doubling = grpcretry.Exponential{Base: 100 * time.Millisecond, Max: time.Minute, Multiplier: 2, Jitter: grpcretry.NoJitter}

func statusError(code codes.Code, retryAfter time.Duration) error {
	st := status.New(code, "the server's words")
	if retryAfter > 0 {
		st, _ = st.WithDetails(&errdetails.RetryInfo{RetryDelay: durationpb.New(retryAfter)})
	}
	return st.Err()
}
