package grpcretry

import (
	"testing"
	"time"
)

// Budget returns the budget of a target's calls, by its canonical name, and follows an Update.
func TestRetrierBudget(t *testing.T) {
	r := retrierOf(t)
	orders := r.budgetOf("/shop.Orders/Put", "dns:///orders")
	if !orders.Withdraw(time.Now()) {
		t.Error("the reserve is empty")
	}
	p := r.drive(t.Context(), "/shop.Orders/Get", "dns:///orders", time.Now())
	if p.plan.ledger.budget != orders {
		t.Error("another call to the target has another budget")
	}
	if got := r.budgetOf("/shop.Orders/Put", "dns:///stock").Balance(time.Now()); got != 3 {
		t.Errorf("balance of another target = %v, want the reserve, 3", got)
	}
	if err := r.Update(WithMethod("/shop.Orders/Put", WithBudget(Unlimited))); err != nil {
		t.Fatal(err)
	}
	if got := r.budgetOf("/shop.Orders/Put", "dns:///orders"); got != Unlimited {
		t.Errorf("budget after an Update = %v, want %v", got, Unlimited)
	}
}
