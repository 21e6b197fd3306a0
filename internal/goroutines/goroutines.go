// Package goroutines finds the goroutines that tests leave behind.
package goroutines

import (
	"errors"
	"fmt"
	"os"
	"regexp"
	"runtime"
	"strings"
	"testing"
	"time"
)

// patience is how long goroutines may take to end after a test. A busy machine needs seconds.
const patience = 30 * time.Second

// Main runs the tests, and fails if they leave goroutines behind.
func Main(m *testing.M) {
	code := m.Run()
	if code == 0 {
		if err := Left(nil); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code) //nolint:forbidigo // it is the end of a TestMain
}

// A Set has goroutines by their numbers, which are never used again.
type Set map[string]string // the stacks

// Now returns the goroutines that run now, except the caller's and those of package testing and the runtime.
func Now() Set {
	buffer := make([]byte, 1<<20)
	for {
		n := runtime.Stack(buffer, true)
		if n < len(buffer) {
			return parse(string(buffer[:n]))
		}
		buffer = make([]byte, 2*len(buffer))
	}
}

// Left waits until the only goroutines are those in before. After half a minute it returns an error with
// the stacks of the others.
func Left(before Set) error {
	var left []string
	for end := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) { //nolint:forbidigo // nothing tells when a goroutine ends
		left = left[:0]
		for number, stack := range Now() {
			if _, ok := before[number]; !ok {
				left = append(left, stack)
			}
		}
		switch {
		case len(left) == 0:
			return nil
		case time.Now().After(end):
			return errors.New("goroutines are left:\n" + strings.Join(left, "\n\n"))
		}
	}
}

var (
	head = regexp.MustCompile(`^goroutine (\d+) `)
	// The goroutines that wait for a test or for a signal, and what reads a test's trace or log.
	standard = regexp.MustCompile(`(?m)^(testing\.\(\*[TMF]\)\.(Run|Parallel|Fuzz)|testing\.run[A-Z]\w*|` +
		`os/signal\.(signal_recv|loop)|runtime\.(ensureSigM|ReadTrace))\b`)
)

// parse returns the goroutines of a dump but the first, which is the caller's.
func parse(dump string) Set {
	found := Set{}
	for i, stack := range strings.Split(strings.TrimSpace(dump), "\n\n") {
		if match := head.FindStringSubmatch(stack); i > 0 && match != nil && !standard.MatchString(stack) {
			found[match[1]] = stack
		}
	}
	return found
}
