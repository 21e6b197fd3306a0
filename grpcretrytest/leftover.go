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

// leftover returns the stack of a goroutine that works for a call of this bubble, "" if there is none. Goroutines of
// package context stand for contexts that are derived from a call's and have not been cancelled.
func leftover() string {
	stacks := make([]byte, 1<<20)
	stacks = stacks[:runtime.Stack(stacks, true)]
	own := bubbleOf(string(stacks)) // this goroutine is the first
	for one := range strings.SplitSeq(string(stacks), "\n\n") {
		if bubbleOf(one) != own || strings.Contains(one, "judgeLeftover") {
			continue
		}
		if strings.Contains(one, "grpcretry/grpcretry.(") || strings.Contains(one, "context.(*cancelCtx).propagateCancel.func") {
			return one
		}
	}
	return ""
}

// bubbleOf returns the bubble that the first line of a stack names: "synctest bubble 7]:".
func bubbleOf(stack string) string {
	line, _, _ := strings.Cut(stack, "\n")
	_, bubble, _ := strings.Cut(line, "synctest ")
	return bubble
}
