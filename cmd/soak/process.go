package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
)

// A process is a server or a client: this program, started again with a configuration in its
// environment. It obeys lines on its standard input, and ends when that does.
type process struct {
	name     string
	cmd      *exec.Cmd
	commands io.WriteCloser
	lines    chan line     // of its output; closed at the end of that
	ended    chan struct{} // closed when the process has ended, and everything that it wrote was read
	expected atomic.Bool   // its end is
	exit     error         // how it ended, once ended is closed
}

// A line is one line of a process's output.
type line struct{ word, value string }

// Variables with the configurations of child processes.
const (
	serverVariable = "GRPCRETRY_SOAK_SERVER"
	clientVariable = "GRPCRETRY_SOAK_CLIENT"
)

// startProcess starts a process. An end that is not expected is reported to failed.
func startProcess(name, variable string, config any, failed func(error)) (*process, error) {
	text, err := json.Marshal(config)
	if err != nil {
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	p := &process{name: name, cmd: exec.Command(self), lines: make(chan line, 1024), ended: make(chan struct{})}
	p.cmd.Env = append(os.Environ(), variable+"="+string(text))
	p.cmd.Stderr = os.Stderr
	if p.commands, err = p.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := startWithParent(p.cmd); err != nil {
		return nil, fmt.Errorf("starting %s: %w", name, err)
	}
	go p.follow(out, failed)
	return p, nil
}

// follow reads what the process writes, until it ends.
func (p *process) follow(out io.Reader, failed func(error)) {
	scanner := bufio.NewScanner(out)
	scanner.Buffer(nil, 1<<20)
	for scanner.Scan() {
		word, value, _ := strings.Cut(scanner.Text(), " ")
		p.lines <- line{word, value}
	}
	close(p.lines)
	p.exit = p.cmd.Wait()
	close(p.ended)
	if !p.expected.Load() {
		failed(fmt.Errorf("%s ended while it was needed: %w", p.name, p.end()))
	}
}

// end says how the process has ended.
func (p *process) end() error {
	if p.exit == nil {
		return errors.New("exit status 0")
	}
	return p.exit
}

// await returns what follows a word, with which the next line begins.
func (p *process) await(ctx context.Context, word string) (string, error) {
	select {
	case l, ok := <-p.lines:
		if !ok {
			<-p.ended
			return "", fmt.Errorf("%s has ended: %w", p.name, p.end())
		}
		if l.word != word {
			return "", fmt.Errorf("%s wrote %q, want %q", p.name, l.word+" "+l.value, word)
		}
		return l.value, nil
	case <-ctx.Done():
		return "", context.Cause(ctx)
	}
}

// tell writes a line to the process.
func (p *process) tell(format string, args ...any) error {
	_, err := fmt.Fprintf(p.commands, format+"\n", args...)
	return err
}

// kill ends the process the hard way, and returns when it has ended. A second kill does nothing.
func (p *process) kill() {
	p.expected.Store(true)
	_ = p.cmd.Process.Kill() // an error says that it has ended
	<-p.ended
	_ = p.commands.Close()
}

// freeAddresses returns loopback addresses on which nobody listens. Their ports lie below those that
// systems choose for outgoing connections: otherwise a client that reconnects may be given the port
// of a server that is away.
func freeAddresses(n int) ([]string, error) {
	const lowest, highest, tries = 20000, 32000, 1000
	var addresses []string
	port := lowest + rand.IntN(highest-lowest)
	for range tries {
		if len(addresses) == n {
			return addresses, nil
		}
		if port++; port >= highest {
			port = lowest
		}
		l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port))
		if err != nil {
			continue
		}
		addresses = append(addresses, l.Addr().String())
		if err := l.Close(); err != nil {
			return nil, err
		}
	}
	return nil, fmt.Errorf("no %d free ports from %d to %d in %d tries", n, lowest, highest, tries)
}
