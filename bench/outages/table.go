package main

import (
	"fmt"
	"io"
	"runtime"
	"runtime/debug"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/grpcretry/grpcretry/bench/internal/pages"
)

// A table is text in cells, the first row of which is the head.
type table struct {
	mark  string // its name in the page
	about string
	rows  [][]string
}

const (
	aboutLost = `Calls lost, of 100 a second with a deadline of 10 s each, from 2 s before an outage until 4 s after it; or of ten, the only
ones of a client. A server that "fails" answers UNAVAILABLE immediately, three times means 4 s apart; when the only server is killed,
50 more calls start.`
	aboutPrice = `What it costs to save the others: the attempts that the failing server rejects, per call that it meets, and how long
the saved calls take (99th percentile). A server that is away rejects nothing, so these rows have only the time.`
	aboutDead = `Calls to an address where there never is a server, 20 a second for 12 s, with a deadline of 20 s each: how long those take
to fail that start in second 1, 5 and 12 (the median), and how many wait at the same time at most.`
)

// tablesOf expects the results of all clients.
func tablesOf(rows []row) []table {
	head := []string{"the server"}
	for _, c := range clients {
		head = append(head, c.name)
	}
	lost := table{mark: "lost", about: aboutLost, rows: [][]string{head}}
	price := table{mark: "price", about: aboutPrice, rows: [][]string{head}}
	dead := table{mark: "dead", about: aboutDead, rows: [][]string{{"", "second 1", "second 5", "second 12", "waiting at most"}}}
	for _, r := range rows {
		if r.times == 0 {
			dead.rows = append(dead.rows, r.deadCells()...)
			continue
		}
		lost.rows = append(lost.rows, r.cells(func(r *result) string { return fmt.Sprint(r.lost()) }))
		price.rows = append(price.rows, r.cells((*result).price))
	}
	return []table{lost, price, dead}
}

// readmeNeverThere is the README's row of a server that is never there.
const readmeNeverThere = "is never there: calls fail after (second 1, second 12)"

// readmeRows has what is lost, and how long calls to a server that is never there take to fail. The README
// has no room for repeated outages, and for the hedged client, which is the last.
func readmeRows(lost, dead table) [][]string {
	var rows [][]string
	for _, cells := range lost.rows {
		if !strings.HasSuffix(cells[0], "times") {
			rows = append(rows, cells[:len(cells)-1])
		}
	}
	last := []string{readmeNeverThere}
	for _, cells := range dead.rows[1 : len(dead.rows)-1] {
		last = append(last, cells[1]+", "+cells[3])
	}
	return append(rows, last)
}

// cells has the name of the outage and one cell for each client.
func (r *row) cells(cell func(*result) string) []string {
	cells := []string{r.name}
	for _, result := range r.results {
		cells = append(cells, cell(result))
	}
	return cells
}

// deadCells has a row for each client.
func (r *row) deadCells() [][]string {
	var rows [][]string
	for i, result := range r.results {
		cells := []string{clients[i].name}
		for _, second := range []int{1, 5, 12} {
			cells = append(cells, formatDuration(quantile(result.inSecond(second), 0.5)))
		}
		rows = append(rows, append(cells, fmt.Sprint(result.waiting())))
	}
	return rows
}

// price is what is known of 2.96, 0.83 s.
func (r *result) price() string {
	var parts []string
	if r.attempts > 0 {
		parts = append(parts, fmt.Sprintf("%.2f", r.attempts))
	}
	if rescued := r.rescued(); len(rescued) > 0 {
		parts = append(parts, formatDuration(quantile(rescued, 0.99)))
	}
	if parts == nil {
		return "–"
	}
	return strings.Join(parts, ", ")
}

// formatDuration says 0 s if nobody would notice.
func formatDuration(d time.Duration) string {
	return fmt.Sprintf("%.4g s", d.Round(10*time.Millisecond).Seconds())
}

// print writes the table as text.
func (t *table) print(out io.Writer) error {
	fmt.Fprintf(out, "\n%s\n\n", t.about)
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	for _, cells := range t.rows {
		fmt.Fprintln(w, strings.Join(cells, "\t"))
	}
	return w.Flush()
}

// writePage puts the tables into a page, each between its marks.
func writePage(file string, tables []table) error {
	if err := pages.ReplaceBetweenMarks(file, "machine", machine()+"\n"); err != nil {
		return err
	}
	for _, t := range tables {
		text := "\n" + t.about + "\n\n" + pages.Table(t.rows, 1) + "\n"
		if err := pages.ReplaceBetweenMarks(file, t.mark, text); err != nil {
			return err
		}
	}
	return nil
}

// machine names the versions that are compared, and what they run on.
func machine() string {
	words := []string{fmt.Sprintf("%s on %s/%s with %d cores", runtime.Version(), runtime.GOOS, runtime.GOARCH, runtime.NumCPU())}
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, compared := range []struct{ name, module string }{
			{"grpc-go", "google.golang.org/grpc"},
			{"go-grpc-middleware", "github.com/grpc-ecosystem/go-grpc-middleware/v2"},
			{"failsafe-go", "github.com/failsafe-go/failsafe-go"},
		} {
			for _, m := range info.Deps {
				if m.Path == compared.module {
					words = append(words, compared.name+" "+strings.TrimPrefix(m.Version, "v"))
				}
			}
		}
	}
	return "Measured with " + strings.Join(words, ", ") + "."
}
