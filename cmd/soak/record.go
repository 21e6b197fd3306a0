package main

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// This file holds the ledgers' format. Servers append to one file for each client and epoch, which
// all of them share: one write for each record, so that a kill neither loses a record nor leaves
// half of one. A client writes a file for each of its epochs. Files whose epoch has been checked
// are deleted.

// A callID names a call: its client, the epoch in which it started, and its place there, from 0.
type callID uint64

func newCallID(client, epoch int, place uint64) callID {
	return callID(client)<<56 | callID(epoch)<<36 | callID(place)
}

func (id callID) client() int   { return int(id >> 56) }
func (id callID) epoch() int    { return int(id >> 36 & (1<<20 - 1)) }
func (id callID) place() uint64 { return uint64(id & (1<<36 - 1)) }

// String returns the ID as the metadata carries it and as messages name it.
func (id callID) String() string { return fmt.Sprintf("%d-%d-%d", id.client(), id.epoch(), id.place()) }

// A token names an attempt on a server: the process, and the attempt's place in it.
type token uint64

func newToken(process, place uint64) token { return token(process<<40 | place) }

func (t token) String() string { return strconv.FormatUint(uint64(t), 16) }

func parseToken(s string) (token, error) {
	t, err := strconv.ParseUint(s, 16, 64)
	return token(t), err
}

// A note says what a server's record is about.
type note uint8

const (
	noteRun        note = iota + 1 // the method runs; written before anything is done
	noteRefused                    // the server asked for another attempt, and did nothing
	noteStored                     // so many messages of the request are stored; written before they are acknowledged
	noteNotGivenUp                 // the handler's own call has sent so many attempts and failed, but has not given up
)

// A serverRecord is what a server writes about an attempt.
type serverRecord struct {
	call     callID
	token    token
	note     note
	below    bool   // a handler made the call
	previous uint16 // previous attempts, as the request's header says
	count    uint32 // messages, with noteStored; attempts, with noteNotGivenUp
}

// arrives says that the record is about an attempt's arrival.
func (r *serverRecord) arrives() bool { return r.note == noteRun || r.note == noteRefused }

// Records divide a page of memory: a kill may end a write at the end of a page.
const serverRecordSize = 32

func (r *serverRecord) append(b []byte) []byte {
	b = binary.BigEndian.AppendUint64(b, uint64(r.call))
	b = binary.BigEndian.AppendUint64(b, uint64(r.token))
	below := byte(0)
	if r.below {
		below = 1
	}
	b = append(b, byte(r.note), below)
	b = binary.BigEndian.AppendUint16(b, r.previous)
	b = binary.BigEndian.AppendUint32(b, r.count)
	return append(b, 0, 0, 0, 0, 0, 0, 0, 0)
}

func (r *serverRecord) read(b []byte) {
	r.call = callID(binary.BigEndian.Uint64(b))
	r.token = token(binary.BigEndian.Uint64(b[8:]))
	r.note, r.below = note(b[16]), b[17] != 0
	r.previous = binary.BigEndian.Uint16(b[18:])
	r.count = binary.BigEndian.Uint32(b[20:])
}

// Flags of a clientRecord.
const (
	flagAcknowledged = 1 << iota // the server said that it has the request, or part of it
	flagOnce                     // the method must not run twice
	flagHedged
)

// A clientRecord is what a client writes about a call that has ended.
type clientRecord struct {
	call     callID
	token    token // of the attempt whose messages the application saw, 0 for none
	kind     kind
	code     uint8
	flags    uint8
	limit    uint8  // attempts that the policy allows
	attempts uint8  // attempts that the client sent, unsent ones included; 0 for a call that passed through
	count    uint32 // messages acknowledged
}

const clientRecordSize = 32

func (r *clientRecord) append(b []byte) []byte {
	b = binary.BigEndian.AppendUint64(b, uint64(r.call))
	b = binary.BigEndian.AppendUint64(b, uint64(r.token))
	b = append(b, byte(r.kind), r.code, r.flags, r.limit, r.attempts, 0, 0, 0)
	b = binary.BigEndian.AppendUint32(b, r.count)
	return append(b, 0, 0, 0, 0)
}

