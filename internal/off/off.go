// Package off lets package debug see the methods whose calls a Retrier passes straight through:
// no event tells an observer of them.
package off

// A Method is off: its calls make one attempt each.
type Method struct{ Target, Method string }

// Methods returns the methods that were called while somebody observed the retrier, a
// *grpcretry.Retrier, and were passed straight through; at most 100, in no order. Package
// grpcretry sets it.
var Methods func(retrier any) []Method
