package words

import (
	"errors"
	"math"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

func TestNamesOfCodes(t *testing.T) {
	for c := codes.OK; c <= codes.Unauthenticated; c++ {
		var parsed codes.Code
		if err := parsed.UnmarshalJSON([]byte(`"` + Code(c) + `"`)); err != nil || parsed != c || KnownCode(c) != Code(c) {
			t.Errorf("Code(%d) = %s and KnownCode %s, which gRPC reads as %v, %v", c, Code(c), KnownCode(c), parsed, err)
		}
	}
	for c, want := range map[codes.Code]string{
		17: "CODE(17)", 99: "CODE(99)", math.MaxInt32: "CODE(2147483647)",
		math.MaxInt32 + 1: "CODE(2147483648)", math.MaxUint32: "CODE(4294967295)",
	} {
		if got := Code(c); got != want || KnownCode(c) != "OTHER" {
			t.Errorf("Code(%d) = %s and KnownCode %s, want %s and OTHER", uint32(c), got, KnownCode(c), want)
		}
	}
}

func TestMessage(t *testing.T) {
	long := strings.Repeat("é", MaxMessage)
	for _, tt := range []struct {
		err  error
		want string
	}{
		{status.Error(codes.Unavailable, "down"), "down"},
		{errors.New("no status"), "no status"},
		{nil, ""},
		{status.Error(codes.Unavailable, long), strings.Repeat("é", (MaxMessage-3)/2) + "…"},
	} {
		if got := Message(tt.err); got != tt.want {
			t.Errorf("Message(%v) = %q, want %q", tt.err, got, tt.want)
		}
	}
}

func TestPrintable(t *testing.T) {
	for s, want := range map[string]string{"": "", "a é": "a é", "a\xff\xfeb": "a\uFFFDb", "\xff": "\uFFFD"} {
		if got := Printable(s); got != want {
			t.Errorf("Printable(%q) = %q, want %q", s, got, want)
		}
	}
}

// FuzzTruncate holds that a text that is cut is a part of it with a mark, as long as it may be, and that no
// character is cut.
func FuzzTruncate(f *testing.F) {
	f.Add("", uint8(0))
	f.Add("abcdef", uint8(3))
	f.Add("ééééé", uint8(4))
	f.Add("\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff", uint8(5))
	f.Add("a😀😀😀😀", uint8(7))
	f.Fuzz(func(t *testing.T, s string, more uint8) {
		n := 3 + int(more)
		got := Truncate(s, n)
		if len(s) <= n {
			if got != s {
				t.Fatalf("Truncate(%q, %d) = %q, want no change", s, n, got)
			}
			return
		}
		kept, marked := strings.CutSuffix(got, "…")
		if !marked || len(got) > n || !strings.HasPrefix(s, kept) || len(got) <= n-utf8.UTFMax {
			t.Errorf("Truncate(%q, %d) = %q of %d bytes", s, n, got, len(got))
		}
		if utf8.ValidString(s) && !utf8.ValidString(got) {
			t.Errorf("Truncate(%q, %d) = %q cuts a character", s, n, got)
		}
	})
}

func TestRounded(t *testing.T) {
	for d, want := range map[time.Duration]time.Duration{
		1234567891: 1235 * time.Millisecond, 123456789: 123457 * time.Microsecond, 400: 0, 0: 0, time.Hour: time.Hour,
	} {
		if got := Rounded(d); got != want {
			t.Errorf("Rounded(%v) = %v, want %v", d, got, want)
		}
	}
}
