package explore

import (
	"runtime"
	"strings"

	"github.com/grpcretry/grpcretry/internal/inside"
)

// judgeLeftover checks, a second after the calls have ended and before their contexts do, that the Retrier holds
// nothing of them.
func (o *observation) judgeLeftover() {
	if u := inside.UsageOf(o.retrier); u.WaitingCalls != 0 || u.OpenStreams != 0 || u.ReplayMemory != 0 {
		o.problem("when all calls had ended, %s, %s, and %s in the replay memory",
			count(int(u.WaitingCalls), "call was waiting", "calls were waiting"),
			count(int(u.OpenStreams), "stream was open", "streams were open"), count(int(u.ReplayMemory), "byte was", "bytes were"))
	}
	if left := leftover(); left != "" {
		o.problem("when all calls had ended, and their contexts had not, this goroutine was left:\n%s", left)
	}
}

// leftover returns the stack of a goroutine of this bubble that works for a call, "" if there is none. Goroutines of package context
// stand for contexts that are derived from a call's and have not been cancelled.
func leftover() string {
	stacks := make([]byte, 1<<20)
	stacks = stacks[:runtime.Stack(stacks, true)]
	own, others, _ := strings.Cut(string(stacks), "\n\n") // the caller's comes first
	for one := range strings.SplitSeq(others, "\n\n") {
		if bubbleOf(one) == bubbleOf(own) &&
			(strings.Contains(one, "grpcretry/grpcretry.(") || strings.Contains(one, "context.(*cancelCtx).propagateCancel.func")) {
			return one
		}
	}
	return ""
}

// bubbleOf returns the part of a goroutine's stack that names its bubble: "goroutine 7 [select (durable), synctest bubble 1]:".
func bubbleOf(stack string) string {
	first, _, _ := strings.Cut(stack, "\n")
	_, bubble, _ := strings.Cut(first, "synctest bubble ")
	return bubble
}
