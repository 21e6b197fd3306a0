package grpcretry

import (
	"context"
	"errors"
	"fmt"
	"reflect"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// readable returns err, or an error that stands for it if its methods panic, as those of a nil
// pointer in an error may. gRPC does not call them; the rules and the telemetry do.
func readable(err error) (safe error) {
	if err == nil || reflect.TypeOf(err) == statusType && !reflect.ValueOf(err).IsNil() {
		return err
	}
	defer func() {
		if recover() != nil {
			safe = &unreadableError{err}
		}
	}()
	_, _ = status.FromError(err)
	_ = errors.Is(err, context.Canceled)
	_ = isPermanent(err)
	_ = err.Error()
	return err
}

var statusType = reflect.TypeOf(status.Error(codes.Unknown, ""))

// An unreadableError stands for an error whose methods panic. errors.Is and errors.As find that
// as far as they can do so without calling it.
type unreadableError struct{ err error }

func (e *unreadableError) Error() string {
	return fmt.Sprintf("grpcretry: an error of type %T, whose methods panic", e.err)
}

func (e *unreadableError) Is(target error) bool {
	return reflect.TypeOf(target) == reflect.TypeOf(e.err) && reflect.TypeOf(target).Comparable() && target == e.err
}

func (e *unreadableError) As(target any) bool {
	into := reflect.ValueOf(target).Elem()
	if into.Type() != reflect.TypeOf(e.err) {
		return false
	}
	into.Set(reflect.ValueOf(e.err))
	return true
}
