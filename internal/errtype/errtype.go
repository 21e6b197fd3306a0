// Package errtype finds an error of a type in a tree of errors.
package errtype

// As is errors.AsType, which Go has only since 1.26. Unlike errors.As it allocates nothing, unless an error of
// the tree has a method As.
func As[E error](err error) (E, bool) {
	var target *E // for methods As
	found, ok := as(err, &target)
	return found, ok
}

func as[E error](err error, target **E) (found E, ok bool) {
	for err != nil {
		if found, ok = err.(E); ok { //nolint:errorlint // this is how the tree is searched
			return found, true
		}
		if own, has := err.(interface{ As(any) bool }); has {
			if *target == nil {
				*target = new(E)
			}
			if own.As(*target) {
				return **target, true
			}
		}
		switch below := err.(type) { //nolint:errorlint // likewise
		case interface{ Unwrap() error }:
			err = below.Unwrap()
		case interface{ Unwrap() []error }:
			for _, each := range below.Unwrap() {
				if found, ok = as(each, target); ok {
					return found, true
				}
			}
			return found, false
		default:
			return found, false
		}
	}
	return found, false
}
