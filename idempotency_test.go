package grpcretry

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/descriptorpb"
)

const (
	noSideEffects = descriptorpb.MethodOptions_NO_SIDE_EFFECTS
	idempotent    = descriptorpb.MethodOptions_IDEMPOTENT
)

func TestLevelsOfMethods(t *testing.T) {
	const service = "/grpcretry.test.v1.EchoService/"
	for method, want := range map[string]level{
		service + "Echo":                         noSideEffects,
		service + "Put":                          idempotent,
		service + "Append":                       levelUnknown,
		service + "Expand":                       levelUnknown,
		service + "Echoes":                       levelUnknown,
		service:                                  levelUnknown,
		"/grpcretry.test.v1.EchoRequest/message": levelUnknown, // a message, not a service
		"/grpcretry.test.v1.EchoService.Echo/":   levelUnknown, // a method, not a service
		"/no.such.Service/Method":                levelUnknown,
		"nonsense":                               levelUnknown,
		"//":                                     levelUnknown,
		"/":                                      levelUnknown,
		"":                                       levelUnknown,
	} {
		for range 2 { // the second is remembered
			if got := levelOf(method); got != want {
				t.Errorf("level of %q is %v, want %v", method, got, want)
			}
		}
	}
}

// Each level has its own policy, through a real server.
func TestIdempotencyLevels(t *testing.T) {
	bubble(t, func(t *testing.T) {
		server := serve(t, always(unavailable()))
		client := server.client(t, WithBackoff(Constant(second)), WithMaxAttempts(2), WithBudget(Unlimited),
			WithIdempotencyLevel(noSideEffects, WithMaxAttempts(4)),
			WithIdempotencyLevel(idempotent, WithMaxAttempts(3)))
		client.Echo(t.Context(), request())
		client.Put(t.Context(), request())
		client.Append(t.Context(), request())
		wantTimes(t, server, 0, second, 2*second, 3*second, // Echo
			3*second, 4*second, 5*second, // Put
			5*second, 6*second) // Append
	})
}

// WithSafeMethods retries what declares that it is safe. Narrower options win, and later ones for all methods.
func TestSafeMethods(t *testing.T) {
	const service = "/grpcretry.test.v1.EchoService/"
	for _, tt := range []struct {
		name   string
		opts   []Option
		closed []string // the methods that are retried only if they ran nowhere
	}{
		{"the preset", []Option{WithSafeMethods()}, []string{"Append", "Expand", "/sql/read"}},
		{"a method opened", []Option{WithMethod(service+"Append", WithUnsentOnly(false)), WithSafeMethods()}, []string{"Expand", "/sql/read"}},
		{"a method closed", []Option{WithMethod(service+"Echo", WithUnsentOnly(true)), WithSafeMethods()},
			[]string{"Echo", "Append", "Expand", "/sql/read"}},
		{"functions opened", []Option{WithSafeMethods(), WithMethod("/sql/", WithUnsentOnly(false))}, []string{"Append", "Expand"}},
		{"a level closed", []Option{WithSafeMethods(), WithIdempotencyLevel(idempotent, WithUnsentOnly(true))},
			[]string{"Put", "Append", "Expand", "/sql/read"}},
		{"everything opened", []Option{WithSafeMethods(), WithUnsentOnly(false)}, nil},
	} {
		var closed []string
		for _, method := range []string{"Echo", "Put", "Append", "Expand", "/sql/read"} {
			name := method
			if !strings.HasPrefix(name, "/") {
				name = service + name
			}
			if retrierOf(t, tt.opts...).Policy(name).UnsentOnly {
				closed = append(closed, method)
			}
		}
		wantList(t, tt.name, closed, tt.closed...)
	}
	bubble(t, func(t *testing.T) {
		server := serve(t, always(unavailable()))
		client := server.fixed(t, 0, WithBackoff(Constant(second)), WithMaxAttempts(2), WithSafeMethods())
		client.Echo(t.Context(), request())
		client.Put(t.Context(), request())
		if _, err := client.Append(t.Context(), request()); !errors.Is(err, ErrMayHaveRun) {
			t.Errorf("Append ended with %v, want ErrMayHaveRun", err)
		}
		wantTimes(t, server, 0, second, second, 2*second, 2*second)
	})
}

func TestNewRefusesBadLevels(t *testing.T) {
	for _, l := range []level{-1, 3, 1 << 30} {
		_, err := New(WithIdempotencyLevel(l, WithMaxAttempts(2)))
		wantRefused(t, err, "WithIdempotencyLevel", fmt.Sprint(int32(l)))
	}
	_, err := New(WithIdempotencyLevel(idempotent, WithMaxAttempts(0)))
	wantRefused(t, err, "WithMaxAttempts", "0 attempts", "WithIdempotencyLevel IDEMPOTENT")
	_, err = New(WithIdempotencyLevel(idempotent, nil))
	wantRefused(t, err, "WithIdempotencyLevel", "IDEMPOTENT", "nil")

	h := Hedging{Delay: HedgeAfter(time.Second)}
	_, err = New(WithIdempotencyLevel(levelUnknown, WithHedging(h)))
	wantRefused(t, err, "WithHedging", "IDEMPOTENCY_UNKNOWN", "AllMethodsAreSafe")
	for _, l := range []level{noSideEffects, idempotent} {
		if r := retrierOf(t, WithIdempotencyLevel(l, WithHedging(h))); r.Policy(echoMethod).Hedging != nil != (l == noSideEffects) {
			t.Errorf("hedging for %v shows as %v for a method with NO_SIDE_EFFECTS", l, r.Policy(echoMethod).Hedging)
		}
	}
}

// The levels of linked methods are looked up once.
func TestLevelsAllocateNothing(t *testing.T) {
	r := retrierOf(t, WithIdempotencyLevel(noSideEffects, WithMaxAttempts(3)))
	policies := r.settings.current()
	policies.of(echoMethod)
	if got := testing.AllocsPerRun(100, func() { policies.of(echoMethod) }); got != 0 {
		t.Errorf("%v allocations, want none", got)
	}
}

// A program that calls methods by names that others choose does not fill the memory.
func TestLevelsOfManyMethodsAreNotAllKept(t *testing.T) {
	var cache levelCache
	for i := range maxKnownLevels + 10 {
		cache.of(fmt.Sprintf("/many.Service/M%d", i))
	}
	if got := cache.count.Load(); got != maxKnownLevels {
		t.Errorf("%d levels are kept, want %d", got, maxKnownLevels)
	}
	if got := cache.of(echoMethod); got != noSideEffects {
		t.Errorf("level %v of a linked method, want NO_SIDE_EFFECTS", got)
	}
}
