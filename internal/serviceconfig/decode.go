package serviceconfig

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"unicode"

	"github.com/grpcretry/grpcretry/internal/errtype"
)

// decode reads the JSON into file. encoding/json decides what is accepted; its errors, however, lack
// the indexes of arrays, and those of UnmarshalJSON the path altogether, so an inspector then goes
// through the values one by one. It returns a note for each key that is unknown or repeated.
func decode(text string, file *serviceConfig) ([]string, error) {
	if text == "" {
		return nil, errors.New("the service config is empty, want a JSON object")
	}
	err := json.Unmarshal([]byte(text), file)
	if syntax, ok := errtype.As[*json.SyntaxError](err); ok {
		return nil, fmt.Errorf("%s: not JSON: %w", position(text, syntax.Offset), err)
	}
	var in inspector
	if found := in.value("", []byte(text), reflect.TypeFor[serviceConfig]()); found != nil {
		return nil, found
	}
	if err != nil {
		return nil, fmt.Errorf("the service config: %w", err)
	}
	return in.notes, nil
}

// position returns the line and the column, in bytes, of the last of the first n bytes.
func position(text string, n int64) string {
	before := text[:max(0, min(int(n), len(text))-1)]
	line := strings.Count(before, "\n") + 1
	column := len(before) - strings.LastIndex(before, "\n")
	return fmt.Sprintf("line %d, column %d", line, column)
}

// An inspector walks through a JSON text and the type it is decoded into, side by side, and finds
// the value that cannot be decoded.
type inspector struct{ notes []string }

var unmarshaler = reflect.TypeFor[json.Unmarshaler]()

func (in *inspector) value(path string, raw []byte, t reflect.Type) error {
	raw = bytes.TrimSpace(raw)
	switch {
	case reflect.PointerTo(t).Implements(unmarshaler):
		return scalar(path, raw, t)
	case string(raw) == "null":
		return nil
	case t.Kind() == reflect.Pointer:
		return in.value(path, raw, t.Elem())
	case t.Kind() == reflect.Struct && raw[0] == '{':
		return in.object(path, raw, t)
	case t.Kind() == reflect.Slice && raw[0] == '[':
		return in.list(path, raw, t.Elem())
	default:
		return scalar(path, raw, t)
	}
}

func (in *inspector) object(path string, raw []byte, t reflect.Type) error {
	seen := map[string]bool{}
	for key, value := range members(raw) {
		f, known := t.FieldByNameFunc(func(name string) bool { return strings.EqualFold(name, key) })
		if !known {
			in.notes = append(in.notes, fmt.Sprintf("%s: the key %q is unknown, so it is ignored", place(path), shortened([]byte(key))))
			continue
		}
		path := join(path, jsonName(f.Name))
		if seen[f.Name] {
			in.notes = append(in.notes, path+": appears twice, and what follows adds to the first or replaces it")
		}
		seen[f.Name] = true
		if err := in.value(path, value, f.Type); err != nil {
			return err
		}
	}
	return nil
}

func (in *inspector) list(path string, raw []byte, t reflect.Type) error {
	var elements []json.RawMessage
	if err := json.Unmarshal(raw, &elements); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	for i, e := range elements {
		if err := in.value(fmt.Sprintf("%s[%d]", path, i), e, t); err != nil {
			return err
		}
	}
	return nil
}

// members yields the keys and values of a JSON object in their order, repeated ones included.
func members(raw []byte) func(yield func(string, json.RawMessage) bool) {
	return func(yield func(string, json.RawMessage) bool) {
		d := json.NewDecoder(bytes.NewReader(raw))
		if _, err := d.Token(); err != nil {
			return
		}
		for d.More() {
			key, err := d.Token()
			name, isText := key.(string)
			var value json.RawMessage
			if err != nil || !isText || d.Decode(&value) != nil || !yield(name, value) {
				return
			}
		}
	}
}

// scalar decodes a value by itself, and says what is wrong with it.
func scalar(path string, raw []byte, t reflect.Type) error {
	err := json.Unmarshal(raw, reflect.New(t).Interface())
	if err == nil {
		return nil
	}
	path = place(path)
	wrong, ok := errtype.As[*json.UnmarshalTypeError](err)
	if !ok {
		return fmt.Errorf("%s: %w", path, err)
	}
	return fmt.Errorf("%s: %s, %s", path, shortened(raw), wanted(wrong.Type.Kind(), raw))
}

// wanted describes a kind of value to somebody who wrote another one.
func wanted(kind reflect.Kind, raw []byte) string {
	number := raw[0] == '-' || '0' <= raw[0] && raw[0] <= '9'
	switch kind {
	case reflect.Int, reflect.Int64:
		if number && !bytes.ContainsAny(raw, ".eE") {
			return "out of range"
		}
		return "want a whole number, in digits"
	case reflect.Float64:
		if number {
			return "out of range"
		}
		return "want a number"
	case reflect.Bool:
		return "want true or false"
	case reflect.String:
		return "want a string"
	case reflect.Slice:
		return "want an array"
	default:
		return "want an object"
	}
}

// shortened returns the beginning of a JSON value, enough to find it.
func shortened(raw []byte) string {
	const most = 60
	if len(raw) <= most {
		return string(raw)
	}
	return strings.ToValidUTF8(string(raw[:most]), "") + "..."
}

// place returns the path, or words for the empty one.
func place(path string) string {
	if path == "" {
		return "the service config"
	}
	return path
}

func join(path, field string) string {
	if path == "" {
		return field
	}
	return path + "." + field
}

// jsonName returns the name of a field as service configs spell it.
func jsonName(field string) string {
	return string(unicode.ToLower(rune(field[0]))) + field[1:]
}
