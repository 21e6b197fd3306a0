//go:build e2e && !linux

package e2e

import "syscall"

// dyingWithParent is for Linux; elsewhere a killed test leaves its programs behind.
func dyingWithParent() *syscall.SysProcAttr { return nil }
