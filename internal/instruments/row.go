package instruments

import (
	"go.opentelemetry.io/otel/attribute"
	"google.golang.org/grpc/codes"

	"github.com/grpcretry/grpcretry/internal/reasons"
	"github.com/grpcretry/grpcretry/internal/striped"
	"github.com/grpcretry/grpcretry/internal/words"
	"github.com/grpcretry/grpcretry/telemetry"
)

// A Row counts the calls of one method to one target, and their attempts. It is safe for concurrent use.
type Row struct {
	Target, Method string

	FirstTries striped.Counter // calls whose first attempt succeeded; they are counted only here
	Passed     striped.Counter // calls that passed straight through

	counts Counts
}

// NewRow returns a row for a target in canonical form and a method with its leading slash.
func NewRow(target, method string) *Row {
	row := &Row{Target: target, Method: MethodName(method)}
	row.counts.Add(0, rescued, wasted) // shown from the first call on
	return row
}

var (
	rescued = Series{Of: Rescued}
	wasted  = Series{Of: Wasted}

	hedgesWon    = Series{Of: Hedges, Labels: [2]string{"won"}}
	hedgesWasted = Series{Of: Hedges, Labels: [2]string{"wasted"}}
)

// The values of [telemetry.AttrDecision].
const (
	DecisionSuccess = "success"
	DecisionRetry   = "retry"
	DecisionStop    = "stop"
	DecisionLost    = "lost" // in a hedged call, if another attempt was decisive
)

func attemptsBy(code, decision string) Series {
	return Series{Of: Attempts, Labels: [2]string{code, decision}}
}

func callsBy(outcome string) Series { return Series{Of: Calls, Labels: [2]string{outcome}} }

// Succeeded counts an attempt that succeeded, and with it the call, which is none of the FirstTries.
func (row *Row) Succeeded(outcome string, number int, hedge bool) {
	row.counts.Add(1, attemptsBy(words.Code(codes.OK), DecisionSuccess), callsBy(outcome))
	switch {
	case hedge:
		row.hedge(hedgesWon)
	case number > 1:
		row.counts.Add(1, rescued)
	}
}

// Failed counts an attempt that failed. If free, it cost no token, and no server anything.
func (row *Row) Failed(code, decision string, number int, hedge, free bool) {
	row.counts.Add(1, attemptsBy(code, decision))
	switch {
	case free:
	case hedge:
		row.hedge(hedgesWasted)
	case number > 1:
		row.counts.Add(1, wasted)
	}
}

// Lost counts an attempt that was cancelled because another was decisive.
func (row *Row) Lost(hedge bool) {
	row.counts.Add(1, attemptsBy(words.Code(codes.Canceled), DecisionLost))
	if hedge {
		row.hedge(hedgesWasted)
	}
}

// CallFailed counts a call that failed.
func (row *Row) CallFailed(outcome string) { row.counts.Add(1, callsBy(outcome)) }

// hedge adds one to the hedges that have won, or to the others. Both are shown then.
func (row *Row) hedge(result Series) {
	row.counts.Add(0, hedgesWon, hedgesWasted)
	row.counts.Add(1, result)
}

// Report reports every count.
func (row *Row) Report(to *Collection) {
	firstTries := row.FirstTries.Sum()
	more := map[Series]int64{
		callsBy(reasons.FirstTry):                         firstTries,
		attemptsBy(words.Code(codes.OK), DecisionSuccess): firstTries,
	}
	if passed := row.Passed.Sum(); passed > 0 {
		more[Series{Of: Passed}] = passed
	}
	row.counts.Report(to, more, row.Attributes()...)
}

// Attributes returns the row's method and target.
func (row *Row) Attributes() []attribute.KeyValue {
	return []attribute.KeyValue{attribute.String(AttrMethod, row.Method),
		attribute.String(telemetry.AttrTarget, words.Printable(row.Target))}
}
