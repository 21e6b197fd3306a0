//go:build e2e

package release

import (
	"flag"
	"os"
	"path"
	"path/filepath"
	"strings"
	"testing"
)

const root = "github.com/grpcretry/grpcretry"

var version = flag.String("version", "v0.1.0", "the version to release")

// A stranger gets each library module into a new module outside the repository and runs a
// program that uses it; and installs and runs each program. All published modules are found by
// their tags, so that none can be forgotten here.
func TestStranger(t *testing.T) {
	r := newRelease(t)
	s := r.newStranger(t)
	for _, module := range r.modules {
		if r.isProgram(t, module) {
			t.Run("install "+path.Base(module), func(t *testing.T) { installs(t, s, module) })
		} else {
			t.Run("get "+path.Base(module), func(t *testing.T) { gets(t, s, module) })
		}
	}
	t.Run("a changed zip is noticed", func(t *testing.T) { noticesChange(t, r) })
	t.Run("checksums are complete in a checkout of a tag", func(t *testing.T) { sumsAreComplete(t, s) })
}

// gets does what the README says, and builds and runs the program of testdata/stranger.
func gets(t *testing.T, s *stranger, module string) {
	program := filepath.Join("testdata", "stranger", path.Base(module), "main.go")
	source, err := os.ReadFile(program)
	if err != nil {
		t.Fatalf("%v; a library module has a program there that uses it", err)
	}
	dir := s.newModule(t)
	s.run(t, dir, "go", "get", module+"@"+*version)
	write(t, filepath.Join(dir, "main.go"), source)
	s.run(t, dir, "go", "mod", "tidy")
	s.run(t, dir, "go", "build", "-o", "program", ".")
	if got := s.run(t, dir, "./program"); got != "2 attempts\n" {
		t.Errorf("%s prints %q, want 2 attempts", program, got)
	}
	s.run(t, dir, "go", "mod", "verify")
	if goMod := read(t, filepath.Join(dir, "go.mod")); strings.Contains(goMod, "replace") || !strings.Contains(goMod, module+" "+*version) {
		t.Errorf("the stranger's go.mod is\n%s\nwant it to require %s %s, and no replace", goMod, module, *version)
	}
	for _, line := range strings.SplitAfter(s.r.sums[module], "\n") {
		if !strings.Contains(read(t, filepath.Join(dir, "go.sum")), line) {
			t.Errorf("the stranger's go.sum does not have %s", line)
		}
	}
	if !s.r.database.wasAsked(module) {
		t.Errorf("the checksum database was not asked about %s", module)
	}
	if got := s.run(t, dir, "go", "list", "-m", module+"@latest"); got != module+" "+*version+"\n" {
		t.Errorf("the latest version is %s", got)
	}
}

// runs has the arguments with which each program ends soon, and a part of its output then.
var runs = map[string]struct {
	args []string
	want string
}{
	"herd": {[]string{"-clients", "100"}, "classic"},
	"demo": {nil, "every scene ended as written"},
	"tail": {[]string{"-calls", "50"}, "p99"},
}

// installs does what the README says, and runs the program.
func installs(t *testing.T, s *stranger, module string) {
	name := path.Base(module)
	program, ok := runs[name]
	if !ok {
		t.Fatalf("runs does not say how to run %s", name)
	}
	s.run(t, s.home, "go", "install", module+"@"+*version)
	installed := filepath.Join(s.home, "bin", name)
	if out := s.run(t, s.home, append([]string{installed}, program.args...)...); !strings.Contains(out, program.want) {
		t.Errorf("%s %q prints\n%s\nwant it to contain %q", name, program.args, out, program.want)
	}
	if built := s.run(t, s.home, "go", "version", "-m", installed); !strings.Contains(built, *version) {
		t.Errorf("go version -m does not name %s:\n%s", *version, built)
	}
}

// noticesChange has a proxy serve a zip with a line that the tag does not have, first to
// somebody who has never seen the module, then to somebody whose go.sum knows it.
func noticesChange(t *testing.T, r *release) {
	regular := r.newStranger(t)
	dir := regular.newModule(t)
	regular.run(t, dir, "go", "get", root+"@"+*version)

	deceived := r.newStranger(t)
	deceived.proxy = r.changedProxy(t)
	for _, tt := range []struct {
		name    string
		dir     string
		command []string
		says    string // whose checksum is another one
	}{
		{"by the checksum database", deceived.newModule(t), []string{"go", "get", root + "@" + *version}, databaseName + ":"},
		{"by go.sum", dir, []string{"go", "mod", "download", root}, "go.sum:"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			out, err := deceived.try(tt.dir, tt.command...)
			if err == nil || !strings.Contains(out, "checksum mismatch") || !strings.Contains(out, tt.says) {
				t.Errorf("%q with a changed zip: %v, want a checksum mismatch with %s\n%s", tt.command, err, tt.says, out)
			}
		})
	}
}

// sumsAreComplete checks that in a checkout of its tag every published module finds the
// checksum of the root, and of everything else, in its go.sum.
func sumsAreComplete(t *testing.T, s *stranger) {
	for _, module := range s.r.modules {
		folder := s.r.folder(module)
		s.run(t, s.r.repo, "git", "checkout", "-q", path.Join(folder, *version))
		s.run(t, filepath.Join(s.r.repo, folder), "go", "list", "-mod=readonly", "-deps", "-test", "./...")
	}
}

func read(t *testing.T, file string) string {
	t.Helper()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func write(t *testing.T, file string, text []byte) {
	t.Helper()
	if err := os.WriteFile(file, text, 0o644); err != nil {
		t.Fatal(err)
	}
}
