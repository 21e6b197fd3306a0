//go:build e2e

package browser

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"image"
	"image/color"
	"image/draw"
	"image/png"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/accessibility"
	"github.com/chromedp/cdproto/page"
	"github.com/chromedp/chromedp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/debug"
	"github.com/grpcretry/grpcretry/grpcretrytest"
)

// A wait is at least a random part of the time for which the target has been failing: longer
// than the backoff, if the machine is slow.
var aWait = regexp.MustCompile(`^retry after [0-9.]+ ms \(backoff\)$`)

var screenshot = flag.String("screenshot", "", "write a picture of the page there")

// A counter is a real server on the loopback interface. It fails every attempt as the
// method says, and counts.
type counter struct {
	mu   sync.Mutex
	seen map[string]int // guarded by mu; attempts by method
}

func (c *counter) handle(_ any, stream grpc.ServerStream) error {
	if err := stream.RecvMsg(&emptypb.Empty{}); err != nil {
		return err
	}
	method, _ := grpc.MethodFromServerStream(stream)
	c.mu.Lock()
	c.seen[method]++
	c.mu.Unlock()
	previous := grpcretry.PreviousAttempts(stream.Context())
	switch {
	case method == getCart && previous < 2:
		return status.Error(codes.Unavailable, "<script>alert('a peer')</script> <b>is down</b>")
	case method == reserve:
		return status.Error(codes.Unavailable, "stock-taking")
	case method == addItem:
		return status.Error(codes.NotFound, "no such cart")
	case method == getPrice && previous == 0:
		if err := grpcretry.SetPushback(stream.Context(), 20*time.Millisecond); err != nil {
			return err
		}
		return status.Error(codes.ResourceExhausted, "queue is full")
	}
	return stream.SendMsg(&emptypb.Empty{})
}

// startCounter returns a client of it.
func startCounter(t *testing.T, r *grpcretry.Retrier) (*counter, *grpc.ClientConn) {
	t.Helper()
	c := &counter{seen: map[string]int{}}
	server := grpcretrytest.NewServer(t, func(grpc.ServiceRegistrar) {}, grpc.UnknownServiceHandler(c.handle), grpcretrytest.OverTCP())
	return c, server.Conn(r.DialOptions()...)
}

