package grpcretry

import (
	"context"
	"testing"
	"time"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

func BenchmarkHedgedFirstAttemptSucceeds(b *testing.B) {
	for _, bm := range []struct {
		name string
		opts []Option
	}{
		{"hedging=off", nil},
		{"hedging=after",
			[]Option{WithPolicy(Policy{MaxAttempts: 2, Hedging: &Hedging{Delay: HedgeAfter(time.Minute), AllMethodsAreSafe: true}})}},
	} {
		b.Run(bm.name, func(b *testing.B) {
			intercept := UnaryClientInterceptor(bm.opts...)
			reply := &echov1.EchoResponse{}
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			b.ReportAllocs()
			for b.Loop() {
				if err := intercept(ctx, "/pkg.Service/Method", nil, reply, nil, succeed, stubOptions...); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
