//go:build e2e

package browser

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// The pages that herd -html writes are readable on a phone, and on a dark screen.
func TestHerdPages(t *testing.T) {
	folder := t.TempDir()
	program := filepath.Join(folder, "herd")
	build := exec.Command("go", "build", "-buildvcs=false", "-o", program, ".")
	build.Dir = filepath.Join("..", "..", "cmd", "herd")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	b := newTab(t)
	for _, args := range []string{
		"-study classic -strategy full,exponential",
		"-study layers -strategy default -duration 3s", // a table of what varies
		"-study budget -duration 3s -processes 50 -attempts 3 -budget ratio:0.1,0.25,10s,reserve=5 -deadline 2s -attempt-timeout 750ms",
		"-study tail -part tail-slow -duration 3s",
	} {
		page := filepath.Join(folder, "page.html")
		if out, err := exec.Command(program, append(strings.Fields(args), "-charts=false", "-html", page)...).CombinedOutput(); err != nil {
			t.Fatalf("herd %s: %v\n%s", args, err, out)
		}
		for _, scheme := range []string{"light", "dark"} {
			for _, width := range []int64{390, 1280} {
				b.open("file://"+page, width, scheme)
				if got := eval[int64](b, layout+"document.documentElement.scrollWidth"); got > width {
					t.Errorf("herd %s: on a screen of %d pixels the page is %d wide", args, width, got)
				}
				if got := eval[float64](b, layout+"contrast"); got < 7 {
					t.Errorf("herd %s: on a %s screen the contrast of the text is %.1f, want 7 or more", args, scheme, got)
				}
				if got := eval[float64](b, layout+"back"); (got < 0.1) != (scheme == "dark") {
					t.Errorf("herd %s: on a %s screen the brightness of the page is %.2f", args, scheme, got)
				}
			}
		}
	}
}

// layout opens what is folded, and computes the relative luminance of the page's background, and the
// smallest contrast of a text with what is behind it, as WCAG defines them.
const layout = `
document.querySelectorAll("details").forEach(e => e.open = true);
var luminance = color => {
	const [r, g, b] = color.match(/[\d.]+/g).map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
	return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
var behind = e => {
	for (; e; e = e.parentElement) {
		const color = getComputedStyle(e).backgroundColor;
		if (!color.endsWith(", 0)")) return luminance(color);
	}
	return luminance(getComputedStyle(document.documentElement).colorScheme == "dark" ? "rgb(18, 18, 18)" : "rgb(255, 255, 255)");
};
var back = behind(document.body);
var contrast = Math.min(...[...document.querySelectorAll("h1, h2, p, th, td, pre, summary")].map(e => {
	const [low, high] = [behind(e), luminance(getComputedStyle(e).color)].sort((a, b) => a - b);
	return (high + 0.05) / (low + 0.05);
}));
`
