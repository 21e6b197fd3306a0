//go:build unix

package bench

import (
	"syscall"
	"time"
)

// cpuTime is what this process has used, in user mode and in the kernel.
func cpuTime() time.Duration {
	var used syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &used); err != nil {
		return 0
	}
	return time.Duration(used.Utime.Nano() + used.Stime.Nano())
}
