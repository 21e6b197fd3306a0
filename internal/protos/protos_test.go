package protos

import (
	"fmt"
	"strings"
	"testing"
	"unsafe"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/descriptorpb"

	"github.com/grpcretry/grpcretry/internal/bounded"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

const (
	service = "/grpcretry.test.v1.EchoService/"

	unknown       = descriptorpb.MethodOptions_IDEMPOTENCY_UNKNOWN
	noSideEffects = descriptorpb.MethodOptions_NO_SIDE_EFFECTS
	idempotent    = descriptorpb.MethodOptions_IDEMPOTENT
)

func TestLevelsOfMethods(t *testing.T) {
	for method, want := range map[string]Level{
		service + "Echo":                         noSideEffects,
		service + "Put":                          idempotent,
		service + "Append":                       unknown,
		service + "Expand":                       unknown,
		service + "Echoes":                       unknown,
		service:                                  unknown,
		"/grpcretry.test.v1.EchoRequest/message": unknown, // a message, not a service
		"/grpcretry.test.v1.EchoService.Echo/":   unknown, // a method, not a service
		"/no.such.Service/Method":                unknown,
		"nonsense":                               unknown,
		"//":                                     unknown,
		"/":                                      unknown,
		"":                                       unknown,
	} {
		for range 2 { // the second is remembered
			if got := LevelOf(method); got != want {
				t.Errorf("LevelOf(%q) = %v, want %v", method, got, want)
			}
		}
		if got := LookUpLevel(method); got != want {
			t.Errorf("LookUpLevel(%q) = %v, want %v", method, got, want)
		}
	}
}

// A program that calls methods by names that others choose does not fill the memory.
func TestLevelsOfManyMethodsAreNotAllKept(t *testing.T) {
	defer knownLevels.Clear()
	for i := range bounded.MaxNames + 10 {
		LevelOf(fmt.Sprintf("/many.Service/M%d", i))
	}
	if got := len(knownLevels.Current()); got != bounded.MaxNames {
		t.Errorf("%d levels are kept, want %d", got, bounded.MaxNames)
	}
	if got := LevelOf(service + "Echo"); got != noSideEffects {
		t.Errorf("level %v of a linked method, want NO_SIDE_EFFECTS", got)
	}
}

// What is remembered keeps no memory but its own, and not much of that.
func TestNamesThatAreKept(t *testing.T) {
	knownLevels.Clear() // of what other tests have asked for
	defer knownLevels.Clear()
	long := strings.Repeat("x", longestKnown+1)
	short := long[:longestKnown]
	LevelOf(long)
	LevelOf(short)
	for kept := range knownLevels.Current() {
		if kept != short {
			t.Errorf("a name of %d bytes is kept", len(kept))
		} else if unsafe.StringData(kept) == unsafe.StringData(short) {
			t.Error("the name that is kept is a part of another one")
		}
	}
	if len(knownLevels.Current()) == 0 {
		t.Error("no name is kept")
	}
}

func TestThereAreNoOtherLevels(t *testing.T) {
	if got := len(descriptorpb.MethodOptions_IdempotencyLevel_name); got != Levels {
		t.Errorf("there are %d levels, want %d", got, Levels)
	}
}

func TestLookUps(t *testing.T) {
	for _, tt := range []struct {
		method string
		linked bool
		name   string
		lacks  bool
	}{
		{service + "Echo", true, "Echo", false},
		{service + "Echoes", false, "Echoes", true},
		{service, false, "", false},
		{"/no.such.Service/Echo", false, "Echo", false},
		{"/grpcretry.test.v1.EchoRequest/message", false, "message", false},
		{"nonsense", false, "nonsense", false},
		{"", false, "", false},
	} {
		if got := Method(tt.method) != nil; got != tt.linked {
			t.Errorf("Method(%q) is known: %t, want %t", tt.method, got, tt.linked)
		}
		if name, lacks := Lacks(tt.method); name != tt.name || lacks != tt.lacks {
			t.Errorf("Lacks(%q) = %q, %t, want %q, %t", tt.method, name, lacks, tt.name, tt.lacks)
		}
	}
	if got := Method(service + "Echo"); string(got.FullName()) != "grpcretry.test.v1.EchoService.Echo" {
		t.Errorf("Method found %v", got.FullName())
	}
}

func TestNewReply(t *testing.T) {
	if got, is := NewReply(service+"Expand", nil).(*echov1.EchoResponse); !is || got.GetMessage() != "" {
		t.Errorf("NewReply = %v, want an empty EchoResponse", got)
	}
	for _, o := range []grpc.CallOption{grpc.ForceCodecV2(nil), grpc.CallContentSubtype("json")} {
		if got := NewReply(service+"Expand", []grpc.CallOption{grpc.WaitForReady(true), o}); got != nil {
			t.Errorf("with %T, NewReply = %v, want nil: the codec decides", o, got)
		}
	}
	for _, method := range []string{service + "Missing", "/no.such.Service/Method", "nonsense"} {
		if got := NewReply(method, nil); got != nil {
			t.Errorf("NewReply(%q) = %v, want nil", method, got)
		}
	}
}
