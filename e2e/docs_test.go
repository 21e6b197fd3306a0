package e2e

import (
	"encoding/json"
	"os"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

// The files that a Prometheus, and a Grafana, of somebody's own would load.
const (
	rulesFile     = "../docs/alerts.yml"
	dashboardFile = "../docs/grafana-dashboard.json"
	pageFile      = "../docs/observing.md"
)

// A rule records what its expression gives, or alerts where it gives anything.
type rule struct {
	Record string `yaml:"record"`
	Alert  string `yaml:"alert"`
	Expr   string `yaml:"expr"`
}

// rules are those in docs, in their order.
func rules(t *testing.T) []rule {
	t.Helper()
	text, err := os.ReadFile(rulesFile)
	if err != nil {
		t.Fatalf("the rules: %v", err)
	}
	var file struct {
		Groups []struct {
			Rules []rule `yaml:"rules"`
		} `yaml:"groups"`
	}
	if err := yaml.Unmarshal(text, &file); err != nil {
		t.Fatalf("the rules: %v", err)
	}
	var all []rule
	for _, g := range file.Groups {
		all = append(all, g.Rules...)
	}
	return all
}

// queries are the expressions of the recording rules, by name.
func queries(t *testing.T) map[string]string {
	t.Helper()
	byName := map[string]string{}
	for _, r := range rules(t) {
		if r.Record != "" {
			byName[r.Record] = r.Expr
		}
	}
	return byName
}

// A panel of the dashboard.
type panel struct {
	ID      int    `json:"id"`
	Title   string `json:"title"`
	GridPos struct {
		X, Y, W, H int
	} `json:"gridPos"`
	Targets []struct {
		Expr string `json:"expr"`
	} `json:"targets"`
}

func dashboard(t *testing.T) []panel {
	t.Helper()
	text, err := os.ReadFile(dashboardFile)
	if err != nil {
		t.Fatalf("the dashboard: %v", err)
	}
	var file struct {
		Panels []panel `json:"panels"`
	}
	if err := json.Unmarshal(text, &file); err != nil {
		t.Fatalf("the dashboard: %v", err)
	}
	return file.Panels
}

func TestFiveQueries(t *testing.T) {
	if got := len(queries(t)); got != 5 {
		t.Errorf("%s records %d queries, want 5", rulesFile, got)
	}
}

func TestDashboardHasTheQueries(t *testing.T) {
	var shown []string
	ids := map[int]bool{}
	for _, p := range dashboard(t) {
		if ids[p.ID] {
			t.Errorf("panel %q has the ID %d of another", p.Title, p.ID)
		}
		ids[p.ID] = true
		for _, target := range p.Targets {
			shown = append(shown, target.Expr)
		}
	}
	for name, expr := range queries(t) {
		if !slices.Contains(shown, expr) {
			t.Errorf("no panel of %s shows %s:\n%s", dashboardFile, name, expr)
		}
	}
}

func TestPanelsDoNotOverlap(t *testing.T) {
	panels := dashboard(t)
	for i, a := range panels {
		if a.GridPos.W <= 0 || a.GridPos.H <= 0 || a.GridPos.X+a.GridPos.W > 24 {
			t.Errorf("panel %q has the place %+v, which is not on the grid of 24 columns", a.Title, a.GridPos)
		}
		for _, b := range panels[:i] {
			if a.GridPos.X < b.GridPos.X+b.GridPos.W && b.GridPos.X < a.GridPos.X+a.GridPos.W &&
				a.GridPos.Y < b.GridPos.Y+b.GridPos.H && b.GridPos.Y < a.GridPos.Y+a.GridPos.H {
				t.Errorf("panels %q and %q overlap", a.Title, b.Title)
			}
		}
	}
}

// The page quotes the queries as they are; only line breaks and blanks may differ.
func TestPageQuotesTheQueries(t *testing.T) {
	page, err := os.ReadFile(pageFile)
	if err != nil {
		t.Fatalf("the page: %v", err)
	}
	words := func(s string) string { return strings.Join(strings.Fields(s), " ") }
	for name, expr := range queries(t) {
		if !strings.Contains(words(string(page)), words(expr)) {
			t.Errorf("%s does not quote %s:\n%s", pageFile, name, expr)
		}
	}
}
