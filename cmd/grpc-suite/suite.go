package main

import (
	"bytes"
	"context"
	_ "embed"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

const (
	grpcModule    = "google.golang.org/grpc"
	libraryModule = "github.com/grpcretry/grpcretry"
	plain         = "plain" // the mode without the library
)

// suites are the packages of grpc-go that are run, each with the packages below it.
var suites = []string{"test", "interop", "stats", "encoding", "health", "orca", "binarylog", "authz"}

var (
	//go:embed testdata/install.go
	installer []byte
	//go:embed testdata/installed_test.go
	installedTest []byte
)

// A suite is a copy of grpc-go's source with the library installed.
type suite struct {
	dir       string // of the copy
	version   string
	packages  []string // import paths of those that have tests
	testFlags []string
}

// newSuite makes the copy: in dir or, if that is empty, in a temporary folder.
func newSuite(ctx context.Context, library, dir string, packages []string) (_ *suite, err error) {
	library, err = filepath.Abs(library)
	if err != nil {
		return nil, err
	}
	var module struct{ Dir, Version string }
	listed, err := goCommand(ctx, library, nil, "mod", "download", "-json", grpcModule)
	if err != nil {
		return nil, err
	}
	if err := json.Unmarshal(listed, &module); err != nil {
		return nil, fmt.Errorf("go mod download -json: %w", err)
	}
	s := &suite{dir: dir, version: module.Version}
	if dir == "" {
		s.dir, err = os.MkdirTemp("", "grpc-suite-")
		defer func() {
			if err != nil {
				os.RemoveAll(s.dir)
			}
		}()
	} else {
		s.dir, err = filepath.Abs(dir)
	}
	if err != nil {
		return nil, err
	}
	if err := s.copy(module.Dir); err != nil {
		return nil, err
	}
	if err := s.install(ctx, library, packages); err != nil {
		return nil, err
	}
	return s, nil
}

// copy fills the suite's folder with the source, which in the module cache is read-only. A
// folder that holds an earlier copy is emptied first, but only that.
func (s *suite) copy(source string) error {
	entries, err := os.ReadDir(s.dir)
	if err == nil && len(entries) > 0 {
		if _, err := os.Stat(filepath.Join(s.dir, "internal", "grpcsuite")); err != nil {
			return fmt.Errorf("%s is neither empty nor an earlier copy", s.dir)
		}
		if err := os.RemoveAll(s.dir); err != nil {
			return err
		}
	}
	return os.CopyFS(s.dir, os.DirFS(source))
}

// install adds the library to the copy. The module that the library depends on is then the
// copy itself, so both use the same gRPC.
func (s *suite) install(ctx context.Context, library string, packages []string) error {
	_, err := goCommand(ctx, s.dir, nil, "mod", "edit",
		"-require="+libraryModule+"@v0.0.0", "-replace="+libraryModule+"="+library)
	if err != nil {
		return err
	}
	installed := filepath.Join(s.dir, "internal", "grpcsuite")
	if err := os.MkdirAll(installed, 0o777); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(installed, "install.go"), installer, 0o666); err != nil {
		return err
	}
	patterns := make([]string, len(packages))
	for i, p := range packages {
		patterns[i] = "./" + p + "/..."
	}
	// -mod=mod completes go.mod and go.sum.
	out, err := goCommand(ctx, s.dir, nil, append([]string{"list", "-mod=mod", "-f",
		`{{if or .TestGoFiles .XTestGoFiles}}{{.ImportPath}} {{.Name}} {{.Dir}}{{end}}`}, patterns...)...)
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(out)) {
		path, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
		name, dir, _ := strings.Cut(rest, " ")
		// An external test package can be added to any package, whether the library imports
		// that or not.
		test := bytes.Replace(installedTest, []byte("package suite_test"), []byte("package "+name+"_test"), 1)
		if err := os.WriteFile(filepath.Join(dir, "zz_grpcsuite_test.go"), test, 0o666); err != nil {
			return err
		}
		s.packages = append(s.packages, path)
	}
	return nil
}

// run runs all tests in one mode, except those that hang, and reports each package on out
// when its tests have ended.
func (s *suite) run(ctx context.Context, mode string, list []difference, out io.Writer) (*results, error) {
	r := newResults(listed(mode, list))
	args := []string{"-count=1"}
	if skip := skipPattern(mode, list); skip != "" {
		args = append(args, "-skip="+skip)
	}
	cmd := s.goTest(ctx, mode, append(args, s.packages...)...)
	cmd.Stderr = os.Stderr
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	readErr := r.read(stdout, out)
	if err := cmd.Wait(); err != nil && len(r.packages) == 0 {
		return nil, fmt.Errorf("%s: %w", strings.Join(cmd.Args, " "), err)
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	return r, readErr
}

// passesAlone runs a test without the others, several times.
func (s *suite) passesAlone(ctx context.Context, mode string, name testName) bool {
	return s.goTest(ctx, mode, fmt.Sprintf("-count=%d", runsAlone), "-run="+name.pattern(), grpcModule+"/"+name.pkg).Run() == nil
}

func (s *suite) goTest(ctx context.Context, mode string, args ...string) *exec.Cmd {
	args = append([]string{"test", "-mod=mod", "-json", "-vet=off", "-timeout=20m"}, append(s.testFlags, args...)...)
	return newGoCommand(ctx, s.dir, []string{"GRPC_SUITE_MODE=" + mode}, args...)
}

// goCommand runs go and returns what it prints.
func goCommand(ctx context.Context, dir string, env []string, args ...string) ([]byte, error) {
	cmd := newGoCommand(ctx, dir, env, args...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("%s: %w\n%s", strings.Join(cmd.Args, " "), err, stderr.Bytes())
	}
	return out, nil
}

func newGoCommand(ctx context.Context, dir string, env []string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, "go", args...)
	cmd.Dir = dir
	cmd.Env = append(append(os.Environ(), "GOWORK=off"), env...)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) } // go test then ends its tests
	cmd.WaitDelay = 10 * time.Second
	return cmd
}
