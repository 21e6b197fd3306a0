package reconcile

import "time"

// A lane is a timetable of slots of equal length, each for one key. A slot that is given up can be
// booked again.
type lane struct {
	length time.Duration // of a slot; 0 means that there is no limit
	epoch  time.Time     // the start of slot 0; zero before the first booking
	booked map[int64]struct{}

	// All slots from from to before to are booked. Thousands of keys that fail together look for
	// their slots in the same long run; this saves them the walk.
	from, to int64
}

// longestWait is so short that no time in the lane overflows, unless more than 100,000 keys wait for a rate of less than one a day.
const longestWait = 100 * 365 * 24 * time.Hour

// noSlot is the slot of a key that has none.
const noSlot = -1

// book books the first free slot that starts at or after earliest, and not before now. It returns
// the slot and a time in it, which u in [0, 1) determines.
func (l *lane) book(now, earliest time.Time, u float64) (slot int64, at time.Time) {
	if l.length == 0 {
		return noSlot, earliest
	}
	if l.epoch.IsZero() {
		l.epoch, l.booked = now, map[int64]struct{}{}
	}
	if latest := now.Add(longestWait); earliest.After(latest) {
		earliest = latest
	}
	slot = l.free(max(l.slotAfter(now), l.slotAfter(earliest)))
	l.booked[slot] = struct{}{}
	start := l.epoch.Add(time.Duration(slot) * l.length)
	return slot, start.Add(time.Duration(u * float64(l.length)))
}

// free returns the first slot from begin on that is free. The caller books it.
func (l *lane) free(begin int64) int64 {
	slot, inRun := begin, false
	for {
		if l.from <= slot && slot < l.to {
			slot, inRun = l.to, true
		}
		if _, booked := l.booked[slot]; !booked {
			break
		}
		slot++
	}
	switch {
	case inRun:
		l.from, l.to = min(l.from, begin), slot+1
	case slot+1-begin > l.to-l.from:
		l.from, l.to = begin, slot+1
	}
	return slot
}

// release makes a slot free again.
func (l *lane) release(slot int64) {
	if slot == noSlot {
		return
	}
	delete(l.booked, slot)
	if l.from <= slot && slot < l.to {
		l.to = slot
	}
}

// slotAfter returns the first slot that starts at or after t.
func (l *lane) slotAfter(t time.Time) int64 {
	since := t.Sub(l.epoch)
	return int64((since + l.length - 1) / l.length)
}
