package main

import (
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/grpcretry/grpcretry"
)

// What the ledgers say if nothing is wrong: a call that was refused once, and then acknowledged.
func soundLedgers() (epochName, []clientRecord, []serverRecord) {
	name := epochName{client: 1, epoch: 7}
	first, second := newCallID(1, 7, 0), newCallID(1, 7, 1)
	client := []clientRecord{
		{call: first, token: 11, flags: flagAcknowledged, limit: 4, attempts: 2, count: 3},
		{call: second, flags: flagOnce, code: uint8(codes.Unavailable), limit: 4, attempts: 1},
	}
	server := []serverRecord{
		{call: first, token: 10, note: noteRefused},
		{call: first, token: 11, note: noteRun, previous: 1},
		{call: first, token: 11, note: noteStored, previous: 1, count: 2},
		{call: first, token: 11, note: noteStored, previous: 1, count: 3},
		{call: second, token: 12, note: noteRun},
	}
	return name, client, server
}

func TestSoundLedgers(t *testing.T) {
	name, client, server := soundLedgers()
	c := checker{violation: func(id callID, what string, _ []serverRecord) { t.Errorf("call %v: %s", id, what) }}
	got := c.check(name, 2, client, server)
	if want := (epochFacts{calls: 2, acknowledged: 1, runs: 2, refused: 1}); got != want {
		t.Errorf("check = %+v, want %+v", got, want)
	}
}

func TestPlantedViolationsInLedgers(t *testing.T) {
	for _, tt := range []struct {
		name  string
		plant func(client []clientRecord, server []serverRecord) ([]clientRecord, []serverRecord)
		want  string
	}{
		{"a call ended twice", func(c []clientRecord, s []serverRecord) ([]clientRecord, []serverRecord) {
			return append(c[:1:1], c...), s
		}, "1-7-0: the call ended twice"},
		{"a call never ended", func(c []clientRecord, s []serverRecord) ([]clientRecord, []serverRecord) {
			return c[:1], s[:4]
		}, "1-7-1: the client started 2 calls in this epoch, and 1 ended"},
		{"a call that nobody made", func(c []clientRecord, s []serverRecord) ([]clientRecord, []serverRecord) {
			return c, append(s, serverRecord{call: newCallID(1, 7, 9), note: noteRun})
		}, "1-7-9: a server ran the call, but the client did not report its end"},
		{"an acknowledged call is missing", func(c []clientRecord, s []serverRecord) ([]clientRecord, []serverRecord) {
			return c, s[4:]
		}, "1-7-0: attempt b was acknowledged, and no server has stored it"},
		{"an acknowledged message is missing", func(c []clientRecord, s []serverRecord) ([]clientRecord, []serverRecord) {
			return c, append(s[:3:3], s[4])
		}, "1-7-0: 3 messages were acknowledged, and attempt b has stored 2"},
		{"a method ran twice", func(c []clientRecord, s []serverRecord) ([]clientRecord, []serverRecord) {
			c[1].attempts = 2
			return c, append(s, serverRecord{call: c[1].call, token: 13, note: noteRun, previous: 1})
		}, "1-7-1: a method under WithUnsentOnly ran 2 times"},
		{"more attempts than the policy allows", func(c []clientRecord, s []serverRecord) ([]clientRecord, []serverRecord) {
			c[0].limit = 1
			return c, s
		}, "1-7-0: 2 attempts reached servers, and the policy allows 1"},
		{"more attempts than the client knows of", func(c []clientRecord, s []serverRecord) ([]clientRecord, []serverRecord) {
			c[0].attempts = 1
			return c, s
		}, "1-7-0: 2 attempts reached servers, and the client reports 1"},
		{"an attempt that reached two servers", func(c []clientRecord, s []serverRecord) ([]clientRecord, []serverRecord) {
			return c, append(s, serverRecord{call: c[1].call, token: 13, note: noteRefused})
		}, "1-7-1: attempt 1 reached a server twice"},
		{"too many attempts at the second service", func(c []clientRecord, s []serverRecord) ([]clientRecord, []serverRecord) {
			for range layerAttempts + 1 {
				s = append(s, serverRecord{call: c[1].call, token: 14, note: noteRun, below: true})
			}
			return c, s
		}, "1-7-1: 4 attempts reached the second service, and with 1 at the first at most 3 are allowed"},
		{"a retry that makes all attempts again, after a service that gave up or did not respond",
			func(c []clientRecord, s []serverRecord) ([]clientRecord, []serverRecord) {
				c[1].attempts = 2
				return c, layered(s, c[1].call, 2, layerAttempts)
			}, "1-7-1: 5 attempts reached the second service, and with 2 at the first at most 4 are allowed"},
		{"one attempt more than that, after a service that has not given up",
			func(c []clientRecord, s []serverRecord) ([]clientRecord, []serverRecord) {
				c[1].attempts = 2
				s = append(s, serverRecord{call: c[1].call, token: 12, note: noteNotGivenUp, count: 2})
				return c, layered(s, c[1].call, 2, layerAttempts+1)
			}, "1-7-1: 6 attempts reached the second service, and with 2 at the first at most 5 are allowed"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			name, client, server := soundLedgers()
			client, server = tt.plant(client, server)
			var found []string
			c := checker{violation: func(id callID, what string, _ []serverRecord) { found = append(found, id.String()+": "+what) }}
			c.check(name, 2, client, server)
			if all := strings.Join(found, "\n"); !strings.Contains(all, tt.want) {
				t.Errorf("check found\n%s\nwant %q", all, tt.want)
			}
		})
	}
}

