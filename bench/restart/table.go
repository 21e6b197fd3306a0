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

// A table shows one load on a single server or on replicas.
type table struct {
	mark     string // its name in the page
	title    string
	replicas int
	load     load
	rows     []row // ordered by absence, then as clients are
}

// A row is one client in one scenario.
type row struct {
	away   time.Duration
	client string
	*summary
}

// legend explains the columns.
const legend = `  p50, max             latency of the calls that succeeded
  attempts             attempts that reached a server, as the servers counted them
  waited               attempts that the returned server received from calls that had started before the client reconnected
  over                 time between the first and the last of these
  in 10 ms             the largest number of these that arrived within 10 ms
`

var head = []string{"away", "client", "calls", "succeeded", "p50", "max", "attempts", "waited", "over", "in 10 ms"}

// cells of the row, in the order of head.
func (r *row) cells() []string {
	cells := []string{formatDuration(r.away), r.client, fmt.Sprint(r.calls), fmt.Sprint(r.succeeded), "–", "–",
		fmt.Sprint(r.attempts), "–", "–", "–"}
	if r.succeeded > 0 {
		cells[4], cells[5] = formatDuration(r.median), formatDuration(r.longest)
	}
	if r.back.attempts > 0 {
		cells[7], cells[8], cells[9] = fmt.Sprint(r.back.attempts), formatDuration(r.back.over), fmt.Sprint(r.back.peak)
	}
	return cells
}

// formatDuration keeps what matters to a reader: 0.3 ms, 21 ms, 1.07 s.
func formatDuration(d time.Duration) string {
	switch {
	case d >= 999500*time.Microsecond:
		return strings.TrimSuffix(strings.TrimRight(fmt.Sprintf("%.2f", d.Seconds()), "0"), ".") + " s"
	case d >= 9950*time.Microsecond:
		return fmt.Sprintf("%.0f ms", d.Seconds()*1000)
	default:
		return fmt.Sprintf("%.1f ms", d.Seconds()*1000)
	}
}

// print writes the table as text.
func (t *table) print(out io.Writer) error {
	fmt.Fprintf(out, "\n%s\n\n", t.title)
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, strings.Join(head, "\t")+"\t")
	for i, r := range t.rows {
		cells := r.cells()
		if i > 0 && r.away == t.rows[i-1].away {
			cells[0] = ""
		}
		fmt.Fprintln(w, strings.Join(cells, "\t")+"\t")
	}
	return w.Flush()
}

// markdown is the table as a page shows it.
func (t *table) markdown() string {
	rows := [][]string{head}
	for _, r := range t.rows {
		rows = append(rows, r.cells())
	}
	return "\n" + pages.Table(rows, 2) + "\n"
}

// writePage puts the tables into a page, each between its marks.
func writePage(file string, tables []table) error {
	if err := pages.ReplaceBetweenMarks(file, "machine", machine()+"\n"); err != nil {
		return err
	}
	for _, t := range tables {
		if err := pages.ReplaceBetweenMarks(file, t.mark, t.markdown()); err != nil {
			return err
		}
	}
	return nil
}

// describe says what is the same in all tables.
func (p *plan) describe() string {
	return fmt.Sprintf(`Servers on loopback, which take %s to respond, are killed and come back on the same port.
Every call has a deadline of %s. The steady load lasts from %s before the absence until %s
after it. Each client has its defaults; those that need a number have %d attempts, on
UNAVAILABLE and RESOURCE_EXHAUSTED. %s`,
		formatDuration(responseTime), formatDuration(p.deadline), formatDuration(p.before), formatDuration(p.after),
		attempts, machine())
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
