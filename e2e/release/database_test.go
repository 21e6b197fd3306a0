//go:build e2e

package release

import (
	"crypto/rand"
	"fmt"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/mod/sumdb"
	"golang.org/x/mod/sumdb/note"
)

const databaseName = "sum.release-check.test"

// A database is a checksum database in place of sum.golang.org, which cannot know modules
// before they are published. Checksums of ours come from their tags, never from the proxy;
// those of public modules from the go.sum files of the repository, where the go command has
// checked them.
type database struct {
	key, url string

	mu    sync.Mutex
	asked map[string]bool // guarded by mu; module paths
}

func newDatabase(t *testing.T, r *release) *database {
	signer, key, err := note.GenerateKey(rand.Reader, databaseName)
	if err != nil {
		t.Fatal(err)
	}
	d := &database{key: key, asked: make(map[string]bool)}
	known := r.goSums(t)
	server := httptest.NewServer(sumdb.NewServer(sumdb.NewTestServer(signer, func(module, version string) ([]byte, error) {
		d.mu.Lock()
		defer d.mu.Unlock()
		d.asked[module] = true
		lines := known[module+" "+version]
		if lines == "" {
			return nil, fmt.Errorf("no go.sum of the repository has a checksum of %s %s", module, version)
		}
		return []byte(lines), nil
	})))
	t.Cleanup(server.Close)
	d.url = server.URL
	return d
}

func (d *database) wasAsked(module string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.asked[module]
}

// goSums are lines of go.sum by "module version".
func (r *release) goSums(t *testing.T) map[string]string {
	known := make(map[string]string)
	seen := make(map[string]bool)
	add := func(lines string) {
		for line := range strings.Lines(lines) {
			f := strings.Fields(line)
			if !seen[line] {
				seen[line] = true
				known[f[0]+" "+strings.TrimSuffix(f[1], "/go.mod")] += line
			}
		}
	}
	for _, file := range strings.Fields(mustRun(t, r.repo, nil, "git", "ls-files", "*go.sum")) {
		add(read(t, filepath.Join(r.repo, file)))
	}
	for _, module := range r.modules {
		add(r.sums[module])
	}
	return known
}
