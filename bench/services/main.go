// Command services draws the pictures of docs/services.md: the attempts that one call causes in a row of
// services which all retry, and the times of attempts that share a deadline. Real services make the
// attempts of the former, and the library's engine decides those of the latter.
//
//	services -layers ../docs/layers.svg -deadlines ../docs/deadlines.svg
package main

import (
	"flag"
	"fmt"
	"os"
)

func main() {
	layers := flag.String("layers", "", "draw the trees of attempts into this file")
	deadlines := flag.String("deadlines", "", "draw the time lines into this file")
	flag.Parse()
	for _, one := range []struct {
		file string
		draw func() (string, error)
	}{{*layers, drawLayers}, {*deadlines, drawDeadlines}} {
		if err := write(one.file, one.draw); err != nil {
			fmt.Fprintln(os.Stderr, "services:", err)
			os.Exit(1)
		}
	}
}

// write writes a picture into a file, unless the file has no name.
func write(file string, draw func() (string, error)) error {
	if file == "" {
		return nil
	}
	picture, err := draw()
	if err != nil {
		return err
	}
	return os.WriteFile(file, []byte(picture), 0o644)
}