// The page is served to a browser while calls are made, and says what the test has done
// and what the server has seen.
func TestPageSaysWhatHappened(t *testing.T) {
	r, err := grpcretry.New(grpcretry.WithBackoff(grpcretry.Constant(5*time.Millisecond)),
		grpcretry.WithBudget(grpcretry.Unlimited), // methods are called in any order, and every retry is to happen
		grpcretry.WithMethod(reserve, grpcretry.WithMaxAttempts(3)))
	if err != nil {
		t.Fatal(err)
	}
	handler := debug.Handler(r)
	defer handler.Close()
	server := httptest.NewServer(handler)
	defer server.Close()
	b := newTab(t)

	b.open(server.URL, 1280, "light")
	if got := b.texts("main h2"); !slices.Equal(got, []string{"No calls yet"}) {
		t.Errorf("before the first call the page says %q, want No calls yet", got)
	}
	b.wantQuiet(server.URL + "/")

	backend, cc := startCounter(t, r)
	for _, load := range []struct {
		method string
		calls  int
	}{{recommend, 40}, {getCart, 3}, {reserve, 2}, {addItem, 5}, {getPrice, 4}} { // the last succeeds: no target is failing
		for range load.calls {
			_ = cc.Invoke(t.Context(), load.method, &emptypb.Empty{}, &emptypb.Empty{})
		}
	}
	b.open(server.URL, 1280, "light")
	// Calls, attempts, retries, retry share, rescued, failed, and by what they were stopped.
	want := map[string][]string{
		recommend: {"40", "40", "0", "0 %", "0", "0", "–"},
		getCart:   {"3", "9", "6", "67 %", "3", "0", "–"},
		reserve:   {"2", "6", "4", "67 %", "0", "2\n2 retried", "exhausted 2"},
		addItem:   {"5", "5", "0", "0 %", "0", "5\n5 not retried", "not_retryable 5"},
		getPrice:  {"4", "8", "4", "50 %", "4", "0", "–"},
	}
	got := map[string][]string{}
	for _, row := range eval[[][]string](b, `[...document.querySelectorAll(".methods tbody tr")].map(tr =>
		[tr.querySelector("th a").innerText, ...[...tr.cells].slice(1).map(td => td.innerText.trim())])`) {
		got["/"+row[0]] = row[1:]
	}
	if !maps.EqualFunc(got, want, slices.Equal) {
		t.Errorf("the table says\n%q, want\n%q", got, want)
	}
	for method, seen := range backend.seen {
		if got[method] == nil || got[method][1] != fmt.Sprint(seen) {
			t.Errorf("the page says %q of %s, the server has seen %d attempts", got[method], method, seen)
		}
	}
	b.wantTexts(".answer .short", "Yes", "UNAVAILABLE", "50 %", "Exhausted")
	b.wantTexts(".answer .line", "14 retries in 68 attempts, 21 %", "21 failed attempts", "7 of 14 retries succeeded", "7 of 54 calls failed")
	b.wantTexts(".target h2", strings.TrimPrefix(cc.CanonicalTarget(), "/"))
	if n := len(b.texts(".call")); n != 9 {
		t.Errorf("the page has %d timelines, want 9, one for each call that retried", n)
	}
	b.wantQuiet(server.URL + "/")

	// A timeline opens, and what the server wrote is text.
	b.run(chromedp.Click(`//li[contains(., "GetCart")]//summary`, chromedp.BySearch))
	attempts := eval[[][]string](b, `[...document.querySelectorAll("details[open] .attempts tbody tr")].map(tr =>
		[...tr.cells].map(td => td.innerText.trim()))`)
	if len(attempts) != 3 || !strings.HasPrefix(attempts[0][3], `UNAVAILABLE <script>alert('a peer')</script> <b>is down</b>`) ||
		attempts[0][4] != strings.TrimPrefix(cc.Target(), "passthrough:///") ||
		!aWait.MatchString(attempts[1][5]) || attempts[2][3] != "OK" || attempts[2][5] != "success" {
		t.Errorf("the attempts of GetCart are %q, want two UNAVAILABLE and one OK", attempts)
	}
	// Links lead to the method, and to the same since the start.
	b.run(chromedp.Click(`//th/a[contains(., "GetPrice")]`, chromedp.BySearch))
	b.run(chromedp.WaitVisible(".filter", chromedp.ByQuery))
	b.wantTexts(".methods tbody th a", strings.TrimPrefix(getPrice, "/"))
	b.wantTexts(".answer .line", "4 retries in 8 attempts, 50 %", "4 failed attempts", "4 of 4 retries succeeded", "no call failed")
	b.run(chromedp.Click(`//a[text()="since start"]`, chromedp.BySearch),
		chromedp.WaitVisible(`//a[text()="since start" and @aria-current]`, chromedp.BySearch))
	b.wantTexts(".answer .line", "4 retries in 8 attempts, 50 %", "4 failed attempts", "4 of 4 retries succeeded", "no call failed")
	if _, complaints := b.heard(); len(complaints) > 0 {
		t.Errorf("while clicking the browser complains:\n%s", strings.Join(complaints, "\n"))
	}
}

func (b *tab) wantTexts(selector string, want ...string) {
	b.t.Helper()
	if got := b.texts(selector); !slices.Equal(got, want) {
		b.t.Errorf("the page says in %s %q, want %q", selector, got, want)
	}
}

// wantQuiet fails where the browser asked for anything but the page itself, or complained.
func (b *tab) wantQuiet(url string) {
	b.t.Helper()
	requests, complaints := b.heard()
	if !slices.Equal(requests, []string{url}) {
		b.t.Errorf("the browser asked for %q, want %q alone", requests, url)
	}
	if len(complaints) > 0 {
		b.t.Errorf("the browser complains of %s:\n%s", url, strings.Join(complaints, "\n"))
	}
}

// The page of a bad quarter of an hour is readable on a phone and on a desk, by day and by
// night, with nothing opened and with everything.
func TestPageIsReadable(t *testing.T) {
	server := httptest.NewServer(recordPage(t, "", "window=all"))
	defer server.Close()
	empty := httptest.NewServer(debug.Handler())
	defer empty.Close()
	b := newTab(t)
	for _, url := range []string{server.URL + "/", server.URL + "/?window=all", empty.URL + "/"} {
		for _, width := range []int64{320, 360, 768, 1280, 1920} {
			for _, scheme := range []string{"light", "dark"} {
				b.open(url, width, scheme)
				b.wantQuiet(url)
				name := fmt.Sprintf("%s, %d wide, %s", url, width, scheme)
				b.wantReadable(name, width)
				if scheme == "dark" != eval[bool](b, withColors(`luminance(getComputedStyle(document.body).backgroundColor) < 0.1`)) {
					t.Errorf("%s: the background is %s", name, eval[string](b, `getComputedStyle(document.body).backgroundColor`))
				}
				b.run(chromedp.Evaluate(`document.querySelectorAll("details").forEach(d => d.open = true)`, nil))
				b.wantReadable(name+", all opened", width)
			}
		}
	}
}

