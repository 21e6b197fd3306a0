// Package probe adds a reason to the tests that import it. They check that whatever handles reasons
// handles one that it has never heard of.
package probe

import "github.com/grpcretry/grpcretry/internal/reasons"

// Err is the reason.
var Err = reasons.New(reasons.Reason{Word: "probe", Text: "a test was curious"})
