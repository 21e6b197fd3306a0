// Package patterns has the syntax of the names by which options choose methods: "/pkg.Service/Method" for one,
// "/pkg.Service/" for all of a service and, for functions, patterns with more slashes.
package patterns

import (
	"fmt"
	"iter"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Check returns an error that says what a pattern should look like, if it is none.
func Check(pattern string) error {
	words := strings.Split(pattern, "/")
	last := len(words) - 1
	if before, _, star := strings.Cut(pattern, "*"); star && Check(ServiceOf(before)) == nil {
		return fmt.Errorf("pattern %q, want %q for all methods of a service", pattern, ServiceOf(before))
	}
	if last < 2 || strings.Contains(pattern, "*") || words[0] != "" || slices.Contains(words[1:last], "") || !utf8.ValidString(pattern) {
		return fmt.Errorf(`pattern %q, want "/pkg.Service/Method" or "/pkg.Service/"`, pattern)
	}
	if slices.ContainsFunc(words, isOdd) {
		return fmt.Errorf("pattern %q has a blank at the edge of a word, or a control character", pattern)
	}
	return nil
}

// isOdd reports whether a word has what nobody writes on purpose. A blank within may belong to a function's name.
func isOdd(word string) bool {
	return strings.TrimSpace(word) != word || strings.ContainsFunc(word, unicode.IsControl)
}

// IsWide reports whether a pattern stands for all names that begin with it, and not for one method. "" stands for
// all names.
func IsWide(pattern string) bool { return pattern == "" || strings.HasSuffix(pattern, "/") }

// ServiceOf returns "/pkg.Service/" for "/pkg.Service/Method".
func ServiceOf(method string) string { return method[:strings.LastIndexByte(method, '/')+1] }

// ServiceName returns "pkg.Service" for "/pkg.Service/Method" or "/pkg.Service/".
func ServiceName(pattern string) string { return strings.Trim(ServiceOf(pattern), "/") }

// Prefixes returns the patterns that apply to all names that begin with them, the longest first:
// "/pkg.Service/" for a method, "/http/api.example.com/" and "/http/" for "/http/api.example.com/GET".
func Prefixes(name string) iter.Seq[string] {
	return func(yield func(string) bool) {
		for prefix := ServiceOf(name); len(prefix) > 1 && yield(prefix); {
			prefix = ServiceOf(prefix[:len(prefix)-1])
		}
	}
}

// MayBeProto reports whether a pattern looks like that of a proto's service or method, and not like
// one for functions, such as "/sql/" or "/http/api.example.com/".
func MayBeProto(pattern string) bool {
	return strings.Count(pattern, "/") == 2 && strings.Contains(ServiceOf(pattern), ".")
}

// A Table has a value for each of some patterns, and one for "", which stands for all other names.
type Table[V any] map[string]V

// Of returns the value for a method, or for a function's name: that of the longest pattern that fits.
func (t Table[V]) Of(method string) V {
	if v, ok := t[method]; ok {
		return v
	}
	for prefix := range Prefixes(method) {
		if v, ok := t[prefix]; ok {
			return v
		}
	}
	if len(method) > 1 && strings.LastIndexByte(method, '/') == 0 {
		if v, ok := t[method+"/"]; ok { // a function's name may have no second slash
			return v
		}
	}
	return t[""]
}
