package main

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"time"
)

// describeMachine prints lines that the format of benchmarks takes for configuration.
func describeMachine(out io.Writer) error {
	versions, err := moduleVersions("go.mod")
	if err != nil {
		return err
	}
	for _, line := range append([][2]string{
		{"date", time.Now().UTC().Format("2006-01-02 15:04 UTC")},
		{"processor", processor()},
		{"cores", fmt.Sprint(runtime.NumCPU())},
		{"memory", memory()},
		{"kernel", kernel()},
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

// What follows is read from Linux; elsewhere the lines are left out.

func processor() string { return procField("/proc/cpuinfo", "model name") }

func memory() string {
	var kib int
	if _, err := fmt.Sscanf(procField("/proc/meminfo", "MemTotal"), "%d kB", &kib); err != nil {
		return ""
	}
	return fmt.Sprintf("%.0f GiB", float64(kib)/(1<<20))
}

func kernel() string {
	release, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		return ""
	}
	return "Linux " + strings.TrimSpace(string(release))
}

func procField(file, name string) string {
	f, err := os.Open(file)
	if err != nil {
		return ""
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if key, value, ok := strings.Cut(lines.Text(), ":"); ok && strings.TrimSpace(key) == name {
			return strings.TrimSpace(value)
		}
	}
	return ""
}
