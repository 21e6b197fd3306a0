package sim

import (
	"context"

	"github.com/grpcretry/grpcretry/internal/layers"
)

// layerRules are the measures of a server's interceptor. The rules for the calls that its handlers
// make are in the Plans, which find the Request in their context.
type layerRules struct{ stopCallers, oneAttempt bool }

// request returns what an attempt is to the downstream call made for it; nil without an interceptor.
func (l layerRules) request(of flight) *layers.Request {
	if !l.stopCallers && !l.oneAttempt {
		return nil
	}
	return layers.New(context.Background(), l.oneAttempt && of.retry)
}

// forbidsRetry reports whether the response to a failed request says "do not retry".
func (l layerRules) forbidsRetry(r *layers.Request) bool { return l.stopCallers && r.GaveUp() }
