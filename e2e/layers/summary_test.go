package main

import (
	"errors"
	"strings"
	"testing"
	"time"
)

func TestSummarize(t *testing.T) {
	begin := time.Now()
	at := func(ms int) time.Time { return begin.Add(time.Duration(ms) * time.Millisecond) }
	unavailable := errors.New("unavailable")
	tr := &trial{wentDown: at(1000), cameUp: at(2000), turnedFlaky: at(3000), killed: at(4000)}
	add := func(start, end int, err error, attempts ...int) {
		tr.calls.made = append(tr.calls.made, &call{start: at(start), end: at(end), late: time.Duration(start), err: err})
		for _, a := range attempts {
			tr.attempts = append(tr.attempts, attempt{at(a), int64(len(tr.calls.made))})
		}
	}
	add(900, 901, nil, 900)
	add(1000, 1999, unavailable, 1000, 1001, 1002) // the outage begins with it
	add(1500, 1600, unavailable, 1500)             // and one attempt
	add(1900, 2070, unavailable, 1900, 1950, 1999) // ends after the outage, which it makes longer
	add(1980, 2080, nil, 1980, 2080)               // is rescued
	add(2000, 2030, unavailable, 2000)             // starts after the outage
	add(2900, 3001, unavailable, 2950)             // lost while D is flaky
	add(3990, 4001, unavailable, 3995)             // lost because D is killed
	add(4500, 4501, nil)
	s, err := tr.summarize()
	if err != nil {
		t.Fatal(err)
	}
	want := summary{
		down:      outage{calls: 2, attempts: 4, most: 3, amplification: 9.0 / 4},
		lostFlaky: 1, lostRestart: 1, recovery: 70 * time.Millisecond, late: 4500,
	}
	if *s != want {
		t.Errorf("summarize = %+v, want %+v", *s, want)
	}

	add(10, 20, unavailable)
	if _, err := tr.summarize(); !errors.Is(err, unavailable) {
		t.Errorf("summarize = %v, want the error of the call that failed before the outage", err)
	}
}

var someRows = []row{
	{noLibrary, &summary{down: outage{calls: 10, attempts: 270, most: 27}, lostRestart: 11, recovery: 1234 * time.Millisecond}},
	{everything, &summary{down: outage{amplification: 1.05}, recovery: 1400 * time.Microsecond}},
}

func TestTableText(t *testing.T) {
	const want = `
                           attempts per call  most  lost, restart
  no library                           27.00    27             11
  everything                            1.05     –              0
`
	if got := tableText(someRows); got != strings.TrimPrefix(want, "\n") {
		t.Errorf("tableText =\n%swant%s", got, want)
	}
}

func TestRestText(t *testing.T) {
	for _, tt := range []struct {
		rows []row
		want string
	}{
		{someRows, `Lost while D was flaky, although it would have responded to one of C's three attempts: no call.
After the end of the outage, calls failed for 1.23 s at most (no library).
`},
		{[]row{{everything, &summary{lostFlaky: 2}}},
			`Lost while D was flaky, although it would have responded to one of C's three attempts: 2 (everything).
With each setup, the last failure of the outage was before its end.
`},
	} {
		if got := restText(tt.rows); got != tt.want {
			t.Errorf("restText =\n%swant\n%s", got, tt.want)
		}
	}
}

func TestTableMarkdown(t *testing.T) {
	const want = `|  | attempts per call | most | lost, restart |
|---|---:|---:|---:|
| no library | 27.00 | 27 | 11 |
| everything | 1.05 | – | 0 |
`
	if got := tableMarkdown(someRows); got != want {
		t.Errorf("tableMarkdown =\n%swant\n%s", got, want)
	}
}
