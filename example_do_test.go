package grpcretry_test

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"log"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/grpcretry/grpcretry"
)

// A query that is retried when the database's connection breaks. The code that decides is UNKNOWN for
// every error that is not a gRPC status, so a classifier looks at the error instead.
func ExampleRetrier_Do() {
	retrier, err := grpcretry.New(grpcretry.WithBackoff(grpcretry.Constant(time.Millisecond)))
	if err != nil {
		log.Fatal(err)
	}
	err = retrier.Do(context.Background(), "/sql/orders.delete", func(ctx context.Context) error {
		attempt, _ := grpcretry.AttemptFromContext(ctx)
		fmt.Println("attempt", attempt.Number)
		if attempt.Number == 1 {
			return driver.ErrBadConn
		}
		return nil
	})
	fmt.Println(err)
	// Output:
	// attempt 1
	// attempt 2
	// <nil>
}

// Only broken connections are worth another try.
func ExampleWithRetryIf() {
	retrier, err := grpcretry.New(
		grpcretry.WithBackoff(grpcretry.Constant(time.Millisecond)),
		grpcretry.WithMethod("/sql/", grpcretry.WithRetryIf(func(err error) bool { return errors.Is(err, driver.ErrBadConn) })))
	if err != nil {
		log.Fatal(err)
	}
	for _, failure := range []error{driver.ErrBadConn, errors.New("syntax error")} {
		attempts := 0
		_ = retrier.Do(context.Background(), "/sql/orders.delete", func(context.Context) error {
			attempts++
			return failure
		}, grpcretry.WithMaxAttempts(2))
		fmt.Printf("%v: %d\n", failure, attempts)
	}
	// Output:
	// driver: bad connection: 2
	// syntax error: 1
}

// A failure that no retry can mend, although its code says otherwise.
func ExamplePermanent() {
	retrier, err := grpcretry.New()
	if err != nil {
		log.Fatal(err)
	}
	err = retrier.Do(context.Background(), "/mail/send", func(context.Context) error {
		return grpcretry.Permanent(status.Error(codes.Unavailable, "this mailbox has been closed"))
	})
	fmt.Println(status.Code(err), errors.As(err, new(*grpcretry.Error)))
	// Output: Unavailable false
}

// A function says how long to wait, in the words in which a gRPC server would.
func ExampleRetrier_Do_wait() {
	retrier, err := grpcretry.New(grpcretry.WithObserver(func(_ context.Context, e grpcretry.Event) {
		if e.Kind == grpcretry.Decision {
			fmt.Println(e.Attempt.Code(), "wait by", e.WaitSource)
		}
	}))
	if err != nil {
		log.Fatal(err)
	}
	calls := 0
	err = retrier.Do(context.Background(), "/quota/take", func(context.Context) error {
		if calls++; calls > 1 {
			return nil
		}
		full, err := status.New(codes.ResourceExhausted, "no quota left").WithDetails(
			&errdetails.RetryInfo{RetryDelay: durationpb.New(2 * time.Millisecond)})
		if err != nil {
			return err
		}
		return full.Err()
	})
	fmt.Println(err)
	// Output:
	// ResourceExhausted wait by retry_info
	// <nil>
}
