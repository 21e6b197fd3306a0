package bench

import (
	"context"
	"errors"
	"io"
	"testing"

	"google.golang.org/grpc"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// Streams run over TCP: what is allocated is the client's alone.

// BenchmarkServerStream receives a stream of 1000 messages, from its first to its end.
func BenchmarkServerStream(b *testing.B) {
	const messages = 1000
	eachStreaming(b, withServerStreams, messages, func(ctx context.Context, client echov1.EchoServiceClient) func() {
		return func() { expand(b, ctx, client, messages) }
	})
}

// BenchmarkClientStream sends 100 messages before the server says anything: until then
// who retries keeps them, to send them again.
func BenchmarkClientStream(b *testing.B) {
	const messages = 100
	eachStreaming(b, withClientStreams, messages, func(ctx context.Context, client echov1.EchoServiceClient) func() {
		return func() { collect(b, ctx, client, messages) }
	})
}

// BenchmarkPingPong sends a message and waits for the answer. Until the first answer a
// stream is not committed: that is a new stream each time, with one message. After it, it
// is one long stream.
func BenchmarkPingPong(b *testing.B) {
	b.Run("commit=before", func(b *testing.B) {
		eachStreaming(b, withClientStreams, 1, func(ctx context.Context, client echov1.EchoServiceClient) func() {
			return func() {
				stream := chat(b, ctx, client)
				pingPong(b, stream)
				finishChat(b, stream)
			}
		})
	})
	b.Run("commit=after", func(b *testing.B) {
		eachStreaming(b, withClientStreams, 1, func(ctx context.Context, client echov1.EchoServiceClient) func() {
			stream := chat(b, ctx, client)
			b.Cleanup(func() { finishChat(b, stream) })
			return func() { pingPong(b, stream) }
		})
	})
}

// eachStreaming measures something that handles so many messages.
func eachStreaming(b *testing.B, can func(*alternative) bool, messages float64,
	ready func(context.Context, echov1.EchoServiceClient) (stream func())) {
	eachAlternative(b, which(can), perMessage(messages), func(r *alternative) func(times int) {
		stream := ready(callContext(b), echov1.NewEchoServiceClient(tcp.dial(b, r.dialOptions(asUsed)...)))
		return func(times int) {
			for range times {
				stream()
			}
		}
	})
}

func expand(tb testing.TB, ctx context.Context, client echov1.EchoServiceClient, messages int64) {
	stream, err := client.Expand(ctx, request(messages))
	if err != nil {
		tb.Fatal(err)
	}
	received := int64(0)
	for ; ; received++ {
		if _, err = stream.Recv(); err != nil {
			break
		}
	}
	if !errors.Is(err, io.EOF) || received != messages {
		tb.Fatalf("%d messages, then %v; want %d and io.EOF", received, err, messages)
	}
}

func collect(tb testing.TB, ctx context.Context, client echov1.EchoServiceClient, messages int) {
	stream, err := client.Collect(ctx)
	if err != nil {
		tb.Fatal(err)
	}
	m := request(0)
	for range messages {
		if err := stream.Send(m); err != nil {
			tb.Fatal(err)
		}
	}
	if _, err := stream.CloseAndRecv(); err != nil {
		tb.Fatal(err)
	}
}

type chatStream = grpc.BidiStreamingClient[echov1.EchoRequest, echov1.EchoResponse]

func chat(tb testing.TB, ctx context.Context, client echov1.EchoServiceClient) chatStream {
	stream, err := client.Chat(ctx)
	if err != nil {
		tb.Fatal(err)
	}
	return stream
}

var ping = request(0)

func pingPong(tb testing.TB, stream chatStream) {
	if err := stream.Send(ping); err != nil {
		tb.Fatal(err)
	}
	if _, err := stream.Recv(); err != nil {
		tb.Fatal(err)
	}
}

func finishChat(tb testing.TB, stream chatStream) {
	if err := stream.CloseSend(); err != nil {
		tb.Fatal(err)
	}
	if _, err := stream.Recv(); !errors.Is(err, io.EOF) {
		tb.Fatalf("Recv = %v, want io.EOF", err)
	}
}
