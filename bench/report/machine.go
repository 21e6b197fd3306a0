package main

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"time"
)

// describeMachine prints lines that the format of benchmarks takes for configuration. The benchmarks themselves
// name the processor.
func describeMachine(out io.Writer) error {
	versions, err := moduleVersions("go.mod")
	if err != nil {
		return err
	}
	for _, line := range append([][2]string{
		{"date", time.Now().UTC().Format("2006-01-02 15:04 UTC")},
		{"cores", fmt.Sprint(runtime.NumCPU())},
		{"go", strings.TrimPrefix(runtime.Version(), "go") + " " + runtime.GOOS + "/" + runtime.GOARCH},
	}, versions...) {
		if line[1] != "" {
			fmt.Fprintf(out, "%s: %s\n", line[0], line[1])
		}
	}
	return nil
}

// compared are the modules whose versions matter, by the keys of the output.
var compared = [][2]string{
	{"grpc-go", "google.golang.org/grpc"},
	{"go-grpc-middleware", "github.com/grpc-ecosystem/go-grpc-middleware/v2"},
	{"failsafe-go", "github.com/failsafe-go/failsafe-go"},
	{"cenkalti/backoff", "github.com/cenkalti/backoff/v7"},
	{"sethvargo/go-retry", "github.com/sethvargo/go-retry"},
	{"avast/retry-go", "github.com/avast/retry-go/v5"},
	{"otel-sdk", "go.opentelemetry.io/otel/sdk"},
}

func moduleVersions(file string) ([][2]string, error) {
	content, err := os.ReadFile(file)
	if err != nil {
		return nil, fmt.Errorf("run it in the folder of the benchmarks: %w", err)
	}
	var versions [][2]string
	for _, module := range compared {
		for line := range strings.Lines(string(content)) {
			if fields := strings.Fields(line); len(fields) >= 2 && fields[0] == module[1] {
				versions = append(versions, [2]string{module[0], strings.TrimPrefix(fields[1], "v")})
			}
		}
	}
	return append(versions, [2]string{"grpcretry", revision()}), nil
}

// revision of this repository; empty outside of git.
func revision() string {
	out, err := exec.Command("git", "describe", "--always", "--dirty", "--abbrev=12").Output()
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(out))
}
