package balancer

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"google.golang.org/grpc/serviceconfig"

	"github.com/grpcretry/grpcretry/internal/tried"
)

// The names of the fields of a service config that choose a load-balancing policy; the second is the older
// one.
const (
	configField = "loadBalancingConfig"
	policyField = "loadBalancingPolicy"
)

// ServiceConfig returns a service config, an object in JSON, with the policy as its loadBalancingConfig,
// for [grpc.WithDefaultServiceConfig] and for name resolvers. A config that names the policy already is
// returned as it is, also if the policy is the childPolicy of another one, such as outlier detection.
//
// The error says what is wrong if the config is not a JSON object, and names the other policy if
// loadBalancingConfig or the older loadBalancingPolicy names one. Of a list of policies gRPC uses the first
// that it knows; here, the first must be this one. Everything else in the config is left for gRPC to check.
func ServiceConfig(config string) (string, error) {
	tried.Want()
	fields, err := fieldsOf(config)
	if err != nil {
		return "", fmt.Errorf("balancer: ServiceConfig: %w", err)
	}
	named := false
	for _, field := range slices.Sorted(maps.Keys(fields)) {
		names, err := policyNames(field, fields[field])
		switch {
		case err != nil:
			return "", fmt.Errorf("balancer: ServiceConfig: %s: %w", field, err)
		case len(names) > 0 && names[len(names)-1] != Name:
			return "", fmt.Errorf("balancer: ServiceConfig: %s names the policy %s, not %s", field, strings.Join(names, " with the childPolicy "), Name)
		}
		named = named || len(names) > 0 && strings.EqualFold(field, configField)
	}
	if named {
		return config, nil
	}
	maps.DeleteFunc(fields, func(field string, _ json.RawMessage) bool { return strings.EqualFold(field, configField) }) // it is null
	fields[configField] = json.RawMessage(`[{"` + Name + `":{}}]`)
	whole, err := json.Marshal(fields)
	return string(whole), err
}

// fieldsOf returns the fields of a JSON object.
func fieldsOf(text string) (map[string]json.RawMessage, error) {
	var fields map[string]json.RawMessage
	if err := json.Unmarshal([]byte(text), &fields); err != nil {
		return nil, fmt.Errorf("not a JSON object: %w", err)
	}
	if fields == nil {
		return nil, errors.New("not a JSON object: null")
	}
	return fields, nil
}

// policyNames returns the policy that a field of a service config names, and its first child policy, and so
// on; none if the field names no policy. As in gRPC, upper and lower case mean the same in a field's name.
func policyNames(field string, value json.RawMessage) ([]string, error) {
	isConfig, isPolicy := strings.EqualFold(field, configField), strings.EqualFold(field, policyField)
	switch {
	case !isConfig && !isPolicy, string(value) == "null":
		return nil, nil
	case isConfig:
		return firstPolicy(value)
	}
	var name string
	if err := json.Unmarshal(value, &name); err != nil {
		return nil, err
	}
	return []string{name}, nil
}

// firstPolicy returns the name of the first policy in a list, and those of its children.
func firstPolicy(list json.RawMessage) ([]string, error) {
	var policies []map[string]json.RawMessage
	if err := json.Unmarshal(list, &policies); err != nil {
		return nil, err
	}
	if len(policies) == 0 {
		return nil, errors.New("the list is empty")
	}
	if len(policies[0]) != 1 {
		return nil, fmt.Errorf("the first entry has %d fields, want the name of one policy", len(policies[0]))
	}
	for name, config := range policies[0] {
		var settings struct {
			ChildPolicy json.RawMessage `json:"childPolicy"`
		}
		if json.Unmarshal(config, &settings) != nil || len(settings.ChildPolicy) == 0 {
			return []string{name}, nil
		}
		children, err := firstPolicy(settings.ChildPolicy)
		if err != nil {
			return nil, fmt.Errorf("childPolicy of %s: %w", name, err)
		}
		return append([]string{name}, children...), nil
	}
	return nil, nil
}

// ParseConfig rejects settings, because the policy has none.
func (builder) ParseConfig(config json.RawMessage) (serviceconfig.LoadBalancingConfig, error) {
	var settings struct{}
	d := json.NewDecoder(bytes.NewReader(config))
	d.DisallowUnknownFields()
	if err := d.Decode(&settings); err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("%s has no settings: %w", Name, err)
	}
	return noSettings{}, nil
}

type noSettings struct {
	serviceconfig.LoadBalancingConfig
}
