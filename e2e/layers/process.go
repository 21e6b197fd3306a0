package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"time"
)

// An attempt is one that reached D.
type attempt struct {
	at   time.Time
	call int64 // the call's number
}

// A process is a service in a process of its own.
type process struct {
	name     string
	cmd      *exec.Cmd
	commands io.WriteCloser // the standard input of the process
	lines    chan line      // of its output, apart from attempts
	stopping atomic.Bool    // its end is intended

	ended    chan struct{} // closed when it has ended and everything that it wrote has been read
	attempts []attempt     // complete once ended is closed
	exit     error         // likewise: how it ended, nil for the exit status 0
	err      error         // likewise: output that makes no sense
}

// A line is one line of a service's output.
type line struct{ word, value string }

// start starts a service and waits until it listens. If the service ends before it is stopped, its
// end is reported to failed.
func start(ctx context.Context, c *serviceConfig, failed func(error)) (_ *process, address string, err error) {
	config, err := json.Marshal(c)
	if err != nil {
		return nil, "", err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, "", err
	}
	p := &process{name: c.Name, cmd: exec.Command(self), lines: make(chan line, 8), ended: make(chan struct{})}
	p.cmd.Env = append(os.Environ(), serviceVariable+"="+string(config))
	p.cmd.Stderr = os.Stderr
	if p.commands, err = p.cmd.StdinPipe(); err != nil {
		return nil, "", err
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, "", err
	}
	if err := p.cmd.Start(); err != nil {
		return nil, "", fmt.Errorf("starting service %s: %w", p.name, err)
	}
	go p.follow(out, failed)
	address, err = p.await(ctx, "listening")
	if err != nil {
		p.kill()
		return nil, "", err
	}
	return p, address, nil
}

// follow reads what the process writes, until it ends.
func (p *process) follow(out io.Reader, failed func(error)) {
	p.err = p.read(out)
	p.exit = p.cmd.Wait()
	close(p.ended)
	if !p.stopping.Load() {
		failed(p.endedEarly())
	}
}

// endedEarly returns the error for a process that has ended.
func (p *process) endedEarly() error {
	how := "exit status 0"
	if p.exit != nil {
		how = p.exit.Error()
	}
	return fmt.Errorf("service %s ended while it was needed: %s", p.name, how)
}

// read reads all lines, and returns the errors of those that make no sense.
func (p *process) read(out io.Reader) (err error) {
	for scanner := bufio.NewScanner(out); scanner.Scan(); {
		word, value, _ := strings.Cut(scanner.Text(), " ")
		if word != "attempt" {
			select {
			case p.lines <- line{word, value}:
			default:
				err = errors.Join(err, fmt.Errorf("service %s wrote %q unasked", p.name, scanner.Text()))
			}
			continue
		}
		var nanoseconds, call int64
		if _, e := fmt.Sscan(value, &nanoseconds, &call); e != nil {
			err = errors.Join(err, fmt.Errorf("service %s wrote %q: %w", p.name, scanner.Text(), e))
			continue
		}
		p.attempts = append(p.attempts, attempt{time.Unix(0, nanoseconds), call})
	}
	return err
}

// await returns what follows a word, with which the next line begins.
func (p *process) await(ctx context.Context, word string) (string, error) {
	select {
	case l := <-p.lines:
		if l.word != word {
			return "", fmt.Errorf("service %s wrote %q, want %q", p.name, l.word+" "+l.value, word)
		}
		return l.value, nil
	case <-p.ended:
		return "", p.endedEarly()
	case <-ctx.Done():
		return "", context.Cause(ctx)
	}
}

// become puts D into a state and returns the time at which D changed.
func (p *process) become(ctx context.Context, s state) (time.Time, error) {
	if _, err := fmt.Fprintln(p.commands, s); err != nil {
		<-p.ended // nothing else closes its standard input
		return time.Time{}, p.endedEarly()
	}
	value, err := p.await(ctx, string(s))
	if err != nil {
		return time.Time{}, err
	}
	var nanoseconds int64
	if _, err := fmt.Sscan(value, &nanoseconds); err != nil {
		return time.Time{}, fmt.Errorf("service %s wrote that it was %s at %q: %w", p.name, s, value, err)
	}
	return time.Unix(0, nanoseconds), nil
}

// kill ends the process the hard way, and returns when it has ended. A second kill does nothing.
func (p *process) kill() {
	p.stopping.Store(true)
	_ = p.cmd.Process.Kill() // an error says that it has ended
	<-p.ended
	_ = p.commands.Close()
}

// stop ends the process in an orderly way: traces are sent. If that takes too long, stop kills it.
func (p *process) stop() {
	const patience = 10 * time.Second
	p.stopping.Store(true)
	_ = p.commands.Close()
	select {
	case <-p.ended:
	case <-time.After(patience):
		p.kill()
	}
}
