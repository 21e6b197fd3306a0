package debug

import (
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"encoding/xml"
	"errors"
	"io"
	"math/big"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode"
	"unicode/utf8"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry"
)

func wantIn(t testing.TB, body, part string) {
	t.Helper()
	if !strings.Contains(body, part) {
		_, shown, _ := strings.Cut(body, "<body>")
		t.Errorf("the page has no %q:\n%s", part, shown)
	}
}

func TestHeaders(t *testing.T) {
	p := handler(t, retrier(t))
	for query, contentType := range map[string]string{
		"":            "text/html; charset=utf-8",
		"format=html": "text/html; charset=utf-8",
		"format=json": "application/json",
	} {
		h := get(t, p, query).Header()
		for key, value := range map[string]string{
			"Content-Type":            contentType,
			"Cache-Control":           "no-store",
			"X-Content-Type-Options":  "nosniff",
			"Referrer-Policy":         "no-referrer",
			"Content-Security-Policy": contentSecurityPolicy,
		} {
			want(t, query+": "+key, h.Values(key), []string{value})
		}
	}
}

// The hash in the policy is that of what is between <style> and </style>, byte for byte,
// and nothing else that the policy would have to allow is on the page.
func TestContentSecurityPolicyFitsThePage(t *testing.T) {
	p, tell := told(t)
	tell(failedCall("one", "/s/m", 3, "down", "10.0.0.7:443"))
	w := get(t, p, "")
	_, rest, _ := strings.Cut(w.Body.String(), "<style>")
	style, _, _ := strings.Cut(rest, "</style>")
	hash := sha256.Sum256([]byte(style))
	if want := "style-src 'sha256-" + base64.StdEncoding.EncodeToString(hash[:]) + "'"; !strings.Contains(contentSecurityPolicy, want) {
		t.Errorf("the policy is %s, want in it %s", contentSecurityPolicy, want)
	}
	if !strings.HasPrefix(contentSecurityPolicy, "default-src 'none';") || strings.Contains(contentSecurityPolicy, "script") {
		t.Errorf("the policy is %s, want default-src 'none' and no scripts", contentSecurityPolicy)
	}
	for _, tag := range elements(t, w.Body.Bytes()) {
		name := tag.Name.Local
		if slices.Contains([]string{"script", "iframe", "object", "embed", "form", "base", "img"}, name) {
			t.Errorf("the page has an element %s", name)
		}
		for _, a := range tag.Attr {
			if name := a.Name.Local; strings.HasPrefix(name, "on") || name == "style" || name == "src" {
				t.Errorf("the page has an attribute %s of %s", name, tag.Name.Local)
			}
			if a.Name.Local == "href" && !strings.HasPrefix(a.Value, "?") && !strings.HasPrefix(a.Value, "data:image/svg+xml,") {
				t.Errorf("the page links to %s, want only to itself", a.Value)
			}
		}
	}
}

// elements are the start tags of a page, in order. The page closes all that it opens, as
// XML does, but for what HTML never closes.
func elements(t testing.TB, body []byte) (all []xml.StartElement) {
	t.Helper()
	d := xml.NewDecoder(strings.NewReader(string(body)))
	d.Strict, d.AutoClose, d.Entity = false, append(xml.HTMLAutoClose, "wbr"), xml.HTMLEntity
	for {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			t.Fatalf("the page is not well-formed: %v", err)
		}
		if start, ok := token.(xml.StartElement); ok {
			all = append(all, start.Copy())
		}
	}
}

