// Command questions draws the picture of docs/three-questions.md: an RPC, an HTTP request and a
// reconcile key fail at the same time, and share a budget. The library itself makes the decisions.
//
//	questions -picture ../docs/three-questions.svg
package main

import (
	"flag"
	"fmt"
	"os"
)

func main() {
	picture := flag.String("picture", "", "draw the picture into this file")
	flag.Parse()
	if err := run(*picture); err != nil {
		fmt.Fprintln(os.Stderr, "questions:", err)
		os.Exit(1)
	}
}

func run(picture string) error {
	drawn, err := draw()
	if err != nil {
		return err
	}
	if picture == "" {
		_, err := os.Stdout.WriteString(drawn)
		return err
	}
	return os.WriteFile(picture, []byte(drawn), 0o644)
}
