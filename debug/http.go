package debug

import (
	"bytes"
	"crypto/sha256"
	_ "embed" // for the template and its style
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"html/template"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
)

//go:embed page.html
var pageHTML string

//go:embed page.css
var pageCSS string

var page = template.Must(template.New("page").Parse(pageHTML))

// contentSecurityPolicy lets the page use its own style and its own icon, and nothing else:
// should an escape ever be missing, a script of a peer would still not run.
var contentSecurityPolicy = func() string {
	hash := sha256.Sum256([]byte(pageCSS))
	return "default-src 'none'; style-src 'sha256-" + base64.StdEncoding.EncodeToString(hash[:]) +
		"'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
}()

// ServeHTTP implements [http.Handler]: it writes the page, or a [Snapshot] as JSON. It accepts
// GET and HEAD, whatever the path, and rejects a query that it does not understand with 400.
func (p *Page) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("Content-Security-Policy", contentSecurityPolicy)
	h.Set("X-Content-Type-Options", "nosniff")
	h.Set("Referrer-Policy", "no-referrer")
	h.Set("Cache-Control", "no-store")
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		h.Set("Allow", "GET, HEAD")
		http.Error(w, "only GET and HEAD", http.StatusMethodNotAllowed)
		return
	}
	q, err := parseQuery(r.URL.RawQuery)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	var body bytes.Buffer
	contentType := "text/html; charset=utf-8"
	if s := p.snapshot(q.filter); q.json {
		contentType = "application/json"
		encoder := json.NewEncoder(&body)
		encoder.SetIndent("", "  ")
		err = encoder.Encode(s)
	} else {
		err = page.Execute(&body, newView(&s, q))
	}
	if err != nil {
		http.Error(w, "debug page: "+err.Error(), http.StatusInternalServerError)
		return
	}
	h.Set("Content-Type", contentType)
	h.Set("Content-Length", strconv.Itoa(body.Len()))
	_, _ = body.WriteTo(w) // whoever has gone away needs no error
}

// A query is what the reader asks for; the package comment has the list.
type query struct {
	filter
	json    bool
	all     bool // since the page was mounted, not the last minutes
	refresh int  // seconds; 0: never
}

// parseQuery refuses keys and values that mean nothing, and does not repeat them: they may be from
// a stranger.
func parseQuery(raw string) (q query, err error) {
	v, err := url.ParseQuery(raw)
	if err != nil {
		return q, errors.New("the query is malformed")
	}
	for key, values := range v {
		if !slices.Contains(queryKeys, key) || len(values) > 1 {
			return q, fmt.Errorf("query: want %s, each at most once", strings.Join(queryKeys, ", "))
		}
	}
	switch v.Get("format") {
	case "", "html":
	case "json":
		q.json = true
	default:
		return q, fmt.Errorf("format: want html or json")
	}
	switch v.Get("window") {
	case "", "recent":
	case "all":
		q.all = true
	default:
		return q, fmt.Errorf("window: want recent or all")
	}
	if q.refresh, err = number1To(3600, v.Get("refresh")); err != nil {
		return q, fmt.Errorf("refresh: want a number of seconds, 1 to 3600")
	}
	if q.retrier, err = number1To(1<<30, v.Get("retrier")); err != nil {
		return q, fmt.Errorf("retrier: want a number, from 1")
	}
	q.target, q.method = v.Get("target"), v.Get("method")
	return q, nil
}

var queryKeys = []string{"format", "window", "refresh", "retrier", "target", "method"}

// number1To reads a number of 1 … largest; "" is 0.
func number1To(largest int, s string) (int, error) {
	if s == "" {
		return 0, nil
	}
	n, err := strconv.Atoi(s)
	if err == nil && (n < 1 || n > largest) {
		err = strconv.ErrRange
	}
	return n, err
}

// link is the query as a relative address.
func (q query) link() template.URL {
	v := url.Values{}
	set := func(when bool, key, value string) {
		if when {
			v.Set(key, value)
		}
	}
	set(q.json, "format", "json")
	set(q.all, "window", "all")
	set(q.refresh > 0, "refresh", strconv.Itoa(q.refresh))
	set(q.retrier > 0, "retrier", strconv.Itoa(q.retrier))
	set(q.target != "", "target", q.target)
	set(q.method != "", "method", q.method)
	return template.URL("?" + v.Encode())
}
