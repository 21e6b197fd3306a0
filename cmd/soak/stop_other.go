//go:build !unix

package main

import "os"

// suspend and resume do nothing here: processes cannot be stopped on this operating system.
func suspend(*os.Process) error { return nil }
func resume(*os.Process) error  { return nil }
