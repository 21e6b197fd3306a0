//go:build e2e

package release

import (
	"archive/zip"
	"encoding/json"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// A release is made by .ci/release on a copy of the committed tree, and served from a folder as
// a module proxy serves it.
type release struct {
	repo     string            // the copy
	modules  []string          // module paths, in the order of their tags
	proxy    string            // folder of the served modules
	sums     map[string]string // what go.sum says of each of our modules, by module path
	database *database
	machine  environment
}

// An environment is what the go command is configured with on this machine.
type environment struct{ GOPROXY, GOMODCACHE, GONOSUMDB string }

func newRelease(t *testing.T) *release {
	r := &release{repo: t.TempDir(), proxy: t.TempDir(), sums: make(map[string]string)}
	if err := json.Unmarshal([]byte(mustRun(t, ".", nil, "go", "env", "-json", "GOPROXY", "GOMODCACHE", "GONOSUMDB")),
		&r.machine); err != nil {
		t.Fatal(err)
	}
	r.copyCommitted(t)
	t.Log(mustRun(t, r.repo, nil, ".ci/release", *version))
	for _, tag := range strings.Fields(mustRun(t, r.repo, nil, "git", "tag")) {
		r.modules = append(r.modules, path.Join(root, strings.TrimSuffix(tag, *version)))
	}
	slices.Sort(r.modules)
	r.serve(t)
	r.database = newDatabase(t, r)
	return r
}

// copyCommitted makes a repository whose only commit is the tree at HEAD. Git may not trust the
// checkout, if another user owns it.
func (r *release) copyCommitted(t *testing.T) {
	checkout, err := filepath.Abs(filepath.Join("..", ".."))
	if err != nil {
		t.Fatal(err)
	}
	archive := filepath.Join(t.TempDir(), "tree.tar")
	mustRun(t, checkout, nil, "git", "-c", "safe.directory="+checkout, "archive", "-o", archive, "HEAD")
	mustRun(t, r.repo, nil, "tar", "-xf", archive)
	for _, args := range [][]string{
		{"init", "-q", "-b", "main"},
		{"config", "user.name", "release-check"},
		{"config", "user.email", "release-check@localhost"},
		{"config", "commit.gpgSign", "false"},
		{"config", "tag.gpgSign", "false"},
		{"add", "-A"},
		{"commit", "-q", "-m", "the committed tree"},
	} {
		mustRun(t, r.repo, nil, "git", args...)
	}
}

// serve has the go command make, from the tags, what a proxy serves: the files of its download
// cache are a proxy's. Neither a proxy nor the checksum database has a checksum to compare with
// when a version is new.
func (r *release) serve(t *testing.T) {
	cache := t.TempDir()
	env := []string{
		"GOMODCACHE=" + cache, "GOFLAGS=-modcacherw", "GOWORK=off", "GOPROXY=direct", "GOPRIVATE=", "GONOPROXY=", "GOSUMDB=off",
		"GIT_CONFIG_COUNT=1", "GIT_CONFIG_KEY_0=url.file://" + r.repo + ".insteadOf", "GIT_CONFIG_VALUE_0=https://" + root,
	}
	for _, module := range r.modules {
		var m struct{ Sum, GoModSum string }
		if err := json.Unmarshal([]byte(mustRun(t, cache, env, "go", "mod", "download", "-json", module+"@"+*version)), &m); err != nil {
			t.Fatal(err)
		}
		r.sums[module] = module + " " + *version + " " + m.Sum + "\n" + module + " " + *version + "/go.mod " + m.GoModSum + "\n"

		served := filepath.Join(module, "@v")
		if err := os.MkdirAll(filepath.Join(r.proxy, served), 0o755); err != nil {
			t.Fatal(err)
		}
		for _, file := range []string{"list", *version + ".info", *version + ".mod", *version + ".zip"} {
			write(t, filepath.Join(r.proxy, served, file), []byte(read(t, filepath.Join(cache, "cache", "download", served, file))))
		}
	}
}

// changedProxy serves a root that is not the one of the tag: its zip has a line more.
func (r *release) changedProxy(t *testing.T) string {
	proxy := t.TempDir()
	if err := os.CopyFS(proxy, os.DirFS(r.proxy)); err != nil {
		t.Fatal(err)
	}
	name := filepath.Join(root, "@v", *version+".zip")
	original, err := zip.OpenReader(filepath.Join(r.proxy, name))
	if err != nil {
		t.Fatal(err)
	}
	defer original.Close()
	changed, err := os.Create(filepath.Join(proxy, name))
	if err != nil {
		t.Fatal(err)
	}
	defer changed.Close()
	w := zip.NewWriter(changed)
	for _, f := range original.File {
		if err := w.Copy(f); err != nil {
			t.Fatal(err)
		}
	}
	added, err := w.Create(root + "@" + *version + "/added.go")
	if err == nil {
		_, err = io.WriteString(added, "package grpcretry\n")
	}
	if err == nil {
		err = w.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
	return proxy
}

// folder is where a module is in the repository; that of the root is "".
func (r *release) folder(module string) string {
	return strings.TrimPrefix(strings.TrimPrefix(module, root), "/")
}

// isProgram reports whether a module is a program to install.
func (r *release) isProgram(t *testing.T, module string) bool {
	return mustRun(t, filepath.Join(r.repo, r.folder(module)), []string{"GOFLAGS=", "GOWORK=off"}, "go", "list", "-f", "{{.Name}}",
		".") == "main\n"
}

// A stranger has a module cache that has never seen our modules, and checks what is downloaded
// like everybody else, against go.sum and a checksum database.
type stranger struct {
	r     *release
	home  string // GOPATH, so that module cache, programs and what is known of the checksum database are there
	proxy string
}

func (r *release) newStranger(t *testing.T) *stranger {
	return &stranger{r: r, home: t.TempDir(), proxy: r.proxy}
}

// newModule is outside of every repository.
func (s *stranger) newModule(t *testing.T) string {
	dir := t.TempDir()
	s.run(t, dir, "go", "mod", "init", "example.com/stranger")
	return dir
}

// env has public modules come from the machine's own module cache, if they are there, and
// else from its proxy. GOFLAGS are for the sake of this machine: the cache can be removed, and
// packages compiled for one stranger serve the next one.
func (s *stranger) env() []string {
	return []string{
		"GOPATH=" + s.home, "GOMODCACHE=", "GOBIN=", "GOWORK=off", "GOFLAGS=-modcacherw -trimpath",
		"GOPROXY=file://" + s.proxy + ",file://" + s.r.machine.GOMODCACHE + "/cache/download," + s.r.machine.GOPROXY,
		"GOSUMDB=" + s.r.database.key + " " + s.r.database.url,
		"GOPRIVATE=", "GONOPROXY=", "GONOSUMDB=", "GONOSUMCHECK=", "GOINSECURE=",
	}
}

func (s *stranger) try(dir string, command ...string) (string, error) {
	return run(dir, s.env(), command[0], command[1:]...)
}

func (s *stranger) run(t *testing.T, dir string, command ...string) string {
	t.Helper()
	return mustRun(t, dir, s.env(), command[0], command[1:]...)
}

func mustRun(t *testing.T, dir string, env []string, command string, args ...string) string {
	t.Helper()
	out, err := run(dir, env, command, args...)
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", command, strings.Join(args, " "), err, out)
	}
	return out
}

// run returns what the command prints; if it fails, its errors too.
func run(dir string, env []string, command string, args ...string) (string, error) {
	c := exec.Command(command, args...)
	c.Dir = dir
	c.Env = append(os.Environ(), env...)
	var problems strings.Builder
	c.Stderr = &problems
	out, err := c.Output()
	if err != nil {
		return string(out) + problems.String(), err
	}
	return string(out), nil
}
