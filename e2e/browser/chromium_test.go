//go:build e2e

package browser

import (
	"context"
	"fmt"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/audits"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/cdproto/log"
	"github.com/chromedp/cdproto/network"
	"github.com/chromedp/cdproto/page"
	"github.com/chromedp/cdproto/runtime"
	"github.com/chromedp/chromedp"
)

// A tab is a tab of a real Chromium that writes down what a reader would not see: what it
// asks for, and what it complains of.
type tab struct {
	t   *testing.T
	ctx context.Context

	mu         sync.Mutex
	requests   []string // guarded by mu; addresses
	complaints []string // guarded by mu; console, exceptions, policy violations, dialogs
}

// newTab starts a Chromium of its own, with a new profile, for the length of a test.
func newTab(t *testing.T) *tab {
	t.Helper()
	ctx, stop := chromedp.NewExecAllocator(t.Context(), append(chromedp.DefaultExecAllocatorOptions[:],
		chromedp.ExecPath(findChromium(t)),
		chromedp.NoSandbox, // a sandbox needs rights that CI machines do not have
		chromedp.DisableGPU,
		chromedp.Flag("disable-quic", true),
		chromedp.Flag("disable-component-update", true),
	)...)
	t.Cleanup(stop)
	ctx, stop = chromedp.NewContext(ctx)
	t.Cleanup(stop)
	ctx, stop = context.WithTimeout(ctx, 5*time.Minute)
	t.Cleanup(stop)
	b := &tab{t: t, ctx: ctx}
	chromedp.ListenTarget(ctx, b.hear)
	b.run(network.Enable(), runtime.Enable(), log.Enable(), audits.Enable())
	return b
}

func findChromium(t *testing.T) string {
	t.Helper()
	for _, name := range []string{"chromium", "chromium-browser", "google-chrome"} {
		if path, err := exec.LookPath(name); err == nil {
			return path
		}
	}
	t.Fatal("there is no Chromium: run make browser, which installs one")
	return ""
}

func (b *tab) hear(event any) {
	b.mu.Lock()
	defer b.mu.Unlock()
	complain := func(format string, args ...any) {
		b.complaints = append(b.complaints, fmt.Sprintf(format, args...))
	}
	switch e := event.(type) {
	case *network.EventRequestWillBeSent:
		b.requests = append(b.requests, e.Request.URL)
	case *network.EventLoadingFailed:
		complain("failed to load: %s %s", e.ErrorText, e.BlockedReason)
	case *log.EventEntryAdded:
		complain("%s: %s %s", e.Entry.Level, e.Entry.Text, e.Entry.URL)
	case *runtime.EventConsoleAPICalled:
		complain("console.%s", e.Type)
	case *runtime.EventExceptionThrown:
		complain("exception: %s", e.ExceptionDetails.Text)
	case *audits.EventIssueAdded:
		complain("issue: %s", e.Issue.Code)
	case *page.EventJavascriptDialogOpening:
		complain("dialog: %s", e.Message)
		go chromedp.Run(b.ctx, page.HandleJavaScriptDialog(true)) // the complaint is enough
	}
}

func (b *tab) run(actions ...chromedp.Action) {
	b.t.Helper()
	if err := chromedp.Run(b.ctx, actions...); err != nil {
		b.t.Fatalf("chromium: %v", err)
	}
}

// open loads an address as on a screen of that width, light or dark.
func (b *tab) open(url string, width int64, scheme string) {
	b.t.Helper()
	b.forget()
	b.run(
		emulation.SetEmulatedMedia().WithFeatures([]*emulation.MediaFeature{{Name: "prefers-color-scheme", Value: scheme}}),
		emulation.SetDeviceMetricsOverride(width, 800, 1, width < 600),
		chromedp.Navigate(url),
	)
}

func (b *tab) forget() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.requests, b.complaints = nil, nil
}

// heard is what was asked for, less what is part of the page itself, and the complaints.
func (b *tab) heard() (requests, complaints []string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, url := range b.requests {
		if !strings.HasPrefix(url, "data:image/svg+xml,") {
			requests = append(requests, url)
		}
	}
	return requests, append([]string(nil), b.complaints...)
}

// eval evaluates an expression in the page.
func eval[T any](b *tab, expression string) (value T) {
	b.t.Helper()
	b.run(chromedp.Evaluate(expression, &value))
	return value
}

// texts are the visible texts of the elements that a selector finds.
func (b *tab) texts(selector string) []string {
	b.t.Helper()
	return eval[[]string](b, fmt.Sprintf(
		`[...document.querySelectorAll(%q)].map(e => e.innerText.replace(/\s+/g, " ").trim())`, selector))
}
