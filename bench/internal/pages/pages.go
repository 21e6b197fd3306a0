// Package pages writes tables in Markdown, and puts them between the marks of a page whose
// other text is written by hand.
package pages

import (
	"fmt"
	"os"
	"strings"
)

// Table is a table in Markdown whose first row is its head. The first left columns are
// aligned to the left, the others to the right.
func Table(rows [][]string, left int) string {
	var b strings.Builder
	for i, row := range rows {
		b.WriteString("| " + strings.Join(row, " | ") + " |\n")
		if i == 0 {
			b.WriteString("|" + strings.Repeat("---|", left) + strings.Repeat("---:|", len(row)-left) + "\n")
		}
	}
	return b.String()
}

// ReplaceBetweenMarks puts text between <!-- name --> and <!-- end of name -->.
func ReplaceBetweenMarks(file, name, text string) error {
	content, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	begin, end := "<!-- "+name+" -->\n", "<!-- end of "+name+" -->"
	before, rest, found := strings.Cut(string(content), begin)
	_, after, ended := strings.Cut(rest, end)
	if !found || !ended {
		return fmt.Errorf("%s has no marks %q and %q", file, strings.TrimSpace(begin), end)
	}
	return os.WriteFile(file, []byte(before+begin+text+end+after), 0o644)
}
