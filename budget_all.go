package grpcretry

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/grpcretry/grpcretry/internal/window"
)

// This file has [AllBudgets], and what is asked of a budget that may be several.

// AllBudgets returns a budget that allows a retry only if every one of the budgets does. It takes
// a token from all of them or from none: if one refuses, those that were asked before it receive a
// Deposit with [Unsent], which returns their tokens. Budgets of other packages are asked first, each kind in the order
// given. AllBudgets() never refuses a retry. [New] rejects a nil budget.
func AllBudgets(b ...Budget) Budget {
	all := &allBudgets{}
	for _, b := range b {
		if inner, ok := b.(*allBudgets); ok {
			all.budgets = append(all.budgets, inner.budgets...)
		} else {
			all.budgets = append(all.budgets, b)
		}
	}
	all.asked = slices.Clone(all.budgets)
	slices.SortStableFunc(all.asked, func(a, b Budget) int { return rankOfBudget(a) - rankOfBudget(b) })
	return all
}

type allBudgets struct {
	budgets []Budget
	asked   []Budget // the same, those of other packages first: they may panic, or take long, and then none of ours has been asked
}

// rankOfBudget is 1 for this package's budgets that hold tokens.
func rankOfBudget(b Budget) int {
	switch b.(type) {
	case *ratioBudget, *rateBudget, *throttle, *concurrencyBudget:
		return 1
	default:
		return 0
	}
}

// String describes the budgets to readers of a policy.
func (all *allBudgets) String() string {
	names := make([]string, len(all.budgets))
	for i, b := range all.budgets {
		names[i] = fmt.Sprintf("%T", b) // its fields are not ours to read
		if s, ok := b.(fmt.Stringer); ok {
			names[i] = s.String()
		}
	}
	return strings.Join(names, " and ")
}

func (all *allBudgets) Deposit(o Outcome) { depositIn(all, o, false, false) }

func (all *allBudgets) Withdraw(now time.Time) bool { return all.withdraw(now, false) }

func (all *allBudgets) withdraw(now time.Time, insteadOfOne bool) bool {
	for i, b := range all.asked {
		if !takeFrom(b, now, insteadOfOne) {
			depositIn(&allBudgets{asked: all.asked[:i]}, returned, insteadOfOne, false)
			return false
		}
	}
	return true
}

func (all *allBudgets) Balance(now time.Time) float64 {
	least := math.Inf(1)
	for _, b := range all.budgets {
		least = min(least, b.Balance(now))
	}
	return least
}

func (all *allBudgets) check() error {
	for i, b := range all.budgets {
		if err := checkGiven("budget", b); err != nil {
			return fmt.Errorf("AllBudgets, number %d: %w", i+1, err)
		}
		if _, ok := b.(*perTarget); ok {
			return fmt.Errorf("AllBudgets, number %d: PerTarget would be one budget for all targets here, put AllBudgets into PerTarget", i+1)
		}
	}
	return nil
}

// partsOf returns the budgets that b combines, in the order in which they are asked: itself, if it is no allBudgets.
func partsOf(b Budget) []Budget {
	if all, ok := b.(*allBudgets); ok {
		return all.asked
	}
	return []Budget{b}
}

// hasSlots reports whether b limits the retries in flight. A new kind of budget must be added to rankOfBudget; also here, to release and
// to depositIn if a retry holds something of it while in flight, to isThrottled if calls do not wait for its tokens, and to neverAllows if
// some settings allow nothing.
func hasSlots(b Budget) bool {
	_, has := b.(*concurrencyBudget)
	return has
}

// release gives back the slot of a retry whose stream is committed, if b has slots: the retry no longer counts as in
// flight, although its attempt has not ended. If it has helped, it gives back the token of a ratio budget, too.
func release(b Budget, helped bool) {
	for _, one := range partsOf(b) {
		switch one := one.(type) {
		case *concurrencyBudget:
			one.inUse.Add(-1)
		case *ratioBudget:
			if helped {
				one.tokens.Return()
			}
		}
	}
}

// depositIn reports to b how an attempt ended; released means that its slot was given back before and, if it has helped, its token. This
// package's budgets come first, so that they learn of it although another one panics.
func depositIn(b Budget, o Outcome, released, helped bool) {
	for _, one := range slices.Backward(partsOf(b)) {
		_, isRatio := one.(*ratioBudget)
		switch {
		case released && hasSlots(one):
		case released && helped && isRatio:
			unpaid := o
			unpaid.Attempt = 1
			one.Deposit(unpaid)
		default:
			one.Deposit(o)
		}
	}
}

// affords reports whether b would allow a retry now; insteadOfOne means that the retry may have the slot of the one that
// it replaces.
func affords(b Budget, now time.Time, insteadOfOne bool) bool {
	return !slices.ContainsFunc(partsOf(b), func(one Budget) bool {
		return !(insteadOfOne && hasSlots(one) || one.Balance(now) >= window.Whole)
	})
}

// scarceTokens returns the fewest tokens of the ratio budgets without a floor in b; false if there are none. Time does not refill them, and
// retries that succeed give them back. So they are kept for an absent target, and waited for, see WithPatience.
func scarceTokens(b Budget, now time.Time) (tokens float64, are bool) {
	tokens = math.Inf(1)
	for _, one := range partsOf(b) {
		if ratio, is := one.(*ratioBudget); is && ratio.settings.MinPerSecond == 0 {
			tokens, are = min(tokens, ratio.Balance(now)), true
		}
	}
	return tokens, are
}

// takeFrom takes a token from b; insteadOfOne means that the retry takes over the slot of the one that it
// replaces, which no other retry can get in between.
func takeFrom(b Budget, now time.Time, insteadOfOne bool) bool {
	if all, ok := b.(*allBudgets); ok {
		return all.withdraw(now, insteadOfOne)
	}
	return insteadOfOne && hasSlots(b) || b.Withdraw(now)
}

// isThrottled reports whether a throttle refuses retries. A6 ends a throttled call immediately, so
// calls do not wait for it. They wait for any other budget.
func isThrottled(b Budget) bool {
	return slices.ContainsFunc(partsOf(b), func(one Budget) bool {
		t, is := one.(*throttle)
		return is && !t.allows()
	})
}
