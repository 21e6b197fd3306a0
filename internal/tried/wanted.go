package tried

import "sync"

// wanted holds the numbers of the DialOptions that no channel has used yet. An option that is never used
// may be that of a channel whose service config names another policy, which nothing here can see.
var wanted struct {
	sync.Mutex
	last    int   // guarded by the mutex; the number given last
	pending []int // guarded by the mutex; in the order of the numbers
}

// maxPending bounds the memory of a program that makes options and never uses them.
const maxPending = 1000

// Want records that the program asks for the load-balancing policy on a channel. It returns the number of
// this wish, from 1.
func Want() (number int) {
	wanted.Lock()
	defer wanted.Unlock()
	wanted.last++
	if len(wanted.pending) < maxPending {
		wanted.pending = append(wanted.pending, wanted.last)
	}
	return wanted.last
}

// Grant records that a channel uses the policy, as the wish with this number asked. The number is 0 if
// the channel's settings come from elsewhere, such as the name resolver: then the oldest wish is granted.
func Grant(number int) {
	wanted.Lock()
	defer wanted.Unlock()
	for i, pending := range wanted.pending {
		if pending == number || number == 0 {
			wanted.pending = append(wanted.pending[:i], wanted.pending[i+1:]...)
			return
		}
	}
}

// Wanted reports whether the program has asked for the policy on a channel that does not use it, or not
// yet.
func Wanted() bool {
	wanted.Lock()
	defer wanted.Unlock()
	return len(wanted.pending) > 0
}
