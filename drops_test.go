package grpcretry

import (
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	"github.com/grpcretry/grpcretry/internal/messages"
)

// gRPC marks an RPC that a balancer drops on purpose only for itself. What an interceptor sees is
// the text, which this pins to the version in go.mod.
func TestDropsAreRecognizedByGRPCsWords(t *testing.T) {
	file, _ := runtime.FuncForPC(reflect.ValueOf(grpc.NewClient).Pointer()).FileLine(0)
	root := filepath.Dir(file)
	for source, text := range map[string]string{
		"internal/xds/balancer/clusterimpl/picker.go":  `status.Errorf(codes.Unavailable, "` + messages.Drops[0] + `")`,
		"balancer/grpclb/grpclb_picker.go":             `status.Errorf(codes.Unavailable, "` + messages.Drops[1] + `")`,
		"internal/xds/xdsclient/requests_counter.go":   `fmt.Errorf("` + messages.Breaker[0] + `%v` + messages.Breaker[1] + `%v"`,
		"internal/xds/balancer/clusterimpl/picker.go ": `status.Error(codes.Unavailable, err.Error())`, // the breaker's
	} {
		data, err := os.ReadFile(filepath.Join(root, strings.TrimSpace(source)))
		if err != nil {
			t.Skipf("the source of gRPC is not at hand: %v", err)
		}
		if !strings.Contains(string(data), text) {
			t.Errorf("%s does not have %s: how does it drop RPCs now?", source, text)
		}
	}
}

// A server that says the same is no balancer.
func TestAServersWordsAreNoDrop(t *testing.T) {
	for _, text := range append(messages.Drops, "max requests 7 exceeded on service x") {
		bubble(t, func(t *testing.T) {
			server := serve(t, script(fail(codes.Unavailable, text), ok()))
			if _, err := server.client(t, steady).Echo(t.Context(), request()); err != nil {
				t.Error(err)
			}
			wantTimes(t, server, 0, second)
		})
	}
}
