package main

import (
	"fmt"
	"io"
	"math"
)

// sameStory compares each ratio of an alternative to ours with that of an earlier file. An error
// says that some differ by more than a tenth.
func sameStory(out io.Writer, earlier, now *measurements) error {
	const tolerated = 0.10
	compared, apart := 0, 0
	for _, k := range now.order {
		client := valueOf(k.key, "client")
		if client == "" || client == ours || k.unit != "sec/op" { // a message's share of it has the same ratio
			continue
		}
		before, ok := earlier.ratioToOurs(k, client)
		after, both := now.ratioToOurs(k, client)
		if !ok || !both {
			continue
		}
		compared++
		if math.Abs(after/before-1) > tolerated {
			apart++
			fmt.Fprintf(out, "%s/%s: %s, and %s before\n", k.benchmark, k.key, ratio(after), ratio(before))
		}
	}
	fmt.Fprintf(out, "%d of %d ratios differ by more than %s\n", apart, compared, percent(tolerated))
	if apart > 0 || compared == 0 {
		return fmt.Errorf("the two files do not agree")
	}
	return nil
}

func (m *measurements) ratioToOurs(k sampleKey, client string) (float64, bool) {
	oursKey := k.key[:len(k.key)-len(client)] + ours // the client comes last
	s, own := m.find(k.benchmark, k.key, k.unit), m.find(k.benchmark, oursKey, k.unit)
	if s == nil || own == nil {
		return 0, false
	}
	return s.over(own)
}