func TestOnlyGetAndHead(t *testing.T) {
	p := handler(t, retrier(t))
	for _, method := range []string{"POST", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "get"} {
		w := httptest.NewRecorder()
		p.ServeHTTP(w, httptest.NewRequest(method, "/", nil))
		if w.Code != http.StatusMethodNotAllowed || w.Header().Get("Allow") != "GET, HEAD" || w.Header().Get("Content-Security-Policy") == "" {
			t.Errorf("%s = %d with %v, want 405, what is allowed, and the policy", method, w.Code, w.Header())
		}
	}
	server := httptest.NewServer(p)
	defer server.Close()
	response, err := http.Head(server.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	body, _ := io.ReadAll(response.Body)
	if response.StatusCode != http.StatusOK || len(body) > 0 || response.ContentLength < 1000 {
		t.Errorf("HEAD = %d, %d bytes, Content-Length %d, want 200, none, and the length of the page",
			response.StatusCode, len(body), response.ContentLength)
	}
	http.DefaultClient.CloseIdleConnections()
}

func TestQueriesThatMeanNothingAreRefused(t *testing.T) {
	p := handler(t, retrier(t))
	for _, query := range []string{
		"format=xml", "format=JSON", "window=5m", "refresh=0", "refresh=-1", "refresh=3601", "refresh=5s", "refresh=1e3",
		"refresh=99999999999999999999", "retrier=0", "retrier=x", "format=%3Cscript%3E",
		"script=1", "metod=%2Fshop.Cart%2FGet", "%zz", "target=%zz", "window=all&window=all", "format=json;window=all",
	} {
		w := httptest.NewRecorder()
		p.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/?"+query, nil))
		if w.Code != http.StatusBadRequest || w.Header().Get("Content-Security-Policy") == "" || strings.Contains(w.Body.String(), "script") {
			t.Errorf("GET ?%s = %d %s, want 400 and not what was sent", query, w.Code, w.Body)
		}
	}
}

func TestQueries(t *testing.T) {
	bubble(t, func(t *testing.T) {
		p, tell := told(t)
		tell(failedCall("dns:///shop", "/shop.Cart/Get", 2, "down", ""))
		tell(failedCall("dns:///shop", "/shop.Cart/Add", 1, "down", ""))
		time.Sleep(time.Hour)
		for _, tt := range []struct{ query, want string }{
			{"refresh=5", `<meta http-equiv="refresh" content="5">`},
			{"refresh=5&window=all", `<a href="?window=all">stop refreshing</a>`},
			{"window=all", `<a href="?refresh=5&amp;window=all">refresh every 5 s</a>`},
			{"window=all", `<a href="?window=all" aria-current="true">since start</a>`},
			{"window=recent", `<a href="?" aria-current="true">last 5 minutes</a>`},
			{"window=all", `href="?method=%2Fshop.Cart%2FGet&amp;retrier=1&amp;target=dns%3A%2F%2F%2Fshop&amp;window=all"`},
			{"method=/shop.Cart/Get", `Only method /shop.Cart/Get. <a href="?">Show everything</a>`},
			{"method=/shop.Cart/Put", "No calls yet"},
			{"target=dns:///shop&retrier=1&refresh=7", `href="?format=json&amp;retrier=1&amp;target=dns%3A%2F%2F%2Fshop"`},
			{"format=json", `"methods": [`},
		} {
			wantIn(t, get(t, p, tt.query).Body.String(), tt.want)
		}
		if body := get(t, p, "").Body.String(); strings.Contains(body, "http-equiv") {
			t.Errorf("without refresh the page is loaded again:\n%s", body)
		}
		wantIn(t, get(t, p, "").Body.String(), "no calls")
		wantIn(t, get(t, p, "window=all").Body.String(), "2 of 2 calls failed")
	})
}

// The page must say what Snapshot says: somebody reads each of these numbers aloud.
func TestPageShowsTheNumbers(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := retrier(t)
		c := dialFrom(t, r, "passthrough:///echo", "10.0.0.7:443")
		p := handler(t, r)
		for range 1234 {
			c.echo("ok")
		}
		c.echo("down 20ms:down ok")
		c.echo("full ok")
		c.echo("never")
		c.echo("down")
		_ = c.expand("down")
		body := get(t, p, "").Body.String()
		for _, part := range []string{
			"6 retries in 1,245 attempts, 0.5 %", "1,239 calls, 1,234 successes on the first attempt", // is it retrying?
			"9 failed attempts", "waits chosen: 5 by backoff, 1 by pushback", // why?
			"2 of 3 retried calls rescued", "2 of 6 retries succeeded", // is it helping?
			"3 of 1,239 calls failed", "<span class=\"name\">committed</span>", // what stopped it?
			`data-label="Calls">1,238<`, `data-label="Attempts">1,244<`, `data-label="Retries">6<`, `data-label="Retry share">0.5 %<`,
			`data-label="Rescued">2<`, `data-label="Failed">2<span class="sub">1 not retried</span><span class="sub">1 retried</span>`,
			"</b> retries left",
			"3 attempts in 3.02 s: UNAVAILABLE, wait of 1 s, UNAVAILABLE, wait of 2 s, OK",
			"retry after 7 s (pushback)", "stop: no attempts left", "<q>queue is full</q>", "10.0.0.7:443",
			"up to 4 attempts, retried after RESOURCE_EXHAUSTED or UNAVAILABLE",
		} {
			wantIn(t, body, part)
		}
	})
}