func (b *tab) wantReadable(name string, width int64) {
	b.t.Helper()
	if got := eval[int64](b, `Math.max(document.documentElement.scrollWidth, document.body.scrollWidth)`); got > width {
		b.t.Errorf("%s: the page is %d wide, want at most %d", name, got, width)
	}
	if got := eval[string](b, `document.compatMode`); got != "CSS1Compat" {
		b.t.Errorf("%s: the page is shown in %s", name, got)
	}
	for _, problem := range eval[[]string](b, withColors(findUnreadable)) {
		b.t.Errorf("%s: %s", name, problem)
	}
}

// withColors is an expression that may ask for the luminance of a colour, by WCAG 2.1.
func withColors(expression string) string {
	return "(() => {" + luminance + "return " + expression + "})()"
}

const luminance = `
const rgb = c => c.match(/[\d.]+/g).map(Number);
const luminance = c => { const [r, g, b] = rgb(c).map(v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
	return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
`

// findUnreadable lists visible texts that are below 12 px or, by WCAG 2.1, short of
// contrast; tables and pictures that a screen reader cannot tell; and texts that run out of
// their card.
const findUnreadable = `(() => {
	const found = new Set();
	const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
	for (let node; node = walker.nextNode();) {
		const text = node.data.trim(), e = node.parentElement, range = document.createRange();
		range.selectNodeContents(node);
		if (!text || e.closest("svg") || range.getClientRects().length === 0) continue;
		const style = getComputedStyle(e);
		if (parseFloat(style.fontSize) < 12) found.add("too small, " + style.fontSize + ": " + text);
		let ground = e;
		while (ground.parentElement && (rgb(getComputedStyle(ground).backgroundColor)[3] ?? 1) < 1) ground = ground.parentElement;
		const [a, b] = [luminance(style.color), luminance(getComputedStyle(ground).backgroundColor)].sort((x, y) => y - x);
		const ratio = (a + 0.05) / (b + 0.05);
		if (ratio < 4.5) found.add("contrast of " + ratio.toFixed(2) + ": " + text);
		const card = e.closest(".card"), box = range.getBoundingClientRect();
		if (card && !e.closest(".scroll, thead") && box.right > card.getBoundingClientRect().right + 1)
			found.add("runs out of its card: " + text);
	}
	for (const th of document.querySelectorAll("th:not([scope])")) found.add("th without scope: " + th.innerText);
	for (const svg of document.querySelectorAll("svg:not([aria-hidden])"))
		if (svg.getAttribute("role") !== "img" || !svg.querySelector(":scope > title")?.textContent)
			found.add("picture without a title: " + svg.outerHTML);
	return [...found];
})()`

// On a phone the tables are drawn as cards. To a screen reader they are still tables.
func TestTablesStayTablesOnAPhone(t *testing.T) {
	server := httptest.NewServer(recordPage(t, ""))
	defer server.Close()
	b := newTab(t)
	roles := func(width int64) map[string]int {
		b.open(server.URL, width, "light")
		count := map[string]int{}
		b.run(chromedp.ActionFunc(func(ctx context.Context) error {
			nodes, err := accessibility.GetFullAXTree().Do(ctx)
			for _, n := range nodes {
				if n.Role != nil && !n.Ignored {
					count[strings.Trim(string(n.Role.Value), `"`)]++
				}
			}
			return err
		}))
		return count
	}
	wide, phone := roles(1280), roles(360)
	for _, role := range []string{"table", "row", "rowheader", "columnheader", "cell"} {
		if wide[role] == 0 || phone[role] != wide[role] {
			t.Errorf("a screen reader finds %d of role %s on a phone and %d on a desk, want the same, and some", phone[role], role, wide[role])
		}
	}
}

// The page loads itself again, and only when asked to.
func TestPageRefreshes(t *testing.T) {
	handler := debug.Handler()
	loads := make(chan struct{}, 100)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		loads <- struct{}{}
		handler.ServeHTTP(w, r)
	}))
	defer server.Close()
	b := newTab(t)
	b.open(server.URL+"/?refresh=1", 1280, "light")
	for range 3 {
		select {
		case <-loads:
		case <-time.After(30 * time.Second):
			t.Fatal("the page was not loaded again within 30 s, want every second")
		}
	}
	if _, complaints := b.heard(); len(complaints) > 0 {
		t.Errorf("the browser complains:\n%s", strings.Join(complaints, "\n"))
	}
}

