package httpretry

import (
	"net/http"
	"testing"
	"time"

	"github.com/grpcretry/grpcretry"
)

// What a Transport adds to a request that succeeds on its first attempt.
func BenchmarkTransport(b *testing.B) {
	response := &http.Response{StatusCode: 200, Body: http.NoBody}
	base := roundTripper(func(*http.Request) (*http.Response, error) { return response, nil })
	for _, bb := range []struct {
		name      string
		method    string
		transport http.RoundTripper
	}{
		{"base", "GET", base},
		{"GET", "GET", NewTransport(newRetrier(b), base)},
		{"GET, attempt timeout", "GET", NewTransport(newRetrier(b, grpcretry.WithAttemptTimeout(time.Minute)), base)},
		{"POST", "POST", NewTransport(newRetrier(b), base)},
	} {
		b.Run(bb.name, func(b *testing.B) {
			req := newRequest(b, bb.method, "http://api.example.com/orders", nil)
			b.ReportAllocs()
			for b.Loop() {
				if _, err := bb.transport.RoundTrip(req); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
