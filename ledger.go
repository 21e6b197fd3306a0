package grpcretry

import "time"

// A ledger knows which budget has paid for each attempt of a call. It takes the tokens, and reports to the
// budgets how the attempts end.
type ledger struct {
	budget      Budget
	hedges      Budget    // which hedges spend from; nil if the policy allows none
	now         time.Time // of the latest decision, for the budgets
	paidForNext payer     // who has paid for the attempt that is sent next
	helped      bool      // the attempt whose slot was given back has helped, so that it has given back its token, too

	payers      []payer // of the attempts, from the first; nil if the policy allows no hedges
	freeAttempt int32   // the number of the attempt that no budget has paid for; 0 before there is one
	released    int32   // the number of the latest attempt whose slot was given back, or taken over, before its end; 0 for none
}

// A payer is the budget that has paid for an attempt.
type payer uint8

const (
	nobodyPays payer = iota // the first attempt that reaches a server is free
	retriesPay
	hedgesPay
)

// noted takes note of the time of a decision, and returns it.
func (l *ledger) noted(now time.Time) instant {
	l.now = now
	return instantOf(now)
}

// budgetOf returns the budget that a payer stands for.
func (l *ledger) budgetOf(p payer) Budget {
	switch p {
	case hedgesPay:
		return l.hedges
	case retriesPay:
		return l.budget
	default:
		return Unlimited
	}
}

// whoPays returns who pays for an attempt sent now: p, unless it is free because no attempt before it has
// reached a server.
func (l *ledger) whoPays(p payer) payer {
	if l.freeAttempt == 0 {
		return nobodyPays
	}
	return p
}

// retryBudget returns the budget that would pay for a retry now.
func (l *ledger) retryBudget() Budget { return l.budgetOf(l.whoPays(retriesPay)) }

// take takes a token for the attempt that is sent next. It returns false if there is none, or if the server's
// throttle allows no hedges. An attempt that replaces another one takes over its slot.
func (l *ledger) take(p payer, replaces int32) bool {
	p = l.whoPays(p)
	if p == hedgesPay && isThrottled(l.budget) {
		return false
	}
	takesOver := l.holdsSlot(replaces, p)
	if !takeFrom(l.budgetOf(p), l.now, takesOver) {
		return false
	}
	l.paidForNext = p
	if takesOver {
		l.released = replaces
	}
	return true
}

// holdsSlot reports whether an attempt was paid for by p, and has not given its slot back.
func (l *ledger) holdsSlot(number int32, p payer) bool {
	return p != nobodyPays && l.payerOf(number) == p && l.released != number
}

// giveBack returns the token of an attempt that is not sent after all.
func (l *ledger) giveBack(number int32) {
	paid := l.paidForNext
	l.paidForNext = nobodyPays // before the budget is called, which may panic
	l.budgetOf(paid).Deposit(Outcome{Attempt: int(number), Result: Unsent})
}

// sent records that an attempt is sent.
func (l *ledger) sent(number int32) {
	paid := l.paidForNext
	l.paidForNext = nobodyPays
	if paid == nobodyPays {
		l.freeAttempt = number
	}
	if l.hedges != nil {
		l.payers = append(l.payers, paid)
	}
}

// payerOf returns who has paid for an attempt that was sent.
func (l *ledger) payerOf(number int32) payer {
	switch {
	case l.freeAttempt == number, number == 0:
		return nobodyPays
	case int(number) <= len(l.payers):
		return l.payers[number-1]
	default:
		return retriesPay
	}
}

// release gives back what a committed stream does not need for the rest of its life, however that ends: the slot in a budget that limits
// the retries in flight and, if the retry has helped, the token of a ratio budget.
func (l *ledger) release(number int32, helped bool) {
	payer := l.payerOf(number)
	if !l.holdsSlot(number, payer) {
		return
	}
	l.released, l.helped = number, helped && payer == retriesPay
	release(l.budgetOf(payer), l.helped)
}

// deposit reports to the budgets how an attempt ended. A budget that has not paid for the attempt
// sees it as a first attempt.
func (l *ledger) deposit(o Outcome) {
	number := int32(o.Attempt)
	payer := l.payerOf(number)
	if o.Result == Unsent && l.freeAttempt == number {
		l.freeAttempt = 0
	}
	if l.hedges != nil {
		defer tell(l.hedges, o, payer == hedgesPay, l.released == number, false) // also if the other budget panics
	}
	tell(l.budget, o, payer == retriesPay, l.released == number, l.helped)
}

// tell tells a budget how an attempt ended, for which it has paid or not.
func tell(b Budget, o Outcome, paid, released, helped bool) {
	if !paid {
		o.Attempt = 1
	}
	depositIn(b, o, released && paid, helped)
}