func (r *clientRecord) read(b []byte) {
	r.call = callID(binary.BigEndian.Uint64(b))
	r.token = token(binary.BigEndian.Uint64(b[8:]))
	r.kind, r.code, r.flags, r.limit, r.attempts = kind(b[16]), b[17], b[18], b[19], b[20]
	r.count = binary.BigEndian.Uint32(b[24:])
}

// An epochName names the files of one client's epoch.
type epochName struct{ client, epoch int }

func (e epochName) serverFile(dir string) string {
	return filepath.Join(dir, fmt.Sprintf("server-%d-%d", e.client, e.epoch))
}

func (e epochName) clientFile(dir string) string {
	return filepath.Join(dir, fmt.Sprintf("client-%d-%d", e.client, e.epoch))
}

// timelineFile holds the timelines of calls with more than one attempt, one per line.
func (e epochName) timelineFile(dir string) string {
	return filepath.Join(dir, fmt.Sprintf("timelines-%d-%d", e.client, e.epoch))
}

// timeline returns the timeline of a call, if it had more than one attempt.
func (e epochName) timeline(dir string, id callID) string {
	content, err := os.ReadFile(e.timelineFile(dir))
	if err != nil {
		return err.Error()
	}
	for line := range strings.Lines(string(content)) {
		if text, ok := strings.CutPrefix(line, id.String()+"\t"); ok {
			if timeline, err := strconv.Unquote(strings.TrimSpace(text)); err == nil {
				return timeline
			}
		}
	}
	return "the client made one attempt"
}

func (e epochName) remove(dir string) error {
	var errs []error
	for _, file := range []string{e.serverFile(dir), e.clientFile(dir), e.timelineFile(dir)} {
		if err := os.Remove(file); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// readServer returns the records that servers have written about an epoch's calls, by call.
func (e epochName) readServer(dir string) ([]serverRecord, error) {
	b, err := os.ReadFile(e.serverFile(dir))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	if len(b)%serverRecordSize != 0 {
		return nil, fmt.Errorf("%s has %d bytes, which are not whole records", e.serverFile(dir), len(b))
	}
	records := make([]serverRecord, len(b)/serverRecordSize)
	for i := range records {
		records[i].read(b[i*serverRecordSize:])
	}
	slices.SortStableFunc(records, func(a, b serverRecord) int { return compare(a.call, b.call) })
	return records, nil
}

// readClient returns the records that the client has written about an epoch's calls, by call.
func (e epochName) readClient(dir string) ([]clientRecord, error) {
	b, err := os.ReadFile(e.clientFile(dir))
	if err != nil {
		return nil, err
	}
	if len(b)%clientRecordSize != 0 {
		return nil, fmt.Errorf("%s has %d bytes, which are not whole records", e.clientFile(dir), len(b))
	}
	records := make([]clientRecord, len(b)/clientRecordSize)
	for i := range records {
		records[i].read(b[i*clientRecordSize:])
	}
	slices.SortStableFunc(records, func(a, b clientRecord) int { return compare(a.call, b.call) })
	return records, nil
}

func compare(a, b callID) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

// A serverLedger is a server's access to the files it appends to.
type serverLedger struct {
	dir string

	mu    sync.RWMutex
	files map[epochName]*os.File // guarded by mu
	order []epochName            // guarded by mu; in the order in which they were opened
}

// openEpochs limits the files that a server keeps open.
const openEpochs = 64

func newServerLedger(dir string) *serverLedger {
	return &serverLedger{dir: dir, files: map[epochName]*os.File{}}
}

// write appends a record. When it returns, a kill of this process cannot lose the record any more.
func (l *serverLedger) write(r serverRecord) error {
	name := epochName{r.call.client(), r.call.epoch()}
	l.mu.RLock()
	defer l.mu.RUnlock()
	file := l.files[name]
	for file == nil {
		l.mu.RUnlock()
		err := l.open(name)
		l.mu.RLock()
		if err != nil {
			return err
		}
		file = l.files[name]
	}
	var b [serverRecordSize]byte
	_, err := file.Write(r.append(b[:0]))
	return err
}

func (l *serverLedger) open(name epochName) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.files[name] != nil {
		return nil
	}
	if len(l.order) >= openEpochs {
		if err := l.files[l.order[0]].Close(); err != nil {
			return err
		}
		delete(l.files, l.order[0])
		l.order = l.order[1:]
	}
	file, err := os.OpenFile(name.serverFile(l.dir), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	l.files[name] = file
	l.order = append(l.order, name)
	return nil
}