// What may have run has a column of its own, where methods must not run twice, and is no other stop.
func TestMayHaveRunIsAColumn(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := retrier(t)
		c := dial(t, r, "passthrough:///echo")
		p := handler(t, r)
		c.echo("down ok")
		if body := get(t, p, "").Body.String(); strings.Contains(body, "May have run") {
			t.Error("the table has a column May have run, although every method may run twice")
		}
		for range 3 {
			c.echo("down", grpcretry.WithUnsentOnly(true))
		}
		c.echo("gone")
		body := get(t, p, "").Body.String()
		wantIn(t, body, `data-label="Failed">4<span class="sub">4 not retried</span></td>`)
		wantIn(t, body, `<td role="cell" data-label="May have run">3</td>`)
		_, stops, _ := strings.Cut(body, `data-label="Stopped by">`)
		stops, _, _ = strings.Cut(stops, "</td>")
		if !strings.Contains(stops, "not_retryable <b>1</b>") || strings.Contains(stops, "may_have_run") {
			t.Errorf("stopped by %s, want not_retryable alone", stops)
		}
	})
}

// All calls are drawn on one scale, so that a short one does not look like a long one.
func TestCallsHaveOneTimeScale(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := retrier(t)
		c := dial(t, r, "passthrough:///echo")
		p := handler(t, r)
		c.echo("down ok") // in 1 s
		c.echo("full ok") // in 7 s
		body := get(t, p, "").Body.String()
		wantIn(t, body, "Every row is drawn from <b>0 to 7 s</b>")
		wantIn(t, body, `<line class="wait backoff" x1="0.00%" x2="14.29%"`)
		wantIn(t, body, `<line class="wait pushback" x1="0.00%" x2="100.00%"`)
	})
}

// In the first five minutes the page does not say everything twice.
func TestYoungPageDoesNotRepeatItself(t *testing.T) {
	bubble(t, func(t *testing.T) {
		r := retrier(t)
		c := dial(t, r, "passthrough:///echo")
		p := handler(t, r)
		c.echo("down ok")
		time.Sleep(Recent - time.Minute)
		for _, query := range []string{"", "window=all"} {
			body := get(t, p, query).Body.String()
			if strings.Contains(body, "Since the page was mounted: ") || strings.Contains(body, "In the last 5 min: ") {
				t.Errorf("?%s: the page repeats its answers for the other window, which is the same", query)
			}
		}
		time.Sleep(2 * time.Minute)
		wantIn(t, get(t, p, "").Body.String(), "Since the page was mounted: 1 retry in 2 attempts, 50 %")
		wantIn(t, get(t, p, "window=all").Body.String(), "In the last 5 min: ")
	})
}

