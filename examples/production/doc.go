// Package production is a gRPC server and a client as a company would run them: the example to copy.
// README.md says how to run it, what to look at, and what to change.
//
//   - server is the gRPC server: overload, health, keepalive, graceful stop.
//   - client is an HTTP service that calls it: policies per method, deadlines, a kill switch.
//   - ops is what both need: traces, metrics, logs and the internal port.
package production
