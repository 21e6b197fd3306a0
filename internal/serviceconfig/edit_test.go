package serviceconfig

import (
	"encoding/json"
	"iter"
	"strconv"
	"strings"
)

// edit rewrites the members of a JSON object one by one, "" for none, and adds others at the end.
// A text that is no object stays.
func edit(text string, each func(key, value string) string, more ...string) string {
	if !strings.HasPrefix(strings.TrimSpace(text), "{") {
		return text
	}
	var all []string
	for key, value := range members([]byte(text)) {
		if m := each(key, string(value)); m != "" {
			all = append(all, m)
		}
	}
	return "{" + strings.Join(append(all, more...), ", ") + "}"
}

func without(text, key string) string {
	return edit(text, func(k, value string) string {
		if strings.EqualFold(k, key) {
			return ""
		}
		return member(k, value)
	})
}

func member(key, value string) string {
	quoted, err := json.Marshal(key)
	if err != nil {
		return strconv.Quote(key)
	}
	return string(quoted) + ": " + value
}

// elements yields the elements of a JSON array.
func elements(text string) iter.Seq[string] {
	return func(yield func(string) bool) {
		var list []json.RawMessage
		if json.Unmarshal([]byte(text), &list) != nil {
			return
		}
		for _, e := range list {
			if !yield(string(e)) {
				return
			}
		}
	}
}
