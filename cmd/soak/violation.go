package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
)

// A violation is a broken promise. All processes append violations to one file, one line each.
type violation struct {
	Who      string // the process that found it
	Call     string // the call's ID, empty if it is not about one call
	Kind     string `json:",omitempty"` // of the call
	What     string
	Timeline string `json:",omitempty"`
	Seed     uint64
}

func violationsFile(dir string) string { return filepath.Join(dir, "violations") }

// report appends a violation to the file.
func (v violation) report(dir string) {
	line, err := json.Marshal(v)
	if err == nil {
		err = appendLine(violationsFile(dir), line)
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "soak: cannot write down a violation: %v\n%v\n", err, v)
	}
}

func appendLine(name string, line []byte) (err error) {
	file, err := os.OpenFile(name, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = file.Write(append(line, '\n'))
	if e := file.Close(); err == nil {
		err = e
	}
	return err
}

// String describes the violation to the reader of a failed run.
func (v violation) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "VIOLATION, found by %s, seed %d", v.Who, v.Seed)
	if v.Call != "" {
		fmt.Fprintf(&b, ", call %s", v.Call)
	}
	if v.Kind != "" {
		fmt.Fprintf(&b, " (%s)", v.Kind)
	}
	fmt.Fprintf(&b, ":\n  %s\n", strings.ReplaceAll(v.What, "\n", "\n  "))
	if v.Timeline != "" {
		fmt.Fprintf(&b, "  timeline:\n    %s\n", strings.ReplaceAll(strings.TrimSpace(v.Timeline), "\n", "\n    "))
	}
	return b.String()
}

// A violationReader returns the violations that have been written since the last time.
type violationReader struct {
	dir  string
	read int64
}

func (r *violationReader) next() ([]violation, error) {
	file, err := os.Open(violationsFile(r.dir))
	if os.IsNotExist(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer file.Close()
	if _, err := file.Seek(r.read, io.SeekStart); err != nil {
		return nil, err
	}
	content, err := io.ReadAll(file)
	if err != nil {
		return nil, err
	}
	whole := content[:strings.LastIndexByte(string(content), '\n')+1]
	r.read += int64(len(whole))
	var found []violation
	for line := range strings.Lines(string(whole)) {
		var v violation
		if err := json.Unmarshal([]byte(line), &v); err != nil {
			return found, fmt.Errorf("the line %q in %s: %w", line, violationsFile(r.dir), err)
		}
		found = append(found, v)
	}
	return found, nil
}
