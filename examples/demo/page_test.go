package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"

	"github.com/grpcretry/grpcretry/debug"
)

func TestParse(t *testing.T) {
	for _, tt := range []struct {
		args    []string
		want    string
		problem string
	}{
		{nil, "", ""},
		{[]string{"-http", ":8080"}, ":8080", ""},
		{[]string{"-http=127.0.0.1:0"}, "127.0.0.1:0", ""},
		{[]string{"-http", "8080"}, "", `-http "8080": want a host and a port, such as localhost:8080`},
		{[]string{"-http", "http://localhost:8080"}, "", "want a host and a port"},
		{[]string{"-http"}, "", "flag needs an argument: -http"},
		{[]string{"-port", "8080"}, "", "flag provided but not defined: -port"},
		{[]string{"8080"}, "", `unexpected argument "8080"`},
	} {
		var said bytes.Buffer
		got, err := parse(tt.args, &said)
		if (err != nil) != (tt.problem != "") || err == nil && got != tt.want || !strings.Contains(said.String(), tt.problem) {
			t.Errorf("parse(%q) = %q, %v and says %q, want %q, %q", tt.args, got, err, said.String(), tt.want, tt.problem)
		}
	}
}

// The whole program, in real time, with the page: it is there from the first scene on,
// counts what the scenes do, and stays until the reader goes.
func TestRunServesThePage(t *testing.T) {
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "")
	ctx, ctrlC := context.WithCancel(t.Context())
	defer ctrlC()
	reader, writer := io.Pipe()
	done := make(chan error, 1)
	go func() {
		err := run(ctx, writer, false, "127.0.0.1:0")
		writer.CloseWithError(err)
		done <- err
	}()
	lines := bufio.NewScanner(reader)
	address := ""
	for lines.Scan() {
		if _, at, ok := strings.Cut(lines.Text(), "http://"); ok && address == "" {
			address = "http://" + strings.TrimSuffix(at, "?refresh=2")
			if s := readPage(t, address); s.Total.Calls > 3 {
				t.Errorf("when its address is printed, the page has %d calls, want it to be there from the first scene on", s.Total.Calls)
			}
		}
		if strings.Contains(lines.Text(), "until you press Ctrl-C") {
			break
		}
	}
	if address == "" || !lines.Scan() || strings.TrimSpace(lines.Text()) != address {
		t.Fatalf("at its end run printed %q (%v), want the address %q", lines.Text(), lines.Err(), address)
	}
	s := readPage(t, address)
	got := fmt.Sprint(s.Total.Calls, s.Total.Attempts, s.Total.Retries, s.Total.Rescued, s.Total.Stopped)
	if want := fmt.Sprint(49, 79, 30, 15,
		map[string]int{"exhausted": 1, "budget": 20, "deadline": 1, "pushback": 2, "not_retryable": 2}); got != want {
		t.Errorf("the page counts %s, want what wantTotals has, %s", got, want)
	}
	if response, err := http.Get(strings.TrimSuffix(address, pagePath)); err != nil || response.Request.URL.Path != pagePath {
		t.Errorf("GET / = %v, %v, want it to lead to the page", response, err)
	} else {
		response.Body.Close()
	}
	ctrlC()
	if err := <-done; err != nil {
		t.Errorf("run = %v after Ctrl-C, want nil", err)
	}
	if _, err := http.Get(address); err == nil {
		t.Error("the page is still served")
	}
	http.DefaultClient.CloseIdleConnections()
}

func readPage(t *testing.T, address string) (s debug.Snapshot) {
	t.Helper()
	response, err := http.Get(address + "?format=json")
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	if err := json.NewDecoder(response.Body).Decode(&s); err != nil {
		t.Fatal(err)
	}
	return s
}

// An address that is taken is told before anything else happens.
func TestRunWithAnAddressThatIsTaken(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	var out bytes.Buffer
	address := listener.Addr().String()
	if err := run(t.Context(), &out, false, address); err == nil || !strings.Contains(err.Error(), "-http "+address) || out.Len() > 0 {
		t.Errorf("run = %v and printed %q, want the address in the error and no scene", err, out.String())
	}
}

// The page shows what a program does, so an address without a host is not open to everybody.
func TestWithoutHostThePageIsLocal(t *testing.T) {
	s, err := openSite(":0")
	if err != nil {
		t.Fatal(err)
	}
	defer s.close()
	if address := s.listener.Addr().(*net.TCPAddr); !address.IP.IsLoopback() {
		t.Errorf("with -http :0, the page listens on %v, want a loopback address", address)
	}
}

func TestURLOfThePage(t *testing.T) {
	for address, want := range map[string]string{"0.0.0.0:0": "http://localhost:", "127.0.0.1:0": "http://127.0.0.1:"} {
		s, err := openSite(address)
		if err != nil {
			t.Fatal(err)
		}
		if got := s.url(); !strings.HasPrefix(got, want) || !strings.HasSuffix(got, pagePath) {
			t.Errorf("url() with -http %s = %q, want %s…%s", address, got, want, pagePath)
		}
		s.close()
	}
}

func TestWithoutPageSaysHow(t *testing.T) {
	var out bytes.Buffer
	if err := (&site{}).stay(t.Context(), &out); err != nil || !strings.Contains(out.String(), "make demo-page") {
		t.Errorf("stay = %v and printed %q, want nil and how to see the page", err, out.String())
	}
}
