package client

import (
	"encoding/json"
	"fmt"
	"os"

	"github.com/grpcretry/grpcretry"
)

// settings may change while the program runs. Everything else about retries changes with a release, because
// it wants a review.
type settings struct {
	RetriesOff  bool `json:"retries_off"` // the kill switch, for incidents
	MaxAttempts int  `json:"max_attempts"`
}

// reload applies the settings in a file. Calls in flight finish as they started. After an error nothing has
// changed.
func reload(file string, retrier *grpcretry.Retrier) error {
	if file == "" {
		return nil
	}
	open, err := os.Open(file)
	if err != nil {
		return err
	}
	defer open.Close()
	s := settings{MaxAttempts: maxAttempts}
	decoder := json.NewDecoder(open)
	decoder.DisallowUnknownFields() // a kill switch with a typo must not look as if it worked
	if err := decoder.Decode(&s); err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	if s.RetriesOff {
		return retrier.Update(grpcretry.Disable())
	}
	return retrier.Update(grpcretry.WithMaxAttempts(s.MaxAttempts)) // also takes Disable back
}
