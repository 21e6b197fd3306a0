//go:build e2e

package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// This file starts programs and sees to it that they end, whatever ends the tests.

// A program is a server that runs until the end of the test.
type program struct {
	name   string
	output *output
	ended  chan struct{} // closed when the process has ended
	err    error         // how, once ended is closed
}

// start runs a program. It is told to end at the end of the test, and killed if it does
// not; where the test process dies first, the kernel kills it.
func start(t *testing.T, name string, args ...string) *program {
	t.Helper()
	p := &program{name: name, output: &output{}, ended: make(chan struct{})}
	cmd := exec.Command(name, args...)
	cmd.Stdout, cmd.Stderr = p.output, p.output
	cmd.Env = append(os.Environ(), "OTEL_TRACES_SAMPLER=always_off") // Jaeger would send traces of itself to port 4317
	cmd.SysProcAttr = dyingWithParent()
	started := make(chan error)
	go func() {
		// The kernel takes the thread for the parent, so it has to live as long.
		runtime.LockOSThread()
		defer close(p.ended)
		err := cmd.Start()
		started <- err
		if err == nil {
			p.err = cmd.Wait()
		}
	}()
	if err := <-started; err != nil {
		t.Fatalf("starting %s: %v", name, err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the end of what %s said:\n%s", name, p.output.tail())
		}
		_ = cmd.Process.Signal(syscall.SIGTERM)
		select {
		case <-p.ended:
		case <-time.After(10 * time.Second):
			t.Errorf("%s did not end within 10 s of SIGTERM", name)
			_ = cmd.Process.Kill()
			<-p.ended
		}
	})
	return p
}

// ready waits until the URL answers with 200.
func (p *program) ready(t *testing.T, url string) {
	t.Helper()
	eventually(t, p.name+" answers "+url, func() error {
		select {
		case <-p.ended:
			t.Fatalf("%s ended: %v; it said\n%s", p.name, p.err, p.output.tail())
		default:
		}
		_, err := get(t.Context(), url)
		return err
	})
}

// eventually tries until it has no error, for at most 30 s.
func eventually(t *testing.T, what string, try func() error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	every := time.NewTicker(50 * time.Millisecond)
	defer every.Stop()
	for {
		err := try()
		if err == nil {
			return
		}
		select {
		case <-ctx.Done():
			t.Fatalf("%s: not within 30 s: %v", what, err)
		case <-every.C:
		}
	}
}

// client keeps no connection open: servers wait for those when they are told to end.
var client = &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 10 * time.Second}

// get returns the body of an answer with the status 200.
func get(ctx context.Context, url string) (body []byte, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, resp.Body.Close()) }()
	body, err = io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", resp.Status, body)
	}
	return body, err
}

// freeAddresses are addresses on the loopback interface that nobody listens on. Their ports are below those that a kernel gives to who asks
// for any: a program may ask for some before it listens on these.
func freeAddresses(t *testing.T, n int) []string {
	t.Helper()
	var addresses []string
	for try := 0; len(addresses) < n; try++ {
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", 10_000+rand.IntN(20_000)))
		if err == nil {
			defer l.Close() // all at once, so that they differ
			addresses = append(addresses, l.Addr().String())
		} else if try == 1000 {
			t.Fatalf("listening on the loopback interface: %v", err)
		}
	}
	return addresses
}

func listen(t *testing.T) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatalf("listening on the loopback interface: %v", err)
	}
	return l
}

// binary is the path of a program that make e2e names in the environment.
func binary(t *testing.T, variable string) string {
	t.Helper()
	path := os.Getenv(variable)
	if path == "" {
		t.Fatalf("%s is not set: run make e2e", variable)
	}
	return path
}

// output is what a program has written. It is safe for concurrent use.
type output struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.Write(p)
}

// tail is the last 20 lines.
func (o *output) tail() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	lines := strings.Split(strings.TrimSpace(o.buf.String()), "\n")
	return strings.Join(lines[max(0, len(lines)-20):], "\n")
}
