package main

import (
	"fmt"
	"os"
	"testing"
)

// TestMain is also what a server process does, since the tests start themselves again.
func TestMain(m *testing.M) {
	if address := os.Getenv(addressVariable); address != "" {
		if err := serve(address, os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, "server:", err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}
