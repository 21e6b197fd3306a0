package grpcretry

import (
	"context"
	"fmt"
	"log/slog"
	"math"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry/internal/recorded"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// grpc-status may be any int32. A negative one becomes a code over 2^31, which is a negative int on a
// 32-bit machine.
func TestACodeThatNobodyKnowsIsTold(t *testing.T) {
	for _, code := range []codes.Code{17, math.MaxInt32, math.MaxInt32 + 1, math.MaxUint32} {
		t.Run(fmt.Sprint(uint32(code)), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				server := serve(t, script())
				spans := &recorded.Spans{}
				meters := &recorded.Meters{}
				logs := &logRecorder{}
				r := retrierOf(t, steady, WithBudget(Unlimited), WithMaxAttempts(2), WithCallSpan(true), WithTracerProvider(spans),
					WithMeterProvider(meters), WithLogger(slog.New(logs)),
					WithClassifier(func(context.Context, Attempt) Classification { return Retry }))
				// grpc-go's server writes such codes differently on 64-bit machines.
				hostile := func(context.Context, string, any, any, *grpc.ClientConn, grpc.UnaryInvoker, ...grpc.CallOption) error {
					return status.Error(code, "hostile")
				}
				client := echov1.NewEchoServiceClient(server.conn(t, append(r.DialOptions(), grpc.WithChainUnaryInterceptor(hostile))...))
				_, err := client.Echo(t.Context(), request())
				wantStop(t, err, code, ErrAttemptsExhausted, 2)
				name := fmt.Sprintf("CODE(%d)", uint32(code))
				wantLines(t, logs, "DEBUG…code="+name, "WARN…gave up…code="+name)
				want := "rpc.response.status_code=" + name + " grpcretry.attempts=2 grpcretry.reason=exhausted"
				if got := recorded.Text(withoutWaits(spans)[0].Attributes()[2:]); got != want {
					t.Errorf("call span has %s, want %s", got, want)
				}
				wantMetrics(t, meters,
					"grpcretry.attempts 1 grpcretry.decision=retry rpc.response.status_code=OTHER",
					"grpcretry.attempts 1 grpcretry.decision=stop rpc.response.status_code=OTHER",
					"grpcretry.calls 1 grpcretry.outcome=exhausted",
					"grpcretry.target.failing 1",
					"grpcretry.wait.duration 1/1s grpcretry.wait_source=backoff",
					"grpcretry.wasted_attempts 1")
			})
		})
	}
}
