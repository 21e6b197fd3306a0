package sim

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"
	"unicode"

	"google.golang.org/grpc/codes"

	"github.com/grpcretry/grpcretry"
)

// This file reads and writes the JSON form of scenarios and results. It does not use the rules of
// encoding/json, which knows neither durations as strings nor the library's backoffs, nor where in
// a file a wrong value is.

// mostBytes is the largest size of a file of scenarios.
const mostBytes = 16 << 20

// ReadScenarios reads one scenario, or a list of them, from JSON, and checks them. An
// error names the field, as in groups[0].deadline, and its value.
func ReadScenarios(r io.Reader) ([]Scenario, error) {
	text, err := io.ReadAll(io.LimitReader(r, mostBytes+1))
	if err != nil {
		return nil, fmt.Errorf("sim: %w", err)
	}
	if len(text) > mostBytes {
		return nil, fmt.Errorf("sim: over %d bytes of scenarios", mostBytes)
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	var tree any
	if err := d.Decode(&tree); err != nil {
		return nil, fmt.Errorf("sim: not JSON: %w", err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("sim: there is more text after the scenario, at byte %d; put several scenarios into a list", d.InputOffset())
	}
	list, ok := tree.([]any)
	if !ok {
		s, err := readScenario("", tree)
		return []Scenario{s}, err
	}
	var all []Scenario
	for i, one := range list {
		s, err := readScenario(fmt.Sprintf("[%d]", i), one)
		if err != nil {
			return nil, err
		}
		all = append(all, s)
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("sim: the list has no scenario")
	}
	return all, nil
}

func readScenario(path string, tree any) (s Scenario, err error) {
	if err := decode(path, tree, reflect.ValueOf(&s).Elem()); err != nil {
		return Scenario{}, err
	}
	return s, s.Check()
}

// MarshalJSON writes a scenario in the form that [ReadScenarios] reads. Zero fields are left out. It
// fails for backoffs, classifiers and budgets that are not the library's, which have no form in
// JSON.
func (s Scenario) MarshalJSON() ([]byte, error) {
	return encoder{sparse: true}.bytes(s)
}

// MarshalJSON writes all fields of a result. Durations are seconds.
func (r Result) MarshalJSON() ([]byte, error) {
	type plain Result // without this method
	return encoder{seconds: true}.bytes(plain(r))
}

// MarshalJSON writes all fields of a summary. Durations are seconds.
func (s Summary) MarshalJSON() ([]byte, error) {
	return encoder{seconds: true}.bytes(s)
}

var (
	durationType = reflect.TypeFor[time.Duration]()
	codeType     = reflect.TypeFor[codes.Code]()
	jitterType   = reflect.TypeFor[grpcretry.Jitter]()
	backoffType  = reflect.TypeFor[grpcretry.Backoff]()
)

// backoffs are the backoffs that have a form in JSON, by their kind.
var backoffs = map[string]reflect.Type{
	"exponential":  reflect.TypeFor[grpcretry.Exponential](),
	"decorrelated": reflect.TypeFor[grpcretry.Decorrelated](),
	"constant":     reflect.TypeFor[constant](),
}

// constant is grpcretry.Constant with a name for its only number.
type constant struct{ Delay time.Duration }

// decode sets v to the JSON value at a path.
func decode(path string, tree any, v reflect.Value) error {
	switch v.Type() {
	case durationType:
		return decodeDuration(path, tree, v)
	case codeType:
		return decodeCode(path, tree, v)
	case jitterType:
		return decodeJitter(path, tree, v)
	case backoffType:
		return decodeBackoff(path, tree, v)
	}
	switch v.Kind() {
	case reflect.Struct:
		return decodeStruct(path, tree, v)
	case reflect.Slice:
		return decodeSlice(path, tree, v)
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		return decode(path, tree, v.Elem())
	case reflect.String:
		s, ok := tree.(string)
		v.SetString(s)
		return expect(ok, path, tree, "a string")
	case reflect.Bool:
		b, ok := tree.(bool)
		v.SetBool(b)
		return expect(ok, path, tree, "true or false")
	default:
		return decodeNumber(path, tree, v)
	}
}

func decodeNumber(path string, tree any, v reflect.Value) error {
	n, ok := tree.(json.Number)
	if !ok {
		return expect(false, path, tree, "a number")
	}
	switch v.Kind() {
	case reflect.Int:
		i, err := strconv.ParseInt(n.String(), 10, strconv.IntSize)
		v.SetInt(i)
		return expect(err == nil, path, tree, "a whole number")
	case reflect.Uint64:
		u, err := strconv.ParseUint(n.String(), 10, 64)
		v.SetUint(u)
		return expect(err == nil, path, tree, "a whole number of at least 0")
	default:
		f, err := n.Float64()
		v.SetFloat(f)
		return expect(err == nil, path, tree, "a number")
	}
}

func decodeStruct(path string, tree any, v reflect.Value) error {
	object, ok := tree.(map[string]any)
	if !ok {
		return expect(false, path, tree, "an object")
	}
	fields := fieldsOf(v.Type())
	for _, name := range sortedKeys(object) {
		i := slices.IndexFunc(fields, func(f field) bool { return f.name == name })
		if i < 0 {
			return fmt.Errorf("sim: %s: there is no such field, want one of %s", join(path, name), names(fields))
		}
		if object[name] == nil {
			continue // null means the same as leaving it out
		}
		if err := decode(join(path, name), object[name], v.Field(fields[i].index)); err != nil {
			return err
		}
	}
	return nil
}

func decodeSlice(path string, tree any, v reflect.Value) error {
	list, ok := tree.([]any)
	if !ok {
		return expect(false, path, tree, "a list")
	}
	v.Set(reflect.MakeSlice(v.Type(), 0, len(list))) // an empty list differs from none
	for i, one := range list {
		item := reflect.New(v.Type().Elem()).Elem()
		if err := decode(fmt.Sprintf("%s[%d]", path, i), one, item); err != nil {
			return err
		}
		v.Set(reflect.Append(v, item))
	}
	return nil
}

func decodeDuration(path string, tree any, v reflect.Value) error {
	s, _ := tree.(string)
	d, err := time.ParseDuration(s)
	v.SetInt(int64(d))
	return expect(err == nil, path, tree, `a duration such as "100ms" or "1.5s"`)
}

func decodeCode(path string, tree any, v reflect.Value) error {
	s, ok := tree.(string)
	for c := codes.OK; ok && c <= codes.Unauthenticated; c++ {
		if s == CodeName(c) {
			v.SetUint(uint64(c))
			return nil
		}
	}
	return expect(false, path, tree, `a status code such as "UNAVAILABLE"`)
}

func decodeJitter(path string, tree any, v reflect.Value) error {
	s, ok := tree.(string)
	for j := grpcretry.FullJitter; ok && j <= grpcretry.NoJitter; j++ {
		if s == j.String() {
			v.SetInt(int64(j))
			return nil
		}
	}
	return expect(false, path, tree, `"full", "equal", "proportional" or "none"`)
}

// decodeBackoff reads an object whose kind names one of the library's backoffs.
func decodeBackoff(path string, tree any, v reflect.Value) error {
	object, ok := tree.(map[string]any)
	if !ok {
		return expect(false, path, tree, "an object with a kind")
	}
	kind, _ := object["kind"].(string)
	t, ok := backoffs[kind]
	if !ok {
		return expect(false, join(path, "kind"), object["kind"], `"exponential", "decorrelated" or "constant"`)
	}
	b := reflect.New(t).Elem()
	if err := decodeStruct(path, without(object, "kind"), b); err != nil {
		return err
	}
	if c, ok := b.Interface().(constant); ok {
		b = reflect.ValueOf(grpcretry.Constant(c.Delay))
	}
	v.Set(b)
	return nil
}

func without(object map[string]any, name string) map[string]any {
	rest := map[string]any{}
	for k, v := range object {
		if k != name {
			rest[k] = v
		}
	}
	return rest
}

func expect(ok bool, path string, tree any, want string) error {
	if ok {
		return nil
	}
	if path == "" {
		path = "the scenario"
	}
	text, err := json.Marshal(tree)
	if err != nil || len(text) > 60 {
		text = []byte("of another kind")
	}
	return fmt.Errorf("sim: %s is %s, want %s", path, text, want)
}

func join(path, name string) string {
	if path == "" {
		return name
	}
	return path + "." + name
}

// A field is a field of a struct that has a form in JSON.
type field struct {
	name  string
	index int
}

// fieldsOf returns the exported fields, without functions and interfaces other than the backoffs.
func fieldsOf(t reflect.Type) (fields []field) {
	for i := range t.NumField() {
		f := t.Field(i)
		kind := f.Type.Kind()
		foreign := kind == reflect.Func || kind == reflect.Interface && f.Type != backoffType
		if f.IsExported() && !foreign {
			fields = append(fields, field{lowerFirst(f.Name), i})
		}
	}
	return fields
}

func names(fields []field) string {
	var all []string
	for _, f := range fields {
		all = append(all, f.name)
	}
	return strings.Join(all, ", ")
}

// lowerFirst turns MaxAttempts into maxAttempts, and P99 into p99.
func lowerFirst(name string) string {
	r := []rune(name)
	r[0] = unicode.ToLower(r[0])
	return string(r)
}

// CodeName returns a status code's name on the wire, such as "UNAVAILABLE".
func CodeName(c codes.Code) string {
	switch c {
	case codes.OK:
		return "OK"
	case codes.Canceled:
		return "CANCELLED"
	}
	var b strings.Builder
	for i, r := range c.String() {
		if i > 0 && unicode.IsUpper(r) {
			b.WriteByte('_')
		}
		b.WriteRune(unicode.ToUpper(r))
	}
	return b.String()
}

// An encoder writes values as JSON, in the order of their fields.
type encoder struct {
	sparse  bool // leaves zero fields out
	seconds bool // durations as numbers
}

func (e encoder) bytes(v any) ([]byte, error) {
	var b bytes.Buffer
	if err := e.write(&b, reflect.ValueOf(v)); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}

func (e encoder) write(b *bytes.Buffer, v reflect.Value) error {
	switch v.Type() {
	case durationType:
		d := time.Duration(v.Int())
		if e.seconds {
			return e.number(b, d.Seconds())
		}
		return writeString(b, d.String())
	case codeType:
		return writeString(b, CodeName(codes.Code(v.Uint())))
	case jitterType:
		return writeString(b, grpcretry.Jitter(v.Int()).String())
	case backoffType:
		return e.backoff(b, v.Elem())
	}
	switch v.Kind() {
	case reflect.Struct:
		return e.object(b, v, "")
	case reflect.Slice:
		return e.list(b, v)
	case reflect.Pointer:
		return e.write(b, v.Elem())
	case reflect.String:
		return writeString(b, v.String())
	case reflect.Float64:
		return e.number(b, v.Float())
	default:
		text, err := json.Marshal(v.Interface()) // maps, whole numbers, booleans
		b.Write(text)
		return err
	}
}

// object writes a struct, with kind, unless empty, as its first field.
func (e encoder) object(b *bytes.Buffer, v reflect.Value, kind string) error {
	b.WriteByte('{')
	first := true
	name := func(name string) error {
		if !first {
			b.WriteByte(',')
		}
		first = false
		err := writeString(b, name)
		b.WriteByte(':')
		return err
	}
	if kind != "" {
		if err := errors.Join(name("kind"), writeString(b, kind)); err != nil {
			return err
		}
	}
	if lost := lostIn(v); lost != "" {
		return fmt.Errorf("sim: %s.%s cannot be written as JSON", v.Type(), lost)
	}
	for _, f := range fieldsOf(v.Type()) {
		value := v.Field(f.index)
		if e.sparse && value.IsZero() {
			continue
		}
		if err := name(f.name); err != nil {
			return err
		}
		if err := e.write(b, value); err != nil {
			return err
		}
	}
	b.WriteByte('}')
	return nil
}

// lostIn returns the name of a field that is set and has no form in JSON.
func lostIn(v reflect.Value) string {
	fields := fieldsOf(v.Type())
	for i := range v.NumField() {
		f := v.Type().Field(i)
		known := slices.ContainsFunc(fields, func(known field) bool { return known.index == i })
		if f.IsExported() && !known && !v.Field(i).IsZero() {
			return f.Name
		}
	}
	return ""
}

func (e encoder) list(b *bytes.Buffer, v reflect.Value) error {
	b.WriteByte('[')
	for i := range v.Len() {
		if i > 0 {
			b.WriteByte(',')
		}
		if err := e.write(b, v.Index(i)); err != nil {
			return err
		}
	}
	b.WriteByte(']')
	return nil
}

func (e encoder) backoff(b *bytes.Buffer, v reflect.Value) error {
	if c, ok := v.Interface().(grpcretry.Constant); ok {
		v = reflect.ValueOf(constant{time.Duration(c)})
	}
	for kind, t := range backoffs {
		if v.Type() == t {
			return e.object(b, v, kind)
		}
	}
	return fmt.Errorf("sim: a backoff of type %s cannot be written as JSON", v.Type())
}

// number writes a number, or null if JSON has no form for it.
func (e encoder) number(b *bytes.Buffer, f float64) error {
	if math.IsNaN(f) || math.IsInf(f, 0) {
		b.WriteString("null")
		return nil
	}
	text, err := json.Marshal(f)
	b.Write(text)
	return err
}

func writeString(b *bytes.Buffer, s string) error {
	text, err := json.Marshal(s)
	b.Write(text)
	return err
}

func sortedKeys(object map[string]any) []string {
	var keys []string
	for k := range object {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
