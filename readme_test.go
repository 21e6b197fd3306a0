package grpcretry

import (
	"os"
	"regexp"
	"strings"
	"testing"
)

// The README names the oldest versions that go.mod allows.
func TestReadmeNamesTheVersionsOfGoMod(t *testing.T) {
	goMod, readme := readFile(t, "go.mod"), readFile(t, "README.md")
	_, install, _ := strings.Cut(readme, "\n## Install\n")
	install, _, _ = strings.Cut(install, "\n## ")
	install = strings.Join(strings.Fields(install), " ")
	for line, words := range map[string]string{
		`\ngo (\d+\.\d+)`:                              "Go # or later",
		`\n\tgoogle\.golang\.org/grpc v(\d+\.\d+)`:     "grpc-go to at least #",
		`\n\tgo\.opentelemetry\.io/otel v(\d+\.\d+)`:   "OpenTelemetry API #",
		`\n\tgoogle\.golang\.org/protobuf v(\d+\.\d+)`: "protobuf #",
	} {
		version := regexp.MustCompile(line).FindStringSubmatch(goMod)
		if version == nil {
			t.Fatalf("go.mod has no line %s", line)
		}
		if want := strings.ReplaceAll(words, "#", version[1]); !strings.Contains(install, want) {
			t.Errorf("the README's section Install does not say %q, as go.mod does", want)
		}
	}
}

func readFile(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}
