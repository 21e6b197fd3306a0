//go:build unix

package main

import (
	"os"
	"syscall"
)

// suspend stops a process, and resume has it continue.
func suspend(p *os.Process) error { return p.Signal(syscall.SIGSTOP) }
func resume(p *os.Process) error  { return p.Signal(syscall.SIGCONT) }