// What a server, or whoever chooses a method, has written is shown, and does nothing else.
func TestWhatPeersSendIsEscaped(t *testing.T) {
	bubble(t, func(t *testing.T) {
		const evil = `"><script>alert(1)</script><img src=x onerror=alert(2)>'`
		r := retrier(t, grpcretry.WithMaxAttempts(2))
		c := dialFrom(t, r, "passthrough:///"+evil, evil)
		p := handler(t, r)
		c.echo("evil")
		_ = c.Invoke(t.Context(), "/evil"+evil+"/"+evil, nil, nil) // fails: nil is no message
		e := failedCall(evil, "/"+evil+"/"+evil, 2, evil, evil)
		p.sources[0].observe(t.Context(), e, callOf(e))
		for _, query := range []string{"", "window=all&refresh=5", "method=" + "%2Fevil%22%3E%3Cscript%3E",
			"target=%22%3E%3Cscript%3Ealert(1)%3C/script%3E"} {
			body := get(t, p, query).Body.String()
			for _, bad := range []string{"<script", "<img", "onerror=alert(2)>", "\u202e", "\x00", "\r"} {
				if strings.Contains(body, bad) {
					t.Errorf("?%s: the page has %q in it:\n%s", query, bad, body)
				}
			}
		}
		wantIn(t, get(t, p, "").Body.String(), "&lt;script&gt;alert(&#39;status&#39;)&lt;/script&gt;\ufffd\ufffd\ufffdgnihton\ufffd")
		json := get(t, p, "format=json").Body.String()
		if strings.ContainsAny(json, "<>&\x00\u202e") {
			t.Errorf("the JSON has <, >, &, or what is no graphic character in it:\n%s", json)
		}
		want(t, "the message in JSON", getJSON(t, p, "method="+echoMethod).Calls[0].Attempts[0].Message,
			"<script>alert('status')</script>\ufffd\ufffd\ufffdgnihton\ufffd")
	})
}

// A link to the page may be anybody's.
func TestWhatAQueryAsksForIsMadeFitToBeShown(t *testing.T) {
	p := handler(t, retrier(t))
	for _, name := range []string{"target", "method"} {
		body := get(t, p, name+"=%E2%80%AEevil%0A"+strings.Repeat("x", 1000)).Body.String()
		_, filter, _ := strings.Cut(body, "Only "+name+" ")
		filter, _, _ = strings.Cut(filter, ". <a")
		want(t, "the start of the "+name, strings.TrimRight(filter, "x…"), "\ufffdevil\ufffd")
		want(t, "a "+name+" that is too long", len(filter) > maxName, false)
	}
}

// FuzzPage has a peer write anything anywhere. The page has the same elements and the same
// attributes as with harmless words, and the JSON has the words.
func FuzzPage(f *testing.F) {
	f.Add("dns:///shop", "/shop.Cart/Get", "db-down", "10.0.0.7:443")
	f.Add(`"><script>alert(1)</script>`, `/'><svg onload=x>/`, `</title></svg></style>{{.}}`, "\x00\xff\u202e")
	f.Add(strings.Repeat("ä", 300), strings.Repeat("/", 300), strings.Repeat("\x80", 300), strings.Repeat("\n", 300))
	harmless := func(s string) string { // as empty, or with as many slashes
		if s == "" || strings.Trim(s, "/") == "" {
			return s
		}
		return "x"
	}
	f.Fuzz(func(t *testing.T, target, method, message, peer string) {
		page := func(target, method, message, peer string) (*Page, []xml.StartElement) {
			p, tell := told(t)
			e := failedCall(target, method, 2, message, peer)
			e.Attempts[1].Err = status.Error(codes.Unknown, message)
			tell(e)
			return p, elements(t, get(t, p, "").Body.Bytes())
		}
		p, got := page(target, method, message, peer)
		_, plain := page(harmless(target), "/s/m", harmless(message), harmless(peer))
		if g, w := shape(got), shape(plain); g != w {
			t.Errorf("elements with %q, %q, %q, %q:\ngot  %s\nwant %s", target, method, message, peer, g, w)
		}
		s := getJSON(t, p, "")
		for _, text := range []string{s.Calls[0].Target, s.Calls[0].Method, s.Calls[0].Attempts[0].Message, s.Calls[0].Attempts[1].Peer} {
			if !utf8.ValidString(text) || len(text) > maxName || strings.ContainsFunc(text, func(r rune) bool {
				return !unicode.IsGraphic(r) && r != unicode.ReplacementChar
			}) {
				t.Errorf("the JSON has %q in it, want at most %d bytes of graphic characters", text, maxName)
			}
		}
		if body := get(t, p, "format=json").Body.String(); !json.Valid([]byte(body)) || strings.ContainsAny(body, "<>") {
			t.Errorf("the JSON is not valid, or has < or > in it:\n%s", body)
		}
	})
}

