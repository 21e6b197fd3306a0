// Package e2e has the tests that need real servers: Jaeger takes the traces and gives
// them back, those of four services in a row among them, and Prometheus scrapes the metrics and
// answers the queries of the documentation. Those that compile the Go code of the documentation need
// no server, but a minute.
// They have the build tag e2e; make e2e builds and installs what they need, and runs them.
//
// What is left without the tag checks the files in docs that the servers use.
package e2e
