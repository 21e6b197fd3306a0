package grpcretry

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strconv"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	statuspb "google.golang.org/genproto/googleapis/rpc/status"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/protoadapt"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/durationpb"
)

const retryInfoURL = "type.googleapis.com/google.rpc.RetryInfo"

func TestPushbackIsReadAsA6HasIt(t *testing.T) {
	for _, c := range readJSON[struct {
		Name    string
		Values  []string
		Present bool
		Stop    bool
		DelayMs int64 `json:"delay_ms"`
	}](t, "testdata/a6/pushback.json") {
		t.Run(c.Name, func(t *testing.T) {
			want := Pushback{Delay: time.Duration(c.DelayMs) * time.Millisecond, Stop: c.Stop, Source: WaitPushback}
			if !c.Present {
				want = Pushback{}
			}
			got, ok := PushbackFrom(metadata.MD{"grpc-retry-pushback-ms": c.Values}, errors.New("no status"))
			if got != want || ok != c.Present {
				t.Errorf("PushbackFrom(%q) = %+v, %t, want %+v, %t", c.Values, got, ok, want, c.Present)
			}
		})
	}
}

func TestPushbackFromErrors(t *testing.T) {
	const ms = time.Millisecond
	info := func(seconds int64, nanos int32) *errdetails.RetryInfo {
		return &errdetails.RetryInfo{RetryDelay: &durationpb.Duration{Seconds: seconds, Nanos: nanos}}
	}
	said := func(details ...protoadapt.MessageV1) error { return fail(codes.Unavailable, "x", details...).err }
	waits := func(d time.Duration) Pushback { return Pushback{Delay: d, Source: WaitRetryInfo} }
	retryLater := metadata.MD{pushbackKey: {"7"}}
	for _, tt := range []struct {
		name    string
		trailer metadata.MD
		err     error
		want    Pushback // zero if nothing was said
	}{
		{"an error that is no status", nil, errors.New("x"), Pushback{}},

		{"the first of several RetryInfos", nil, said(info(3, 0), info(5, 0)), waits(3000 * ms)},
		{"RetryInfo in a wrapped status", nil, fmt.Errorf("below: %w", said(info(4, 0))), waits(4000 * ms)},
		{"RetryInfo longer than a Duration holds", nil, said(info(315_576_000_000, 0)), waits(math.MaxInt64)},

		{"RetryInfo without a delay says nothing", nil, said(&errdetails.RetryInfo{}), Pushback{}},
		{"RetryInfo with mixed signs", nil, said(info(5, -1)), waits(5*time.Second - 1)},
		{"RetryInfo longer than protobuf allows", nil, said(info(315_576_000_001, 0)), waits(math.MaxInt64)},
		{"RetryInfo of the largest int64", nil, said(info(math.MaxInt64, 0)), waits(math.MaxInt64)},
		{"RetryInfo of the smallest int64 says nothing", nil, said(info(math.MinInt64, 0)), Pushback{}},

		{"both: pushback wins", retryLater, said(info(3, 0)), Pushback{Delay: 7 * ms, Source: WaitPushback}},
		{"an empty list of values is no pushback", metadata.MD{pushbackKey: {}}, said(info(3, 0)), waits(3000 * ms)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, ok := PushbackFrom(tt.trailer, tt.err)
			if wantOK := tt.want != (Pushback{}); got != tt.want || ok != wantOK {
				t.Errorf("PushbackFrom(%v, %v) = %+v, %t, want %+v, %t", tt.trailer, tt.err, got, ok, tt.want, wantOK)
			}
		})
	}
}

