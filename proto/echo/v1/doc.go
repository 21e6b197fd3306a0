// Package echov1 is the service that grpcretry is tested with. It is no part
// of the library's API and may change at any time.
//
// All of it but this comment is generated from echo.proto; `make generate` in
// the root folder makes it again.
package echov1
