// Package messages recognizes what gRPC implementations tell only in the message of a status.
package messages

import (
	"slices"
	"strings"
)

// Drops are the messages of grpc-go's load-balancing policies for an RPC that they drop on purpose: xDS drop_overloads
// and grpclb. Breaker has the beginning and a later part of the message of xDS circuit breakers.
var (
	Drops   = []string{"RPC is dropped", "request dropped by grpclb"}
	Breaker = [2]string{"max requests ", " exceeded on service "}
)

// IsDrop reports whether a load balancer has dropped an RPC on purpose. Dropped RPCs are final (gRFC A6
// #when-retries-are-valid). Drops with other messages are not recognized.
func IsDrop(message string) bool {
	return slices.Contains(Drops, message) || strings.HasPrefix(message, Breaker[0]) && strings.Contains(message, Breaker[1])
}

// sizePhrases are in lower case.
var sizePhrases = []string{
	"received message larger than max",    // grpc-go and gRPC core receiving, grpc-js
	"send message larger than max",        // grpc-go sending
	"sent message larger than max",        // gRPC core sending
	"after decompression larger than max", // grpc-go receiving compressed messages
	"grpc: message too large",             // grpc-go over 4 GiB
	"grpc message exceeds maximum size",   // grpc-java
	"maximum configured message size",     // grpc-dotnet, both directions
	"message with a size larger than",     // grpc-js sending
	"decompresses to a size larger than",  // grpc-js receiving compressed messages
	"larger than configured max",          // connect-go receiving
	"exceeds sendmaxbytes",                // connect-go sending
	"message length too large",            // tonic, both directions
	"configured maximum payload size",     // grpc-swift
}

// IsSize reports whether a RESOURCE_EXHAUSTED is about a message over a size limit. Such a failure is not retried, because
// the message will be just as large next time. The specification uses the code for both.
func IsSize(message string) bool {
	message = strings.ToLower(message)
	return slices.ContainsFunc(sizePhrases, func(phrase string) bool { return strings.Contains(message, phrase) })
}

var refusals = []string{
	"stream terminated by RST_STREAM with error code: REFUSED_STREAM",
	"the stream is rejected because server is draining the connection",
	"the connection is draining",
}

// IsRefusal reports whether the message is grpc-go's for a stream that its server, or the connection to it, has refused
// before any handler could run.
func IsRefusal(message string) bool { return slices.Contains(refusals, message) }
