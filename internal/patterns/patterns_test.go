package patterns

import (
	"slices"
	"strings"
	"testing"
)

func TestCheck(t *testing.T) {
	for _, tt := range []struct{ pattern, want string }{ // a part of the error, "" for none
		{"/pkg.Service/Method", ""},
		{"/pkg.Service/", ""},
		{"/sql/", ""},
		{"/http/api.example.com/GET", ""},
		{"/http/api.example.com/", ""},
		{"", "pkg.Service"},
		{"/", "pkg.Service"},
		{"//", "pkg.Service"},
		{"/pkg.Service", "pkg.Service"},
		{"pkg.Service/Method", "pkg.Service"},
		{"//Method", "pkg.Service"},
		{"/a//b", "pkg.Service"},
		{"/pkg.Service/\xff", "pkg.Service"},
		{"*", "pkg.Service"},
		{"/*/Method", "pkg.Service"},
		{"/pkg.Service/*", `want "/pkg.Service/" for all`},
		{"/pkg.Service/Get*", `want "/pkg.Service/" for all`},
		{"/sql/read orders", ""}, // the names of functions are up to the program
		{"/pkg.Service/ Method", `"/pkg.Service/ Method" has a blank`},
		{"/pkg.Service/Method ", `"/pkg.Service/Method " has a blank`},
		{"/pkg.Service/Method\n", `"/pkg.Service/Method\n" has a blank`},
		{"/pkg.Service /", `"/pkg.Service /" has a blank`},
		{"/pkg.Service/Me\x00thod", `"/pkg.Service/Me\x00thod" has a blank at the edge of a word, or a control character`},
	} {
		err := Check(tt.pattern)
		if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
			t.Errorf("Check(%q) = %v, want %q", tt.pattern, err, tt.want)
		}
	}
}

func TestPartsOfPatterns(t *testing.T) {
	for _, tt := range []struct {
		pattern, service, name string
		wide, proto            bool
		prefixes               []string
	}{
		{"/pkg.Service/Method", "/pkg.Service/", "pkg.Service", false, true, []string{"/pkg.Service/"}},
		{"/pkg.Service/", "/pkg.Service/", "pkg.Service", true, true, []string{"/pkg.Service/"}},
		{"/sql/read", "/sql/", "sql", false, false, []string{"/sql/"}},
		{"/http/a.b/GET", "/http/a.b/", "http/a.b", false, false, []string{"/http/a.b/", "/http/"}},
		{"", "", "", true, false, nil},
		{"/", "/", "", true, false, nil},
		{"name", "", "", false, false, nil},
		{"/name", "/", "", false, false, nil},
	} {
		if got := ServiceOf(tt.pattern); got != tt.service {
			t.Errorf("ServiceOf(%q) = %q, want %q", tt.pattern, got, tt.service)
		}
		if got := ServiceName(tt.pattern); got != tt.name {
			t.Errorf("ServiceName(%q) = %q, want %q", tt.pattern, got, tt.name)
		}
		if got := IsWide(tt.pattern); got != tt.wide {
			t.Errorf("IsWide(%q) = %t, want %t", tt.pattern, got, tt.wide)
		}
		if got := MayBeProto(tt.pattern); got != tt.proto {
			t.Errorf("MayBeProto(%q) = %t, want %t", tt.pattern, got, tt.proto)
		}
		if got := slices.Collect(Prefixes(tt.pattern)); !slices.Equal(got, tt.prefixes) {
			t.Errorf("Prefixes(%q) = %q, want %q", tt.pattern, got, tt.prefixes)
		}
	}
}

func TestTheLongestPatternWins(t *testing.T) {
	table := Table[string]{}
	for _, pattern := range []string{"", "/a.B/", "/a.B/C", "/http/", "/http/x.y/", "/http/x.y/GET", "/sql/"} {
		table[pattern] = pattern
	}
	for name, want := range map[string]string{
		"/a.B/C":           "/a.B/C",
		"/a.B/D":           "/a.B/",
		"/a.B/":            "/a.B/",
		"/a.BC/C":          "",
		"/http/x.y/GET":    "/http/x.y/GET",
		"/http/x.y/PUT":    "/http/x.y/",
		"/http/other/PUT":  "/http/",
		"/http/x.y/a/b/c":  "/http/x.y/",
		"/sql":             "/sql/",
		"/sql/read":        "/sql/",
		"/sqlite":          "",
		"sql":              "",
		"":                 "",
		"/":                "",
		"//":               "",
		"/x/http/x.y/GET/": "",
	} {
		if got := table.Of(name); got != want {
			t.Errorf("Of(%q) = %q, want %q", name, got, want)
		}
	}
}
