// Package serviceconfig reads the retryPolicy, hedgingPolicy and retryThrottling of a gRPC service
// config (gRFC A6 #integration-with-service-config). It accepts what grpc-go accepts, with the same
// values, and rejects what grpc-go rejects; docs/service-config.md lists the differences.
package serviceconfig

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
)

// A Config is what a service config says about retries, hedging and throttling.
type Config struct {
	Methods    []Method    // the entries of methodConfig that name something, in order, those without a policy included
	Throttling *Throttling // nil without retryThrottling
	Notes      []string    // values that were changed or look like mistakes, each beginning with its path in the JSON
}

// A Method is one entry of methodConfig.
type Method struct {
	Path    string   // its place in the JSON: "methodConfig[0]"
	Names   []string // "/pkg.Service/Method", "/pkg.Service/", or "" for the default entry
	Retry   *Retry   // at most one of the two policies is set
	Hedging *Hedging
}

// Retry is a retryPolicy.
type Retry struct {
	MaxAttempts                int           // 2 … 5, the first attempt included
	InitialBackoff, MaxBackoff time.Duration // above 0; MaxBackoff may be the smaller one
	BackoffMultiplier          float64       // above 0, possibly below 1
	Codes                      []codes.Code  // without OK and without repetitions; never nil, but empty if OK was the only one
}

// Hedging is a hedgingPolicy.
type Hedging struct {
	MaxAttempts   int           // 2 … 5, the first attempt included
	Delay         time.Duration // at least 0; 0, the default, sends all attempts immediately
	NonFatalCodes []codes.Code  // without OK and without repetitions; never nil
}

// Throttling is a retryThrottling. Decimals beyond the third are still there; A6 ignores them.
type Throttling struct {
	MaxTokens  float64 // 0.001 … 1000
	TokenRatio float64 // at least 0.001
}

// Of returns the entry that applies to a method, "/pkg.Service/Method": the one with its name, or
// else with its service, or else the default; nil if none does. One entry applies: an entry
// without a policy hides the policy of a wider one.
func (c *Config) Of(method string) *Method {
	service := method[:strings.LastIndex(method, "/")+1]
	for _, name := range []string{method, service, ""} {
		for i := range c.Methods {
			if slices.Contains(c.Methods[i].Names, name) {
				return &c.Methods[i]
			}
		}
	}
	return nil
}

// Parse reads a service config. Its errors begin with the path of the value in the JSON,
// for example "methodConfig[0].retryPolicy.maxAttempts", or with the line and column of a syntax
// error. An empty text is an error.
func Parse(text string) (*Config, error) {
	var file serviceConfig
	notes, err := decode(text, &file)
	if err != nil {
		return nil, err
	}
	r := reader{Config: Config{Notes: notes}, seen: map[string]string{}}
	if err := r.methods(file.MethodConfig); err != nil {
		return nil, err
	}
	if err := r.throttling(file.RetryThrottling); err != nil {
		return nil, err
	}
	return &r.Config, nil
}

// A reader checks the decoded JSON and converts it to a Config.
type reader struct {
	Config
	seen map[string]string // the path in the JSON of every name so far
}

func (r *reader) note(format string, args ...any) {
	r.Notes = append(r.Notes, fmt.Sprintf(format, args...))
}

func (r *reader) methods(list *[]methodConfig) error {
	if list == nil {
		return nil
	}
	for i, entry := range *list {
		path := fmt.Sprintf("methodConfig[%d]", i)
		if entry.Name == nil { // grpc-go does not look at the rest of such an entry
			r.note("%s.name: missing, so the entry applies to no method", path)
			continue
		}
		if err := r.method(path, entry); err != nil {
			return err
		}
	}
	return nil
}

func (r *reader) method(path string, entry methodConfig) (err error) {
	m := Method{Path: path}
	if entry.RetryPolicy != nil && entry.HedgingPolicy != nil {
		return fmt.Errorf("%s: a retryPolicy and a hedgingPolicy, want at most one of them", path)
	}
	if m.Retry, err = r.retry(path+".retryPolicy", entry.RetryPolicy); err != nil {
		return err
	}
	if m.Hedging, err = r.hedging(path+".hedgingPolicy", entry.HedgingPolicy); err != nil {
		return err
	}
	if m.Names, err = r.names(path+".name", *entry.Name); err != nil {
		return err
	}
	if len(m.Names) == 0 {
		r.note("%s.name: empty, so the entry applies to no method", path)
		return nil
	}
	r.Methods = append(r.Methods, m)
	return nil
}

func (r *reader) names(path string, list []methodName) ([]string, error) {
	var names []string
	for i, n := range list {
		path := fmt.Sprintf("%s[%d]", path, i)
		name := "/" + n.Service + "/" + n.Method
		switch {
		case n.Service == "" && n.Method != "":
			return nil, fmt.Errorf("%s.service: missing or empty, although there is a method, %q", path, n.Method)
		case n.Service == "":
			name = ""
		}
		if first, twice := r.seen[name]; twice {
			return nil, fmt.Errorf("%s: the name %q appears twice, first in %s", path, name, first)
		}
		r.seen[name] = path
		names = append(names, name)
	}
	return names, nil
}