func FuzzPushback(f *testing.F) {
	for _, seed := range []string{"0", "1500", "2147483647", "2147483648", "-1", "007", "+5", " 5", "9223372036855", "99999999999999999999",
		"\u0665", ""} {
		f.Add(seed, seed, uint8(1))
		f.Add(seed, "5", uint8(2))
	}
	f.Add("", "", uint8(0))
	f.Fuzz(func(t *testing.T, first, second string, count uint8) {
		values := []string{first, second, first}[:count%4]
		got, ok := PushbackFrom(metadata.MD{pushbackKey: values}, nil)
		switch {
		case len(values) == 0:
			if ok || got != (Pushback{}) {
				t.Errorf("no trailer is %+v, %t", got, ok)
			}
		case !ok || got.Source != WaitPushback:
			t.Errorf("%q is %+v, %t, want pushback", values, got, ok)
		case got.Delay < 0 || got.Delay > math.MaxInt32*time.Millisecond:
			t.Errorf("%q waits %d, which is no int32 of milliseconds", values, got.Delay)
		case got.Stop && got.Delay != 0:
			t.Errorf("%q says stop, and to wait %v", values, got.Delay)
		case len(values) > 1 && !got.Stop:
			t.Errorf("%q is repeated and says %+v, want stop", values, got)
		case !got.Stop && strconv.FormatInt(got.Delay.Milliseconds(), 10) != first:
			t.Errorf("%q waits %v, which is written otherwise", first, got.Delay)
		case got.Stop && len(values) == 1:
			if n, err := strconv.ParseInt(first, 10, 32); err == nil && n >= 0 && strconv.FormatInt(n, 10) == first {
				t.Errorf("%q says stop, want a wait of %d ms", first, n)
			}
		}
	})
}

func FuzzRetryInfo(f *testing.F) {
	f.Add(int64(3), int32(500_000_000), []byte(nil))
	f.Add(int64(math.MaxInt64), int32(math.MaxInt32), []byte{0x0a, 0x02, 0x08, 0x05})
	f.Add(int64(math.MinInt64), int32(math.MinInt32), []byte{0xff, 0xff})
	f.Add(int64(-1), int32(1), []byte("x"))
	f.Fuzz(func(t *testing.T, seconds int64, nanos int32, raw []byte) {
		written, err := proto.Marshal(&errdetails.RetryInfo{RetryDelay: &durationpb.Duration{Seconds: seconds, Nanos: nanos}})
		if err != nil {
			t.Fatal(err)
		}
		for _, details := range [][][]byte{{written}, {raw}, {raw, written}} {
			st := &statuspb.Status{Code: int32(codes.Unavailable)}
			for _, bytes := range details {
				st.Details = append(st.Details, &anypb.Any{TypeUrl: retryInfoURL, Value: bytes})
			}
			got, ok := PushbackFrom(nil, status.ErrorProto(st))
			if got.Delay < 0 || got.Stop || ok != (got.Delay > 0) || ok != (got.Source == WaitRetryInfo) {
				t.Errorf("RetryInfo of %d s and %d ns, with %x: %+v, %t", seconds, nanos, raw, got, ok)
			}
		}
		got, _ := PushbackFrom(nil, status.ErrorProto(&statuspb.Status{Code: 14,
			Details: []*anypb.Any{{TypeUrl: retryInfoURL, Value: written}}}))
		if seconds > 0 && seconds < 1e9 && nanos >= 0 && nanos < 1e9 {
			if want := time.Duration(seconds)*time.Second + time.Duration(nanos); got.Delay != want {
				t.Errorf("RetryInfo of %d s and %d ns waits %v, want %v", seconds, nanos, got.Delay, want)
			}
		}
	})
}

// A pushback that comes while another attempt is to be replaced is the source of that wait, and the retry's turn: it
// does not wait again because of the failure that brought it.
func TestAPushbackMovesTheReplacementOfAnotherAttempt(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, script(hang(), unavailable().pushback("5000").after(1400*time.Millisecond), ok()))
		var sources []WaitSource
		client := server.client(t, WithObserver(func(_ context.Context, e Event) {
			if e.Kind == AttemptStart {
				sources = append(sources, e.Attempt.WaitSource)
			}
		}), WithMethod(echoMethod, WithAttemptTimeout(second), WithBackoff(Constant(3*second)), WithMaxAttempts(3), WithBudget(Unlimited),
			WithHedging(Hedging{Delay: HedgeAfter(600 * time.Millisecond), Budget: Unlimited})))
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if err := echo(ctx, client); err != nil {
			t.Error(err)
		}
		wantTimes(t, server, 0, 600*time.Millisecond, 7*second)
		if want := []WaitSource{waitNone, waitHedgeDelay, WaitPushback}; !slices.Equal(sources, want) {
			t.Errorf("the attempts came after waits of %v, want %v", sources, want)
		}
	})
}
