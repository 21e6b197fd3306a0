package wire

import (
	"context"
	"errors"
	"fmt"
	"math"
	"reflect"
	"strconv"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"
)

func TestPushback(t *testing.T) {
	for _, tt := range []struct {
		values    []string
		wantDelay time.Duration
		wantValid bool
	}{
		{[]string{"0"}, 0, true},
		{[]string{"1500"}, 1500 * time.Millisecond, true},
		{[]string{"2147483647"}, math.MaxInt32 * time.Millisecond, true},
		{[]string{"2147483648"}, 0, false},
		{[]string{NoRetry}, 0, false},
		{[]string{""}, 0, false},
		{[]string{"x"}, 0, false},
		{[]string{"7", "7"}, 0, false},
		{nil, 0, false},
	} {
		if delay, valid := Pushback(tt.values); delay != tt.wantDelay || valid != tt.wantValid {
			t.Errorf("Pushback(%q) = %v, %t, want %v, %t", tt.values, delay, valid, tt.wantDelay, tt.wantValid)
		}
	}
}

// FuzzParseInt32 compares the strict parser with strconv, which accepts more spellings of a number.
func FuzzParseInt32(f *testing.F) {
	for _, s := range []string{"", "0", "7", "-0", "+5", "05", " 5", "5 ", "0x5", "1_000", "٣", "2147483647", "2147483648", "99999999999"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		want, err := strconv.ParseInt(s, 10, 32)
		wantOK := err == nil && want >= 0 && strconv.FormatInt(want, 10) == s
		if !wantOK {
			want = 0
		}
		if n, ok := parseInt32(s); n != want || ok != wantOK {
			t.Errorf("parseInt32(%q) = %d, %t, want %d, %t", s, n, ok, want, wantOK)
		}
	})
}

func TestRetryInfo(t *testing.T) {
	failure := func(delay *durationpb.Duration) error {
		st, err := status.New(codes.Unavailable, "x").WithDetails(&errdetails.DebugInfo{}, &errdetails.RetryInfo{RetryDelay: delay},
			&errdetails.RetryInfo{RetryDelay: durationpb.New(7 * time.Second)})
		if err != nil {
			t.Fatal(err)
		}
		return st.Err()
	}
	for _, tt := range []struct {
		name string
		err  error
		want time.Duration
	}{
		{"none", status.Error(codes.Unavailable, "x"), 0},
		{"no status", errors.New("x"), 0},
		{"no error", nil, 0},
		{"after other details", failure(durationpb.New(3 * time.Second)), 3 * time.Second},
		{"wrapped", fmt.Errorf("below: %w", failure(durationpb.New(time.Second))), time.Second},
		{"zero", failure(durationpb.New(0)), 7 * time.Second},
		{"below zero", failure(durationpb.New(-time.Second)), 7 * time.Second},
		{"too many nanoseconds", failure(&durationpb.Duration{Nanos: 1_000_000_000}), time.Second},
		{"too long", failure(&durationpb.Duration{Seconds: math.MaxInt64, Nanos: -1}), math.MaxInt64},
		{"without a delay", failure(nil), 7 * time.Second},
	} {
		if got := RetryInfo(tt.err); got != tt.want {
			t.Errorf("%s: RetryInfo = %v, want %v", tt.name, got, tt.want)
		}
	}
}

func TestPreviousAttempts(t *testing.T) {
	for _, tt := range []struct {
		values []string
		want   int
	}{
		{nil, 0}, {[]string{"3"}, 3}, {[]string{"2", "5", "4"}, 5}, {[]string{"-1"}, 0}, {[]string{"x", "1"}, 1}, {[]string{"9999999999"}, 0},
	} {
		ctx := metadata.NewIncomingContext(context.Background(), metadata.MD{PreviousAttemptsKey: tt.values})
		if got := PreviousAttempts(ctx); got != tt.want {
			t.Errorf("PreviousAttempts with %q = %d, want %d", tt.values, got, tt.want)
		}
	}
	if got := PreviousAttempts(context.Background()); got != 0 {
		t.Errorf("PreviousAttempts outside of a handler = %d, want 0", got)
	}
}

func TestWithPreviousAttempts(t *testing.T) {
	servers := metadata.MD{"k": {"v"}, PreviousAttemptsKey: {"17"}}
	for _, tt := range []struct {
		header   metadata.MD
		previous int
		want     metadata.MD
	}{
		{servers, 0, servers},
		{servers, 2, metadata.MD{"k": {"v"}, PreviousAttemptsKey: {"2"}}},
		{metadata.MD{}, 1, metadata.MD{PreviousAttemptsKey: {"1"}}},
		{nil, 1, nil},
	} {
		if got := WithPreviousAttempts(tt.header, tt.previous); !reflect.DeepEqual(got, tt.want) {
			t.Errorf("WithPreviousAttempts(%v, %d) = %v, want %v", tt.header, tt.previous, got, tt.want)
		}
	}
	if got := servers[PreviousAttemptsKey][0]; got != "17" {
		t.Errorf("the server's headers have become %v", servers)
	}
}