// layered adds a second attempt at the first service to the records of a call, and those that each of the two
// makes at the second.
func layered(s []serverRecord, call callID, made ...int) []serverRecord {
	s = append(s, serverRecord{call: call, token: 13, note: noteRun, previous: 1})
	for _, n := range made {
		for previous := range n {
			s = append(s, serverRecord{call: call, token: 14, note: noteRefused, below: true, previous: uint16(previous)})
		}
	}
	return s
}

// The service in the middle waits in vain for the last after two attempts at it, so it does not stop its caller, whose
// retry makes all attempts again.
func TestAttemptsAfterAServiceThatHasNotGivenUp(t *testing.T) {
	name, client, server := soundLedgers()
	client[1].attempts, client[1].flags = 2, 0
	server = append(server, serverRecord{call: client[1].call, token: 12, note: noteNotGivenUp, count: 2})
	server = layered(server, client[1].call, 2, layerAttempts)
	c := checker{violation: func(id callID, what string, _ []serverRecord) { t.Errorf("call %v: %s", id, what) }}
	got := c.check(name, 2, client, server)
	if want := (epochFacts{calls: 2, acknowledged: 1, runs: 3, refused: 1}); got != want {
		t.Errorf("check = %+v, want %+v", got, want)
	}
}

// What the handler's own error says about that.
func TestSentInVain(t *testing.T) {
	attempts := []grpcretry.Attempt{{Number: 1}, {Number: 2}, {Number: 3, Unsent: true}}
	for _, tt := range []struct {
		err  error
		want int
	}{
		{&grpcretry.Error{Reason: grpcretry.ErrTargetDown, Attempts: attempts}, 2},
		{&grpcretry.Error{Reason: grpcretry.ErrNotRetryable, Attempts: attempts}, 2},
		{&grpcretry.Error{Reason: grpcretry.ErrAttemptsExhausted, Attempts: attempts}, 0},
		{&grpcretry.Error{Reason: grpcretry.ErrPushback, Attempts: attempts}, 0},
		{&grpcretry.Error{Reason: grpcretry.ErrDeadline, Attempts: attempts}, 0},
		{&grpcretry.Error{Reason: grpcretry.ErrTargetDown, Attempts: attempts[2:]}, 0},
		{status.Error(codes.NotFound, "as gRPC returned it"), 0},
	} {
		if got := sentInVain(tt.err); got != tt.want {
			t.Errorf("sentInVain(%v) = %d, want %d", tt.err, got, tt.want)
		}
	}
}

func TestRecordsSurviveTheirFiles(t *testing.T) {
	dir := t.TempDir()
	name, client, server := soundLedgers()
	ledger := newServerLedger(dir)
	for _, r := range server {
		if err := ledger.write(r); err != nil {
			t.Fatal(err)
		}
	}
	e, err := newEpoch(dir, name)
	if err != nil {
		t.Fatal(err)
	}
	for i := range client {
		e.start()
		if last, err := e.end(&client[i], "a\nb"); last || err != nil {
			t.Fatalf("end = %v, %v", last, err)
		}
	}
	if last, err := e.leave(); !last || err != nil {
		t.Fatalf("leave = %v, %v, want the last call", last, err)
	}
	gotClient, err := name.readClient(dir)
	if err != nil {
		t.Fatal(err)
	}
	gotServer, err := name.readServer(dir)
	if err != nil {
		t.Fatal(err)
	}
	for i := range client {
		if gotClient[i] != client[i] {
			t.Errorf("the client's record %d = %+v, want %+v", i, gotClient[i], client[i])
		}
	}
	for i := range server {
		if gotServer[i] != server[i] {
			t.Errorf("the server's record %d = %+v, want %+v", i, gotServer[i], server[i])
		}
	}
	if got := name.timeline(dir, client[1].call); got != "a\nb" {
		t.Errorf("timeline = %q", got)
	}
	if err := name.remove(dir); err != nil {
		t.Error(err)
	}
}

func TestPlantedMessages(t *testing.T) {
	id := newCallID(1, 1, 5)
	if err := id.checkMessage(request, 2, 2, id.payload(request, 2)); err != nil {
		t.Errorf("the right message: %v", err)
	}
	if id.checkMessage(request, 2, 1, id.payload(request, 1)) == nil {
		t.Error("a doubled message was not found")
	}
	if id.checkMessage(request, 2, 3, id.payload(request, 3)) == nil {
		t.Error("a lost message was not found")
	}
	if id.checkMessage(request, 2, 2, append(id.payload(request, 2), 'x')) == nil {
		t.Error("other contents were not found")
	}
}

// A kill may end a write where a page of memory ends, and must leave whole records.
func TestRecordsDivideAPage(t *testing.T) {
	server, client := new(serverRecord).append(nil), new(clientRecord).append(nil)
	if len(server) != serverRecordSize || len(client) != clientRecordSize || 4096%serverRecordSize != 0 || 4096%clientRecordSize != 0 {
		t.Errorf("records have %d and %d bytes, want divisors of 4096 as the constants say", len(server), len(client))
	}
}
