package main

import (
	"os"
	"strings"
	"testing"
)

// TestMain is also what a service's process does, because the tests start themselves again.
func TestMain(m *testing.M) {
	if config := os.Getenv(serviceVariable); config != "" {
		exit(serviceProcess(config))
	}
	os.Exit(m.Run())
}

func TestBadArguments(t *testing.T) {
	listener, err := listen("")
	if err != nil {
		t.Fatal(err)
	}
	free := listener.Addr().String()
	if err := listener.Close(); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		args []string
		want string
	}{
		{[]string{"everything"}, `unexpected argument "everything"`},
		{[]string{"-otlp", free}, "no receiver of traces: dial tcp " + free},
	} {
		if err := command(t.Context(), tt.args, t.Output()); err == nil || !strings.HasPrefix(err.Error(), tt.want) {
			t.Errorf("command(%q) = %v, want %s", tt.args, err, tt.want)
		}
	}
}
