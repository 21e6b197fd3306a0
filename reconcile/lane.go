package reconcile

import "time"

// A lane is a timetable of slots of equal length, each for one key. A slot that is given up can be
// booked again.
type lane struct {
	length time.Duration // of a slot; 0 means that there is no limit
	epoch  time.Time     // the start of slot 0; zero before the first booking
	booked map[int64]struct{}
	first  int64 // no slot before this one is free
}

// noSlot is the slot of a key that has none.
const noSlot = -1

// book books the first free slot that starts at or after earliest, and later than now. It returns
// the slot and a time in it, which u in [0, 1) determines.
func (l *lane) book(now, earliest time.Time, u float64) (slot int64, at time.Time) {
	if l.length == 0 {
		return noSlot, earliest
	}
	if l.epoch.IsZero() {
		l.epoch, l.booked = now, map[int64]struct{}{}
	}
	l.first = max(l.first, l.slotAfter(now))
	slot = max(l.first, l.slotAfter(earliest))
	for l.isBooked(slot) {
		slot++
	}
	l.booked[slot] = struct{}{}
	for l.isBooked(l.first) {
		l.first++
	}
	start := l.epoch.Add(time.Duration(slot) * l.length)
	return slot, start.Add(time.Duration(u * float64(l.length)))
}

// release makes a slot free again.
func (l *lane) release(slot int64) {
	if slot == noSlot {
		return
	}
	delete(l.booked, slot)
	l.first = min(l.first, slot)
}

func (l *lane) isBooked(slot int64) bool {
	_, booked := l.booked[slot]
	return booked
}

// slotAfter returns the first slot that starts at or after t.
func (l *lane) slotAfter(t time.Time) int64 {
	since := t.Sub(l.epoch)
	return int64((since + l.length - 1) / l.length)
}
