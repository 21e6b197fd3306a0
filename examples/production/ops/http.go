package ops

import (
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// An HTTPServer serves one port. Failed receives the error that ended it.
type HTTPServer struct {
	*http.Server
	Failed <-chan error
}

// ServeHTTP serves until Shutdown. Requests keep running when the program is asked to stop: their contexts
// are not the program's.
func ServeHTTP(listener net.Listener, handler http.Handler) *HTTPServer {
	failed := make(chan error, 1)
	server := &http.Server{Handler: handler, ReadHeaderTimeout: 5 * time.Second}
	go func() { failed <- server.Serve(listener) }()
	return &HTTPServer{server, failed}
}

// InternalMux is the start of the internal port's routes: what operators see and users must not.
func (t *Telemetry) InternalMux() *http.ServeMux {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(t.Prometheus, promhttp.HandlerOpts{}))
	return mux
}
