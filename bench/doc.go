// Package bench measures what each way to retry a gRPC call costs, side by side: no
// interceptor, grpc-go's built-in retries, go-grpc-middleware, failsafe-go and grpcretry,
// all in one run, with the same payload and the same server. It also compares libraries that
// retry functions.
//
//	make bench-quick     # from the root of the repository: every table, roughly, in half a minute
//	make bench           # 24 short runs, and docs/performance.md from them
//
// alternatives_test.go and functions_alternatives_test.go say how each is configured, and
// why. Each table has a file, and a benchmark whose sub-benchmarks are named key=value, so that
// benchstat can turn any of them into columns:
//
//	go test -run '^$' -bench UnaryInterceptor -count 10 . | benchstat -col /client -
//
// What is measured over TCP talks to a server in a process of its own: memory, allocations
// and processor time are then the client's alone. Over bufconn they are those of both sides.
package bench
