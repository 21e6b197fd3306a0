package main

import (
	"context"
	"math/rand/v2"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/grpcretry/grpcretry"
)

// A behaviour is what a server does in an attempt. It is drawn from the seed, the call and the
// number of previous attempts.
type behaviour struct {
	refuse bool          // do nothing, and ask for another attempt
	code   codes.Code    // how the attempt ends, OK for a success
	after  int           // the failure comes after so many messages
	slow   time.Duration // before the response
	header bool          // headers are sent first, and do not wait for the first message
	extra  extra         // what comes with the failure
	big    bool          // 20 KB of metadata
}

// An extra is what comes with a failure, apart from its code.
type extra int

const (
	nothing extra = iota
	pushback
	retryInfo
	stopPushback
	malformedPushback
	repeatedPushback
	hugePushback
	endlessPushback // valid, and longer than the policy allows
	brokenDetails
	extras
)

// asks says that the server asks for another attempt, after which it may run a method again.
func (e extra) asks() bool { return e == pushback || e == retryInfo }

var failures = []codes.Code{
	codes.Unavailable, codes.Unavailable, codes.Unavailable, codes.Unavailable, codes.ResourceExhausted, codes.Internal,
	codes.NotFound, codes.Aborted, codes.DeadlineExceeded, codes.Canceled, codes.Unknown, codes.InvalidArgument,
}

// drawBehaviour draws what a server does in an attempt of a call; previous attempts came before it,
// and the call's methods must not run twice if once. In a storm, servers ask for another attempt.
func drawBehaviour(draw *rand.Rand, id callID, once, storm bool) behaviour {
	var b behaviour
	n := draw.IntN(1000)
	switch {
	case n < 25:
		b.code = failures[draw.IntN(len(failures))]
		b.after = draw.IntN(id.messages() + 2)
		b.extra = extra(draw.IntN(int(extras)))
		if b.extra.asks() && (once || draw.IntN(2) == 0) {
			b.refuse, b.code = true, codes.Unavailable
		}
	case n < 33:
		b.slow = time.Duration(1+draw.IntN(60)) * time.Millisecond
	case n < 36:
		b.slow = time.Duration(100+draw.IntN(400)) * time.Millisecond
	}
	b.header = draw.IntN(8) == 0
	b.big = draw.IntN(500) == 0
	if storm && draw.IntN(10) < 6 {
		b.refuse, b.code = true, codes.Unavailable
		b.extra = pushback
		if draw.IntN(5) == 0 {
			b.extra = stopPushback
		}
	}
	return b
}

// dress puts what belongs to the failure into the attempt's trailer, and returns its status.
func (b *behaviour) dress(ctx context.Context, draw *rand.Rand, t token) error {
	s := status.New(b.code, "scripted, by attempt "+t.String())
	var err error
	switch b.extra {
	case pushback:
		err = grpcretry.SetPushback(ctx, time.Duration(draw.IntN(20))*time.Millisecond)
	case stopPushback:
		err = grpcretry.SetNoRetry(ctx)
	case retryInfo:
		d := durationpb.New(time.Duration(1+draw.IntN(10)) * time.Millisecond)
		s, err = s.WithDetails(&errdetails.RetryInfo{RetryDelay: d})
	case malformedPushback:
		values := []string{"", " 1", "1.5", "0x10", "+5", "007", "five", "\u0661", "-", "1e3", "1\x7f"}
		err = setTrailer(ctx, pushbackKey, values[draw.IntN(len(values))])
	case repeatedPushback:
		err = setTrailer(ctx, pushbackKey, "1", pushbackKey, "1")
	case hugePushback:
		err = setTrailer(ctx, pushbackKey, "9223372036854775808")
	case endlessPushback:
		err = setTrailer(ctx, pushbackKey, "2147483647")
	case brokenDetails:
		err = setTrailer(ctx, "grpc-status-details-bin", "\xff\xfe\x00broken")
	}
	if err != nil {
		return err
	}
	return s.Err()
}

const pushbackKey = "grpc-retry-pushback-ms"

func setTrailer(ctx context.Context, pairs ...string) error {
	return grpc.SetTrailer(ctx, metadata.Pairs(pairs...))
}

var bigValue = strings.Repeat("0123456789", 2000)
