package main

import (
	"os/exec"
	"runtime"
	"syscall"
)

// startWithParent starts a process that the kernel kills when this program ends, however that
// happens. The kernel watches the thread that started the process, so one thread starts all of them.
func startWithParent(cmd *exec.Cmd) error {
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	result := make(chan error)
	starts <- start{cmd, result}
	return <-result
}

type start struct {
	cmd    *exec.Cmd
	result chan<- error
}

var starts = func() chan<- start {
	c := make(chan start)
	go func() {
		runtime.LockOSThread()
		for s := range c {
			s.result <- s.cmd.Start()
		}
	}()
	return c
}()
