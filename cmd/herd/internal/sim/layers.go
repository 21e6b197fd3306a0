package sim

import (
	"context"

	"github.com/grpcretry/grpcretry/internal/layers"
)

// layerRules are the measures of a server's interceptor. The rules for the calls that its handlers
// make are in the Plans, which find the Request in their context, and so are the headers of an attempt.
type layerRules struct{ layers.Measures }

// request returns the Request that a downstream call sees for an attempt; nil without an interceptor.
func (l layerRules) request(of flight) *layers.Request {
	if !l.StopsCallers && !l.OneAttempt {
		return nil
	}
	return layers.New(context.Background(), l.Limit(of.number > 1, of.mark))
}

// forbidsRetry reports whether the response to a failed request says "do not retry".
func (l layerRules) forbidsRetry(r *layers.Request) bool { return l.StopsCallers && r.GaveUp() }

// markIn returns the mark in a request's header.
func markIn(header map[string]string) layers.Mark {
	if value, ok := header[layers.MarkKey]; ok {
		return layers.MarkOf(value)
	}
	return layers.Unmarked
}
