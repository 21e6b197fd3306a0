package main

import (
	"strings"
	"testing"
	"time"

	"github.com/grpcretry/grpcretry"
)

func TestPlantedViolationsInBudgets(t *testing.T) {
	settings := grpcretry.RatioBudget{Ratio: 0.01, Reserve: 3, Window: time.Second}
	ratio, err := grpcretry.NewRatioBudget(settings)
	if err != nil {
		t.Fatal(err)
	}
	broken := newCounted(grpcretry.Unlimited)
	broken.Withdraw(time.Now())
	for _, tt := range []struct {
		name    string
		audit   audit
		atEnd   bool
		retried int64
		want    string
	}{
		{"ratio, within", ratioAudit(settings, ratio), false, workers + 13, ""},
		{"ratio, beyond", ratioAudit(settings, ratio), false, workers + 14, "retries were spent and not returned"},
		{"rate, within", rateAudit(1, 10), false, workers + 10, ""},
		{"rate, beyond", rateAudit(1, 10), false, workers + 12, "and the rate allows"},
		{"throttle, within", throttleAudit(20, 0.05), false, workers + 60, ""},
		{"throttle, beyond", throttleAudit(20, 0.05), false, workers + 61, "and the throttle allows"},
		{"a retry that has not ended", broken.audit, false, 0, ""},
		{"a retry that never ended", broken.audit, true, 0, "1 retries were taken from the budget, and 0 ended"},
		{"tokens that were lost", restored(newCounted(lost{}), 3), true, 0, "the balance is 0"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := &profile{}
			p.keep()
			p.retried.Store(tt.retried)
			p.answered.Store(1000)
			p.keep()
			if got := tt.audit(p, tt.atEnd); !strings.Contains(got, tt.want) || tt.want == "" && got != "" {
				t.Errorf("audit = %q, want %q", got, tt.want)
			}
		})
	}
}

// A lost budget has lost its tokens.
type lost struct{ grpcretry.Budget }

func (lost) Deposit(grpcretry.Outcome) {}
func (lost) Balance(time.Time) float64 { return 0 }
