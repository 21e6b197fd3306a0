package grpcretrytest

import (
	"runtime"
	"strings"
)

// judgeLeftover checks, a second after the calls have ended and before their contexts do, that the Retrier holds
// nothing of them.
func (o *observation) judgeLeftover() {
	if u := o.retrier.Usage(); u.WaitingCalls != 0 || u.OpenStreams != 0 || u.ReplayMemory != 0 {
		o.problem("when all calls had ended, %s, %s, and %s in the replay memory", count(int(u.WaitingCalls), "call was waiting", "calls were waiting"),
			count(int(u.OpenStreams), "stream was open", "streams were open"), count(int(u.ReplayMemory), "byte was", "bytes were"))
	}
	if left := leftover(); left != "" {
		o.problem("when all calls had ended, and their contexts had not, this goroutine was left:\n%s", left)
	}
}

// leftover returns the stack of a goroutine that works for a call, "" if there is none. Goroutines of package context
// stand for contexts that are derived from a call's and have not been cancelled. A bubble that has ended may have left
// goroutines of its own, so only those of this bubble count.
func leftover() string {
	stacks := make([]byte, 1<<20)
	own, others, _ := strings.Cut(string(stacks[:runtime.Stack(stacks, true)]), "\n\n")
	bubble := bubbleOf(own)
	for one := range strings.SplitSeq(others, "\n\n") {
		works := strings.Contains(one, "grpcretry/grpcretry.(") || strings.Contains(one, "context.(*cancelCtx).propagateCancel.func")
		if works && bubbleOf(one) == bubble {
			return one
		}
	}
	return ""
}

// bubbleOf returns the bubble that the first line of a goroutine's stack names, such as "synctest bubble 5]:".
func bubbleOf(stack string) string {
	first, _, _ := strings.Cut(stack, "\n")
	_, bubble, _ := strings.Cut(first, "synctest bubble ")
	return bubble
}