// FuzzQuery asks for the page with any query. The page has the same elements as with harmless words, and
// its links lead to pages that it accepts; the JSON is a Snapshot; and an error repeats nothing of the query.
func FuzzQuery(f *testing.F) {
	for _, query := range []string{"", "format=json", "format=xml", "window=all&refresh=5", "refresh=0", "refresh=3600&retrier=1",
		"retrier=1073741824", "retrier=9999999999999999999999", "method=%2Fs%2Fm&target=x",
		"target=%22%3E%3Cscript%3Ealert(1)%3C/script%3E", "a=%zz", "format=json;window=all",
		"target=%E2%80%AE%00&method=" + strings.Repeat("%C3%A4", 300), "target=a&target=b&format=html&format=json",
		"refresh=%2B7&window=recent"} {
		f.Add(query)
	}
	f.Fuzz(func(t *testing.T, query string) {
		p := handler(t, retrier(t))
		asked, err := url.ParseQuery(query)
		w := ask(p, query)
		switch valid := err == nil && isQuery(asked); {
		case valid != (w.Code == http.StatusOK) || !valid && w.Code != http.StatusBadRequest:
			t.Errorf("?%q is %d, want it to be valid: %v", query, w.Code, valid)
		case !valid:
			if body := strings.TrimSpace(w.Body.String()); !slices.Contains(queryErrors, body) {
				t.Errorf("?%q is rejected with %q", query, body)
			}
		case asked.Get("format") == "json":
			decoder := json.NewDecoder(w.Body)
			decoder.DisallowUnknownFields()
			if err := decoder.Decode(new(Snapshot)); err != nil {
				t.Errorf("?%q: %v", query, err)
			}
		default:
			checkElements(t, p, asked, elements(t, w.Body.Bytes()))
		}
	})
}

var queryErrors = []string{"format: want html or json", "window: want recent or all", "refresh: want a number of seconds, 1 to 3600",
	"retrier: want a number, from 1", "the query is malformed",
	"query: want format, window, refresh, retrier, target, method, each at most once"}

// ask asks for the page with any query, also one that cannot be part of a URL.
func ask(p *Page, query string) *httptest.ResponseRecorder {
	w := httptest.NewRecorder()
	p.ServeHTTP(w, &http.Request{Method: http.MethodGet, URL: &url.URL{Path: "/", RawQuery: query}})
	return w
}

// isQuery reports whether the page accepts a query, by the package's documentation.
func isQuery(v url.Values) bool {
	within := func(value string, largest int64) bool {
		n, ok := new(big.Int).SetString(value, 10)
		return value == "" || ok && !strings.Contains(value, "_") && n.Sign() > 0 && n.Cmp(big.NewInt(largest)) <= 0
	}
	for key, values := range v {
		if !slices.Contains(strings.Fields("format window refresh retrier target method"), key) || len(values) > 1 {
			return false
		}
	}
	return slices.Contains([]string{"", "html", "json"}, v.Get("format")) && slices.Contains([]string{"", "recent", "all"}, v.Get("window")) &&
		within(v.Get("refresh"), 3600) && within(v.Get("retrier"), 1<<30)
}

// checkElements compares the page for a query with that for harmless words, and follows its links.
func checkElements(t *testing.T, p *Page, asked url.Values, got []xml.StartElement) {
	harmless := url.Values{}
	for _, key := range []string{"window", "refresh", "retrier"} {
		harmless.Set(key, asked.Get(key))
	}
	for _, key := range []string{"target", "method"} {
		if asked.Get(key) != "" {
			harmless.Set(key, "x")
		}
	}
	if g, w := shape(got), shape(elements(t, ask(p, harmless.Encode()).Body.Bytes())); g != w {
		t.Errorf("elements with %v:\ngot  %s\nwant %s", asked, g, w)
	}
	for _, e := range got {
		for _, a := range e.Attr {
			query, isQuery := strings.CutPrefix(a.Value, "?")
			if !isQuery || a.Name.Local != "href" {
				continue
			}
			if w := ask(p, query); w.Code != http.StatusOK {
				t.Errorf("the page for %v has a link to ?%s, which is %d", asked, query, w.Code)
			}
		}
	}
}

// shape is the names of elements and attributes.
func shape(all []xml.StartElement) string {
	var s strings.Builder
	for _, e := range all {
		s.WriteString(" " + e.Name.Local)
		for _, a := range e.Attr {
			s.WriteString("." + a.Name.Local)
		}
	}
	return s.String()
}
