package balancer

import (
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

func TestServiceConfig(t *testing.T) {
	const ours = `"loadBalancingConfig":[{"grpcretry_round_robin":{}}]`
	for _, tt := range []struct{ name, config, want, wantError string }{
		{"an empty object", `{}`, `{` + ours + `}`, ""},
		{"other fields stay", `{"methodConfig":[{"name":[{}],"timeout":"1.50s"}], "future": 1e400}`,
			`{"future":1e400,` + ours + `,"methodConfig":[{"name":[{}],"timeout":"1.50s"}]}`, ""},
		{"null names nothing", `{"loadBalancingConfig":null,"loadBalancingPolicy":null}`, `{` + ours + `,"loadBalancingPolicy":null}`, ""},
		{"null in lower case", `{"loadbalancingconfig":null}`, `{` + ours + `}`, ""},
		{"it is there", `{ ` + ours + `}`, `{ ` + ours + `}`, ""},
		{"it is there, but null counts", `{` + ours + `,"LoadBalancingConfig":null}`, `{` + ours + `}`, ""},
		{"it is there, after null", `{"LoadBalancingConfig":null,` + ours + `}`, `{"LoadBalancingConfig":null,` + ours + `}`, ""},
		{"it is there, before others", `{"loadBalancingConfig":[{"grpcretry_round_robin":{}},{"round_robin":{}}]}`,
			`{"loadBalancingConfig":[{"grpcretry_round_robin":{}},{"round_robin":{}}]}`, ""},
		{"it is a child", `{"loadBalancingConfig":[{"outlier_detection_experimental":{"childPolicy":[{"grpcretry_round_robin":{}}]}}]}`,
			`{"loadBalancingConfig":[{"outlier_detection_experimental":{"childPolicy":[{"grpcretry_round_robin":{}}]}}]}`, ""},
		{"the old field names it", `{"loadBalancingPolicy":"grpcretry_round_robin"}`, `{` + ours +
			`,"loadBalancingPolicy":"grpcretry_round_robin"}`, ""},

		{"another", `{"loadBalancingConfig":[{"pick_first":{}}]}`,
			"", "balancer: ServiceConfig: loadBalancingConfig names the policy pick_first, not grpcretry_round_robin"},
		{"another, in other case", `{"LOADBALANCINGCONFIG":[{"pick_first":{}}]}`, "", "loadBalancingConfig names the policy pick_first"},
		{"another, which counts", `{` + ours + `,"LoadBalancingConfig":[{"pick_first":{}}]}`, "",
			"loadBalancingConfig names the policy pick_first"},
		{"another, before it", `{"loadBalancingConfig":[{"round_robin":{}},{"grpcretry_round_robin":{}}]}`, "", "names the policy round_robin"},
		{"another, by the old field", `{"loadBalancingPolicy":"round_robin"}`, "", "loadBalancingPolicy names the policy round_robin"},
		{"another, by the old field in other case", `{"LoadBalancingPOLICY":"round_robin"}`, "",
			"loadBalancingPolicy names the policy round_robin"},
		{"two in one entry", `{"loadBalancingConfig":[{"grpcretry_round_robin":{},"round_robin":{}}]}`, "",
			"loadBalancingConfig: the first entry has 2 fields"},
		{"another child", `{"loadBalancingConfig":[{"outlier_detection_experimental":{"childPolicy":[{"round_robin":{}}]}}]}`, "",
			"names the policy outlier_detection_experimental with the childPolicy round_robin, not"},
		{"a parent without a child", `{"loadBalancingConfig":[{"outlier_detection_experimental":{}}]}`, "",
			"names the policy outlier_detection_experimental, not"},
		{"nothing", ``, "", "not a JSON object"},
		{"null", `null`, "", "not a JSON object"},
		{"a list", `[]`, "", "not a JSON object"},
		{"half an object", `{"loadBalancingConfig":`, "", "not a JSON object"},
		{"two objects", `{}{}`, "", "not a JSON object"},
		{"no list", `{"loadBalancingConfig":{}}`, "", "loadBalancingConfig: "},
		{"an empty list", `{"loadBalancingConfig":[]}`, "", "loadBalancingConfig: the list is empty"},
		{"an empty entry", `{"loadBalancingConfig":[{}]}`, "", "loadBalancingConfig: the first entry has 0 fields"},
		{"an empty list of children", `{"loadBalancingConfig":[{"outlier_detection_experimental":{"childPolicy":[]}}]}`, "",
			"loadBalancingConfig: childPolicy of outlier_detection_experimental: the list is empty"},
		{"no text", `{"loadBalancingPolicy":[]}`, "", "loadBalancingPolicy: "},
		{"no name", `{"loadBalancingPolicy":""}`, "", "balancer: ServiceConfig: loadBalancingPolicy is empty"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := ServiceConfig(tt.config)
			if got != tt.want || (err == nil) != (tt.wantError == "") || err != nil && !strings.Contains(err.Error(), tt.wantError) {
				t.Errorf("ServiceConfig(%s) = %s, %v, want %s, %q", tt.config, got, err, tt.want, tt.wantError)
			}
		})
	}
}

// The policy ignores settings that it does not know. Anything else than an object is an error, which gRPC
// reports when it reads the service config.
func TestParseConfig(t *testing.T) {
	for config, wantError := range map[string]string{
		`{}`:               "",
		`null`:             "",
		`{"shuffle":true}`: "",
		`[]`:               "the settings of grpcretry_round_robin, which are []: want a JSON object",
		`"two"`:            `which are "two": want a JSON object`,
	} {
		cc, err := grpc.NewClient("passthrough:///x", grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithDefaultServiceConfig(`{"loadBalancingConfig":[{"grpcretry_round_robin":`+config+`}]}`))
		if (err == nil) != (wantError == "") || err != nil && !strings.Contains(err.Error(), wantError) {
			t.Errorf("with the settings %s, NewClient = %v, want %q", config, err, wantError)
		}
		if err == nil {
			cc.Close()
		}
	}
}
