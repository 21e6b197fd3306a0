package balancer

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"strings"

	"google.golang.org/grpc/serviceconfig"
)

// The names of the fields of a service config that choose a load-balancing policy; the second is the older
// one.
const (
	configField = "loadBalancingConfig"
	policyField = "loadBalancingPolicy"
)

// ServiceConfig returns a service config, an object in JSON, with the policy as its loadBalancingConfig,
// for [grpc.WithDefaultServiceConfig] and for name resolvers. A config whose loadBalancingConfig names the policy
// already is returned as it is, also if the policy is the childPolicy of another one, such as outlier detection. Policies
// that have their children in a list or a map, such as priorities, are not looked into.
//
// The error says what is wrong if the config is not a JSON object, and names the other policy if
// loadBalancingConfig or the older loadBalancingPolicy names one. Of a list of policies gRPC uses the first
// that it knows; here, the first must be this one. Everything else in the config is left for gRPC to check.
func ServiceConfig(config string) (string, error) {
	whole, err := withPolicy(config)
	if err != nil {
		return "", fmt.Errorf("balancer: ServiceConfig: %w", err)
	}
	return whole, nil
}

// withPolicy returns a config with the policy.
func withPolicy(config string) (string, error) {
	var fields map[string]json.RawMessage
	if err := json.Unmarshal([]byte(config), &fields); err != nil {
		return "", fmt.Errorf("not a JSON object: %w", err)
	}
	if fields == nil {
		return "", errors.New("not a JSON object: null")
	}
	named, err := namesThisPolicy(config)
	switch {
	case err != nil:
		return "", err
	case named:
		return config, nil
	}
	maps.DeleteFunc(fields, func(field string, _ json.RawMessage) bool { return strings.EqualFold(field, configField) }) // it is null
	fields[configField] = json.RawMessage(`[{"` + Name + `":{}}]`)
	whole, err := json.Marshal(fields)
	return string(whole), err
}

// namesThisPolicy reports whether a config's loadBalancingConfig names this policy. Another policy is an
// error. The fields are read as gRPC reads them: upper and lower case mean the same in a field's name, the
// last of several counts, and null stands for no field.
func namesThisPolicy(config string) (bool, error) {
	var fields struct{ LoadBalancingConfig, LoadBalancingPolicy *json.RawMessage }
	if err := json.Unmarshal([]byte(config), &fields); err != nil {
		return false, err
	}
	if policy := fields.LoadBalancingPolicy; policy != nil {
		var name string
		if err := json.Unmarshal(*policy, &name); err != nil {
			return false, fmt.Errorf("%s: %w", policyField, err)
		}
		if name == "" {
			return false, fmt.Errorf("%s is empty", policyField)
		}
		if name != Name {
			return false, anotherPolicy(policyField, name)
		}
	}
	if fields.LoadBalancingConfig == nil {
		return false, nil
	}
	names, err := firstPolicy(*fields.LoadBalancingConfig)
	if err != nil {
		return false, fmt.Errorf("%s: %w", configField, err)
	}
	if names[len(names)-1] != Name {
		return false, anotherPolicy(configField, names...)
	}
	return true, nil
}

func anotherPolicy(field string, names ...string) error {
	return fmt.Errorf("%s names the policy %s, not %s", field, strings.Join(names, " with the childPolicy "), Name)
}

// firstPolicy returns the name of the first policy in a list, that of its first child policy, and so on.
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

// ParseConfig reads the policy's settings. Fields that it does not know are ignored, as gRPC's own policies do:
// a later version may add one, and a name resolver sends the same config to all versions.
func (builder) ParseConfig(config json.RawMessage) (serviceconfig.LoadBalancingConfig, error) {
	var own settings
	if err := json.Unmarshal(config, &own); err != nil {
		return nil, fmt.Errorf("the settings of %s, which are %s: want a JSON object: %w", Name, config, err)
	}
	return own, nil
}

// settings are the policy's settings. They can be written as JSON again, because some parent policies parse
// what they have parsed a second time.
type settings struct {
	serviceconfig.LoadBalancingConfig `json:"-"`
}
