package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/debug"
)

const pagePath = "/debug/grpcretry"

// A site serves the debug page, if somebody asked for it. In production mount the page
// beside /debug/pprof, on a port that only those reach who run the program.
type site struct {
	listener net.Listener // nil: nobody asked
	server   *http.Server
	page     *debug.Page   // nil before show
	served   chan struct{} // closed when Serve has returned, with err
	err      error
}

// openSite listens on an address of host and port. Without an address it listens nowhere, and
// without a host on this machine only: -http 0.0.0.0:8080 opens the page to others.
func openSite(address string) (*site, error) {
	if address == "" {
		return &site{}, nil
	}
	if strings.HasPrefix(address, ":") {
		address = "localhost" + address
	}
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return nil, fmt.Errorf("-http %s: %w", address, err)
	}
	return &site{listener: listener, served: make(chan struct{})}, nil
}

// show serves the page of a retrier from now on, and says where.
func (s *site) show(r *grpcretry.Retrier, out io.Writer) {
	if s.listener == nil {
		return
	}
	s.page = debug.Handler(r)
	mux := http.NewServeMux()
	mux.Handle(pagePath, s.page)
	mux.Handle("/{$}", http.RedirectHandler(pagePath, http.StatusFound))
	s.server = &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second}
	go func() {
		defer close(s.served)
		s.err = s.server.Serve(s.listener)
	}()
	fmt.Fprintf(out, "The debug page, from now on: %s?refresh=2\n\n", s.url())
}

// url is where a browser on this machine finds the page.
func (s *site) url() string {
	host, port, _ := net.SplitHostPort(s.listener.Addr().String())
	if net.ParseIP(host).IsUnspecified() {
		host = "localhost"
	}
	return "http://" + net.JoinHostPort(host, port) + pagePath
}

// stay serves until the reader has seen enough. Without a page it says how to get one.
func (s *site) stay(ctx context.Context, out io.Writer) error {
	if s.page == nil {
		fmt.Fprintln(out, "\n  To see it as a page in a browser:")
		fmt.Fprintln(out, "    make demo-page")
		return nil
	}
	fmt.Fprintf(out, "\n  All of it is on the debug page, until you press Ctrl-C:\n    %s\n", s.url())
	select {
	case <-ctx.Done():
		return nil
	case <-s.served:
		return fmt.Errorf("the debug page: %w", s.err)
	}
}

func (s *site) close() {
	if s.listener != nil {
		s.listener.Close()
	}
	if s.page != nil {
		s.server.Close()
		<-s.served
		s.page.Close()
	}
}
