package main

import (
	"encoding/csv"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strconv"
	"time"

	"github.com/grpcretry/grpcretry/cmd/herd/internal/sim"
)

// writeFiles writes the files that the command line names.
func (o *options) writeFiles(s seen) error {
	for _, f := range []struct {
		path  string
		write func(io.Writer, seen) error
	}{
		{o.svg, writeSVG},
		{o.png, writePNG},
		{o.html, writeHTML},
		{o.csv, writeCSV},
		{o.json, writeJSON},
	} {
		if f.path == "" {
			continue
		}
		if err := writeFile(f.path, func(w io.Writer) error { return f.write(w, s) }); err != nil {
			return err
		}
	}
	return nil
}

// writeFile creates a file; its errors name the file.
func writeFile(path string, write func(io.Writer) error) (err error) {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer func() {
		if closing := f.Close(); err == nil {
			err = closing
		}
	}()
	if err := write(f); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

// dump prints scenarios in the form that -scenario reads.
func dump(w io.Writer, study sim.Study) error {
	var v any = study.Scenarios
	if len(study.Scenarios) == 1 {
		v = study.Scenarios[0]
	}
	return writeIndented(w, v)
}

// writeJSON writes all results, and the averages over seeds.
func writeJSON(w io.Writer, s seen) error {
	type comparison struct {
		Scenario string      `json:"scenario"`
		Strategy string      `json:"strategy"`
		Runs     int         `json:"runs"`
		Mean     sim.Summary `json:"mean"`
		Result   *sim.Result `json:"result"`
	}
	var all []comparison
	for _, one := range s.scenarios {
		for _, c := range one.found {
			all = append(all, comparison{one.Name, c.Strategy, c.Runs, c.Mean, c.Result})
		}
	}
	return writeIndented(w, all)
}

func writeIndented(w io.Writer, v any) error {
	text, err := json.MarshalIndent(v, "", "  ")
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(w, "%s\n", text)
	return err
}

// writeCSV writes a line for each bucket of each server, strategy and scenario, of the first
// seed. Times are seconds.
func writeCSV(w io.Writer, s seen) error {
	out := csv.NewWriter(w)
	if err := out.Write([]string{"scenario", "strategy", "server", "second", "offered", "retried", "accepted", "rejected", "down",
		"served", "late", "refused_by_budget", "in_flight", "open_calls", "capacity"}); err != nil {
		return err
	}
	for _, one := range s.scenarios {
		for _, c := range one.found {
			for _, server := range c.Result.Servers {
				for i, b := range server.Series {
					at := time.Duration(i) * c.Result.Bucket
					if err := out.Write([]string{one.Name, c.Strategy, server.Name, decimal(at.Seconds()),
						strconv.Itoa(b.Offered), strconv.Itoa(b.Retried), strconv.Itoa(b.Accepted), strconv.Itoa(b.Rejected), strconv.Itoa(b.Down),
						strconv.Itoa(b.Served), strconv.Itoa(b.Late), strconv.Itoa(b.Refused), decimal(b.InFlight), strconv.Itoa(b.Open), decimal(b.Capacity)}); err != nil {
						return err
					}
				}
			}
		}
	}
	out.Flush()
	return out.Error()
}

func decimal(v float64) string { return strconv.FormatFloat(v, 'f', -1, 64) }
