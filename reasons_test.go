package grpcretry

import (
	"context"
	"errors"
	"go/ast"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/grpcretry/grpcretry/internal/reasons"
	"github.com/grpcretry/grpcretry/internal/reasons/probe"
)

// What handles reasons handles a new one. The packages debug and grpcretrytest test the same.
func TestANewReason(t *testing.T) {
	e := &Error{Last: errUnavailable, Reason: probe.Err}
	if got := (Event{Err: e, Reason: probe.Err}).Outcome(); got != "probe" {
		t.Errorf("outcome is %q, want probe", got)
	}
	if !errors.Is(e, probe.Err) || !strings.Contains(e.Error(), ": a test was curious: ") {
		t.Errorf("the reason is not found in %v", e)
	}
	if outer := (&Error{Last: e, Reason: ErrDeadline}); errors.Is(outer, probe.Err) {
		t.Errorf("another call's reason is found in %v", outer)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(probe.Err)
	if cause := causeOf(ctx); ReasonName(cause) != "cancelled" || errors.Is(cause, probe.Err) {
		t.Errorf("another call's reason is found in the cause %v", cause)
	}
	if gaveUp(probe.Err, true) {
		t.Error("a reason without GivesUp counts as given up")
	}
}

func TestFieldsOfAReason(t *testing.T) {
	if given := (&reasons.Reason{GivesUp: true}); !gaveUp(given, false) {
		t.Error("GivesUp has no effect")
	}
	if late := (&reasons.Reason{OutOfTime: true}); gaveUp(late, false) || !gaveUp(late, true) {
		t.Error("OutOfTime does not depend on whether an attempt has reached a server")
	}
	for _, goOn := range []bool{false, true} {
		p := plan{policy: &policy{}, hedging: true, delay: time.Second, attemptCounts: attemptCounts{open: 1}}
		reason := &reasons.Reason{HedgesGoOn: goOn}
		p.stopStep(verdict{Reason: reason})
		if stopped := p.stopped != nil; stopped == goOn {
			t.Errorf("HedgesGoOn %t: hedging has ended: %t", goOn, stopped)
		}
	}
}

// The README names each exported reason, and docs/services.md those for which a call has given up.
func TestPagesNameEveryReason(t *testing.T) {
	readme, services := readPage(t, "README.md"), readPage(t, "docs/services.md")
	_, services, _ = strings.Cut(services, "A call has *given up* if")
	services, _, _ = strings.Cut(services, "A call has not given up")
	found := 0
	_, files := sources(t, ".")
	for _, file := range files {
		ast.Inspect(file, func(n ast.Node) bool {
			spec, ok := n.(*ast.ValueSpec)
			if !ok || !spec.Names[0].IsExported() || len(spec.Values) != 1 {
				return true
			}
			fields, ok := fieldsOfReason(spec.Values[0])
			if !ok {
				return true
			}
			found++
			name := "`" + spec.Names[0].Name + "`"
			if !strings.Contains(readme, name) {
				t.Errorf("the README does not name %s", name)
			}
			if given := fields["GivesUp"] || fields["OutOfTime"]; given != strings.Contains(services, name) {
				t.Errorf("%s means that a call has given up: %t; docs/services.md says otherwise", name, given)
			}
			return true
		})
	}
	if found < 10 {
		t.Errorf("found %d exported reasons, want at least 10", found)
	}
}

// fieldsOfReason returns the names of the fields that a call of reasons.New sets.
func fieldsOfReason(e ast.Expr) (fields map[string]bool, ok bool) {
	call, ok := e.(*ast.CallExpr)
	if !ok || len(call.Args) != 1 {
		return nil, false
	}
	literal, ok := call.Args[0].(*ast.CompositeLit)
	if !ok {
		return nil, false
	}
	if typ, ok := literal.Type.(*ast.SelectorExpr); !ok || typ.Sel.Name != "Reason" {
		return nil, false
	}
	fields = map[string]bool{}
	for _, element := range literal.Elts {
		if field, ok := element.(*ast.KeyValueExpr); ok {
			fields[field.Key.(*ast.Ident).Name] = true
		}
	}
	return fields, true
}

func readPage(t *testing.T, name string) string {
	t.Helper()
	page, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(page)
}
