package errtype

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"testing"
)

// foreign says that it is an *fs.PathError, by a method.
type foreign struct{ error }

func (foreign) As(target any) bool {
	path, ok := target.(**fs.PathError)
	if ok {
		*path = &fs.PathError{Op: "foreign"}
	}
	return ok
}

func TestAs(t *testing.T) {
	path := &fs.PathError{Op: "open", Err: io.EOF}
	for name, err := range map[string]error{
		"nil":            nil,
		"another type":   io.EOF,
		"itself":         path,
		"wrapped":        fmt.Errorf("a: %w", fmt.Errorf("b: %w", path)),
		"second":         errors.Join(io.EOF, fmt.Errorf("a: %w", path)),
		"first of two":   errors.Join(path, &fs.PathError{}),
		"by its method":  foreign{io.EOF},
		"below a method": fmt.Errorf("%w, %w", io.EOF, foreign{io.EOF}),
		"wraps nil":      fmt.Errorf("%w", error(nil)),
	} {
		var want *fs.PathError
		wantOK := errors.As(err, &want)
		got, ok := As[*fs.PathError](err)
		if ok != wantOK || (ok && got.Op != want.Op) {
			t.Errorf("%s: As = %v, %v, want %v, %v", name, got, ok, want, wantOK)
		}
	}
	if _, ok := As[interface {
		error
		Timeout() bool
	}](fmt.Errorf("a: %w", path)); !ok {
		t.Error("an interface is not found")
	}
	wrapped := fmt.Errorf("a: %w", io.EOF)
	if got := testing.AllocsPerRun(100, func() { As[*fs.PathError](wrapped) }); got != 0 {
		t.Errorf("%v allocations, want none", got)
	}
}
