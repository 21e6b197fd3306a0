package grpcretrytest_test

import (
	"flag"
	"sync"
	"testing"
	"testing/synctest"
)

// run runs a test from within an example, in virtual time. The package testing has no other way to do that: so
// its RunTests is used, for one test, one time, and without the output of -v.
func run(test func(t *testing.T)) {
	for name, value := range map[string]string{"test.v": "false", "test.run": "", "test.skip": "", "test.count": "1"} {
		f := flag.Lookup(name)
		before := f.Value.String()
		f.Value.Set(value)
		defer f.Value.Set(before)
	}
	all := func(string, string) (bool, error) { return true, nil }
	var once sync.Once // RunTests runs a test for each number of processors in -cpu
	testing.RunTests(all, []testing.InternalTest{{Name: "Test", F: func(t *testing.T) { once.Do(func() { synctest.Test(t, test) }) }}})
}
