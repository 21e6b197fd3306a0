// Package telemetry tests what OpenTelemetry's SDK exports of calls that record all metrics and spans. The library's
// own tests use package recorded in place of the SDK; here both receive the same calls, and must agree.
package telemetry
