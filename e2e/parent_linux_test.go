//go:build e2e

package e2e

import "syscall"

// dyingWithParent has the kernel kill a program when the thread that started it ends.
func dyingWithParent() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
}
