package client

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"time"

	"go.opentelemetry.io/contrib/instrumentation/net/http/otelhttp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/examples/production/ops"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// api is the public HTTP API.
type api struct {
	server  echov1.EchoServiceClient
	timeout time.Duration
	log     *slog.Logger
}

func (a *api) routes(telemetry *ops.Telemetry) http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /read", a.handle(a.server.Echo))
	mux.Handle("PUT /value", a.handle(a.server.Put))
	mux.Handle("POST /entries", a.handle(a.server.Append))
	return otelhttp.NewHandler(mux, "http", // the span of the request, above those of its calls
		otelhttp.WithTracerProvider(telemetry.Traces),
		otelhttp.WithMeterProvider(telemetry.Metrics),
		otelhttp.WithPropagators(telemetry.Propagator))
}

type method func(context.Context, *echov1.EchoRequest, ...grpc.CallOption) (*echov1.EchoResponse, error)

func (a *api) handle(call method) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		// The deadline is set once, where the request enters: it limits all calls and attempts below.
		ctx, cancel := context.WithTimeout(r.Context(), a.timeout)
		defer cancel()
		response, err := call(ctx, &echov1.EchoRequest{Message: r.FormValue("message")})
		if err != nil {
			a.fail(ctx, w, err)
			return
		}
		fmt.Fprintln(w, response.GetSequence(), response.GetMessage())
	}
}

// fail logs why, with the trace, and tells the caller as little as necessary.
func (a *api) fail(ctx context.Context, w http.ResponseWriter, err error) {
	fields := []any{"error", err}
	var gaveUp *grpcretry.Error
	if errors.As(err, &gaveUp) {
		fields = append(fields, "reason", gaveUp.Reason)
	}
	a.log.ErrorContext(ctx, "request failed", fields...)

	code := http.StatusBadGateway
	switch status.Code(err) {
	case codes.Unavailable, codes.ResourceExhausted:
		code = http.StatusServiceUnavailable
	case codes.DeadlineExceeded:
		code = http.StatusGatewayTimeout
	}
	http.Error(w, http.StatusText(code), code)
}
