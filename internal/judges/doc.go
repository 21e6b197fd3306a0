// Package judges compares the library, through its public API, with models of what it promises and with plain gRPC.
package judges
