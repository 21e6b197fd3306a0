package instruments

import (
	"context"
	"errors"
	"strings"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/grpcretry/grpcretry/internal/bounded"
	"github.com/grpcretry/grpcretry/telemetry"
)

// A Server has the instruments of the server interceptors. The methods of a nil Server do nothing.
type Server struct {
	retries, noRetries metric.Int64Counter

	methods bounded.Map[string, string] // by the name that clients use
}

// MaxServerMethods limits the methods that have series of their own. OpenTelemetry keeps at most 2000 series of a
// metric, and there are two for each method.
const MaxServerMethods = 900

// NewServer returns nil if the provider reports an error, which goes to OpenTelemetry's handler: then nothing is lost
// but the metrics.
func NewServer(mp metric.MeterProvider) *Server {
	meter := mp.Meter(Scope)
	retries, err := meter.Int64Counter(telemetry.MetricServerRetries, metric.WithUnit("{request}"),
		metric.WithDescription("Requests that were retries, or were made for one."))
	noRetries, errToo := meter.Int64Counter(telemetry.MetricServerNoRetries, metric.WithUnit("{response}"),
		metric.WithDescription(`Responses that said "do not retry", because a call made for the request had given up.`))
	if err := errors.Join(err, errToo); err != nil {
		otel.Handle(err)
		return nil
	}
	return &Server{retries: retries, noRetries: noRetries}
}

// Retry counts a request that is retried, by a value of [telemetry.AttrRetriedBy].
func (s *Server) Retry(method, by string) {
	if s != nil {
		s.retries.Add(context.Background(), 1,
			metric.WithAttributes(attribute.String(AttrMethod, s.label(method)), attribute.String(telemetry.AttrRetriedBy, by)))
	}
}

// NoRetry counts a response that says "do not retry".
func (s *Server) NoRetry(method string) {
	if s != nil {
		s.noRetries.Add(context.Background(), 1, metric.WithAttributes(attribute.String(AttrMethod, s.label(method))))
	}
}

// label returns a method as metrics show it. The number of methods is limited, because a server that
// handles unknown methods gets any number of names from its clients.
func (s *Server) label(method string) string {
	known := s.methods.Current()
	if label, isKnown := known[method]; isKnown {
		return label
	}
	if len(known) < MaxServerMethods && len(method) <= MaxName {
		if label, _ := s.methods.Add(strings.Clone(method), MethodName(method), MaxServerMethods); label != "" {
			return label
		}
	}
	return Other
}