// What the tests above do not hear, they cannot complain of: here is what they would hear.
func TestComplaintsAreHeard(t *testing.T) {
	elsewhere := httptest.NewServer(http.NotFoundHandler())
	defer elsewhere.Close()
	policy := debugPolicy()
	for _, tt := range []struct {
		name, policy, body string
		want               string // in a complaint; empty: in a request
	}{
		{"a script that the policy forbids", policy, `<script>document.title = "ran"</script>`, "Content Security Policy"},
		{"a handler that the policy forbids", policy, `<svg onload="alert(1)"></svg>`, "Content Security Policy"},
		{"a style that the policy forbids", policy, `<p style="color: red">red</p>`, "Content Security Policy"},
		{"a picture that the policy forbids", policy, `<img src="` + elsewhere.URL + `/x.png">`, "Content Security Policy"},
		{"a script", "", `<script>console.error("ran")</script>`, "console.error"},
		{"an exception", "", `<script>throw new Error("ran")</script>`, "exception"},
		{"a dialog", "", `<script>alert("ran")</script>`, "dialog: ran"},
		{"a picture from elsewhere", "", `<img src="` + elsewhere.URL + `/x.png">`, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				w.Header().Set("Content-Security-Policy", tt.policy)
				w.Header().Set("Content-Type", "text/html; charset=utf-8")
				fmt.Fprint(w, `<!DOCTYPE html><title>test</title><link rel="icon" href="data:,">`+tt.body)
			}))
			defer server.Close()
			b := newTab(t)
			b.open(server.URL, 360, "light")
			requests, complaints := b.heard()
			if all := strings.Join(complaints, "\n"); !strings.Contains(all, tt.want) || tt.want != "" && len(complaints) == 0 {
				t.Errorf("complaints are %q, want %q", all, tt.want)
			}
			if tt.want == "" && !slices.Contains(requests, elsewhere.URL+"/x.png") {
				t.Errorf("requests are %q, want the picture in them", requests)
			}
			if tt.policy != "" && eval[string](b, `document.title`) != "test" {
				t.Error("the script ran")
			}
		})
	}
}

// debugPolicy is the policy that the page is served with.
func debugPolicy() string {
	w := httptest.NewRecorder()
	debug.Handler().ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/", nil))
	return w.Header().Get("Content-Security-Policy")
}

// The picture for the documentation shows one of the shop's three backends and its last call,
// so that it can be read where it is shown.
const (
	pictureWidth   = 1200
	tallestPicture = 1450
)

// TestScreenshot makes the picture for the documentation, and writes it with -screenshot.
func TestScreenshot(t *testing.T) {
	query := url.Values{"target": {cart}}.Encode()
	server := httptest.NewServer(recordPage(t, query))
	defer server.Close()
	b := newTab(t)
	b.open(server.URL+"/?"+query, pictureWidth, "light")
	b.run(chromedp.Evaluate(`document.querySelector(".call details").open = true`, nil))
	bottom := eval[float64](b, `document.querySelector(".call").getBoundingClientRect().bottom + 4`)
	if bottom > tallestPicture {
		t.Errorf("the picture is %.0f pixels tall, want at most %d", bottom, tallestPicture)
	}
	var picture []byte
	b.run(chromedp.ActionFunc(func(ctx context.Context) (err error) {
		picture, err = page.CaptureScreenshot().WithCaptureBeyondViewport(true).
			WithClip(&page.Viewport{Width: pictureWidth, Height: bottom, Scale: 1}).Do(ctx)
		return err
	}))
	small, err := paletted(picture)
	if err != nil {
		t.Fatal(err)
	}
	if len(small) > 200_000 {
		t.Errorf("the picture has %d bytes, want at most 200,000", len(small))
	}
	if *screenshot == "" {
		return
	}
	if err := os.WriteFile(*screenshot, small, 0o644); err != nil {
		t.Fatal(err)
	}
}

// paletted encodes a PNG anew with the 256 colours that it has most of, which is a third of
// the size and looks the same.
func paletted(from []byte) ([]byte, error) {
	picture, err := png.Decode(bytes.NewReader(from))
	if err != nil {
		return nil, err
	}
	count := map[color.Color]int{}
	for y := range picture.Bounds().Dy() {
		for x := range picture.Bounds().Dx() {
			count[picture.At(x, y)]++
		}
	}
	colors := slices.SortedFunc(maps.Keys(count), func(a, b color.Color) int { return count[b] - count[a] })
	small := image.NewPaletted(picture.Bounds(), colors[:min(256, len(colors))])
	draw.Draw(small, small.Bounds(), picture, image.Point{}, draw.Src)
	var to bytes.Buffer
	encoder := png.Encoder{CompressionLevel: png.BestCompression}
	err = encoder.Encode(&to, small)
	return to.Bytes(), err
}
