package grpcretry

import "github.com/grpcretry/grpcretry/internal/tried"

// This file notices calls whose attempts were not distributed by the load-balancing policy of package
// balancer, although the program asks for it on a channel, and no channel has come to use it for that
// reason. gRPC then uses another policy without a word, and nothing here can see which. But the policy
// leaves a trace: the list of the endpoints that the call has tried.

const otherPolicyNote = "the channel's load-balancing policy is not grpcretry_round_robin, so attempts may have gone to one backend again: " +
	"its service config names another policy or none, or it was dialed without balancer.DialOption"

// isDistributedElsewhere reports whether a call made two or more attempts that reached a server, and none of them
// was distributed by the policy that the program asks for.
func (c *call) isDistributedElsewhere() bool {
	if c.cc == nil || !tried.Wanted() {
		return false
	}
	if e := c.newest.extras.Load(); e != nil && !e.tried.IsEmpty() {
		return false
	}
	reached := 0
	for _, a := range c.history.all() {
		if a.Peer != nil {
			reached++
		}
	}
	return reached > 1
}

// warnOfOtherPolicy warns of a channel with another policy, once for each target.
func (r *Retrier) warnOfOtherPolicy(target string) {
	target = cut(target, maxPassedName)
	if r.settings.warnings.otherPolicy.add(target) {
		r.settings.warnings.found("calls to " + target + ": " + otherPolicyNote)
		r.warn()
	}
}
