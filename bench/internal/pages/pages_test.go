package pages

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestTable(t *testing.T) {
	got := Table([][]string{{"", "calls", "p50"}, {"plain", "50", "1 ms"}}, 1)
	const want = `|  | calls | p50 |
|---|---:|---:|
| plain | 50 | 1 ms |
`
	if got != want {
		t.Errorf("Table =\n%swant\n%s", got, want)
	}
}

func TestReplaceBetweenMarks(t *testing.T) {
	file := filepath.Join(t.TempDir(), "page.md")
	if err := os.WriteFile(file, []byte("before\n<!-- table -->\nold\n<!-- end of table -->\nafter\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := ReplaceBetweenMarks(file, "table", "new\n"); err != nil {
		t.Fatalf("ReplaceBetweenMarks = %v", err)
	}
	got, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if want := "before\n<!-- table -->\nnew\n<!-- end of table -->\nafter\n"; string(got) != want {
		t.Errorf("the page is\n%swant\n%s", got, want)
	}

	if err := ReplaceBetweenMarks(file, "another", "new\n"); err == nil || !strings.Contains(err.Error(), "no marks") {
		t.Errorf("ReplaceBetweenMarks = %v for marks that the page lacks", err)
	}
}