// retry checks a retryPolicy as A6 #validation-of-retrypolicy specifies.
func (r *reader) retry(path string, p *retryPolicy) (*Retry, error) {
	if p == nil {
		return nil, nil
	}
	n, err := r.maxAttempts(path+".maxAttempts", p.MaxAttempts)
	if err != nil {
		return nil, err
	}
	const wait = `a duration above 0, such as "0.1s"`
	if err := above0(path+".initialBackoff", p.InitialBackoff, wait); err != nil {
		return nil, err
	}
	if err := above0(path+".maxBackoff", p.MaxBackoff, wait); err != nil {
		return nil, err
	}
	if err := above0(path+".backoffMultiplier", p.BackoffMultiplier, "a number above 0"); err != nil {
		return nil, err
	}
	if len(p.RetryableStatusCodes) == 0 {
		return nil, fmt.Errorf("%s.retryableStatusCodes: missing or empty, want at least one status code", path)
	}
	initial, longest := time.Duration(p.InitialBackoff.value), time.Duration(p.MaxBackoff.value)
	if initial > longest {
		r.note("%s.initialBackoff: %v is above maxBackoff, %v, which limits it", path, initial, longest)
	}
	return &Retry{
		MaxAttempts:       n,
		InitialBackoff:    initial,
		MaxBackoff:        longest,
		BackoffMultiplier: p.BackoffMultiplier.value,
		Codes:             r.codes(path+".retryableStatusCodes", p.RetryableStatusCodes),
	}, nil
}

// hedging checks a hedgingPolicy as A6 #validation-of-hedgingpolicy specifies.
func (r *reader) hedging(path string, p *hedgingPolicy) (*Hedging, error) {
	if p == nil {
		return nil, nil
	}
	n, err := r.maxAttempts(path+".maxAttempts", p.MaxAttempts)
	if err != nil {
		return nil, err
	}
	var delay time.Duration
	if p.HedgingDelay != nil {
		delay = time.Duration(*p.HedgingDelay)
	}
	if delay < 0 {
		return nil, fmt.Errorf("%s.hedgingDelay: %v, want a duration of at least 0", path, delay)
	}
	return &Hedging{n, delay, r.codes(path+".nonFatalStatusCodes", p.NonFatalStatusCodes)}, nil
}

// attemptsLimit is the most attempts that a service config can have (A6
// #maximum-number-of-retries).
const attemptsLimit = 5

func (r *reader) maxAttempts(path string, n optional[int]) (int, error) {
	switch {
	case !n.set:
		return 0, fmt.Errorf("%s: missing, want a whole number of at least 2", path)
	case n.value < 2:
		return 0, fmt.Errorf("%s: %d, want a whole number of at least 2", path, n.value)
	case n.value > attemptsLimit:
		r.note("%s: %d counts as %d, the most that gRPC allows", path, n.value, attemptsLimit)
	}
	return min(n.value, attemptsLimit), nil
}

// codes returns the list without repetitions, as the set that it is, and without OK.
func (r *reader) codes(path string, list []statusCode) []codes.Code {
	all := make([]codes.Code, 0, len(list))
	for i, c := range list {
		switch c := codes.Code(c); {
		case c == codes.OK:
			r.note("%s[%d]: OK is ignored, because a call that succeeded is not retried", path, i)
		case !slices.Contains(all, c):
			all = append(all, c)
		}
	}
	return all
}

func (r *reader) throttling(t *retryThrottling) error {
	if t == nil {
		return nil
	}
	const tokens, ratio = "retryThrottling.maxTokens", "retryThrottling.tokenRatio"
	if err := above0(tokens, t.MaxTokens, "above 0 and at most 1000"); err != nil {
		return err
	}
	if t.MaxTokens.value > 1000 {
		return fmt.Errorf("%s: %v, want above 0 and at most 1000", tokens, t.MaxTokens.value)
	}
	if err := above0(ratio, t.TokenRatio, "a number above 0"); err != nil {
		return err
	}
	if err := r.decimals(tokens, t.MaxTokens.value); err != nil {
		return err
	}
	if err := r.decimals(ratio, t.TokenRatio.value); err != nil {
		return err
	}
	r.Throttling = &Throttling{t.MaxTokens.value, t.TokenRatio.value}
	return nil
}

// decimals rejects a number of which A6 sees nothing because it ignores decimals beyond the third.
func (r *reader) decimals(path string, x float64) error {
	cut := float64(int64(min(x, 1e12)*1000+1e-6)) / 1000 // as NewThrottle cuts; 1.001 × 1000 is below 1001
	switch {
	case cut == 0:
		return fmt.Errorf("%s: %v, want at least 0.001: decimals beyond the third are ignored", path, x)
	case x-cut > 1e-9 && x < 1e12:
		r.note("%s: %v counts as %v, because decimals beyond the third are ignored", path, x, cut)
	}
	return nil
}

// above0 rejects a value that is missing, 0 or negative.
func above0[T duration | float64](path string, v optional[T], want string) error {
	switch {
	case !v.set:
		return fmt.Errorf("%s: missing, want %s", path, want)
	case !(v.value > 0):
		return fmt.Errorf("%s: %v, want %s", path, v.value, want)
	default:
		return nil
	}
}
