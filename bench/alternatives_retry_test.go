package bench

import (
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

// The tests here are why the numbers compare like with like.

var settings = map[string]setting{"as used": asUsed, "at once": atOnce}

// TestAlternativesMakeTheSameAttempts counts them at the server.
func TestAlternativesMakeTheSameAttempts(t *testing.T) {
	for _, r := range slices.Concat(all, careful) {
		for name, s := range settings {
			for code, want := range map[codes.Code]int64{
				codes.Unavailable:       attempts,
				codes.ResourceExhausted: attempts,
				codes.NotFound:          1,
			} {
				if !r.retries {
					want = 1
				}
				t.Run(r.name+"/"+name+"/"+code.String(), func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) {
						server := newServer()
						server.failure = status.Error(code, "as told")
						client := echov1.NewEchoServiceClient(dialServer(t, server, r.dialOptions(s)...))
						_, err := client.Echo(t.Context(), request(failAlways))
						if status.Code(err) != code {
							t.Errorf("Echo = %v, want %v", err, code)
						}
						if got := server.attempts.Load(); got != want {
							t.Errorf("the server saw %d attempts, want %d", got, want)
						}
					})
				})
			}
		}
	}
}

// TestAlternativesAreRescued is about clients in use: our default budget is earned by answered calls,
// and a new client has no more than the retries of one call in hand.
func TestAlternativesAreRescued(t *testing.T) {
	const answered = 50 // earn 10 retries, of which each call below spends 2 and borrows 1
	for _, r := range which(withRetries) {
		for name, s := range settings {
			t.Run(r.name+"/"+name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					server := newServer()
					client := echov1.NewEchoServiceClient(dialServer(t, server, r.dialOptions(s)...))
					for range answered {
						if _, err := client.Echo(t.Context(), request(0)); err != nil {
							t.Fatal(err)
						}
					}
					before := server.attempts.Load()
					for call := range int64(3) {
						if _, err := client.Echo(t.Context(), request(attempts-1)); err != nil {
							t.Fatalf("call %d = %v, want an answer to attempt %d", call, err, attempts)
						}
					}
					if got := server.attempts.Load() - before; got != 3*attempts {
						t.Errorf("the server saw %d attempts of 3 calls, want %d", got, 3*attempts)
					}
				})
			})
		}
	}
}

// TestAlternativesWait holds them to the waits that the settings stand for.
func TestAlternativesWait(t *testing.T) {
	for _, r := range which(withRetries) {
		for _, s := range []struct {
			name          string
			setting       setting
			least, atMost time.Duration
		}{
			{"at once", atOnce, 0, time.Microsecond},
			{"in backoff", inBackoff, 45 * time.Minute, 4 * anHour},
		} {
			t.Run(r.name+"/"+s.name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					client := echov1.NewEchoServiceClient(dialServer(t, newServer(), r.dialOptions(s.setting)...))
					start := time.Now()
					if _, err := client.Echo(t.Context(), request(1)); err != nil {
						t.Fatal(err)
					}
					if took := time.Since(start); took < s.least || took > s.atMost {
						t.Errorf("a call with one retry took %v, want %v to %v", took, s.least, s.atMost)
					}
				})
			})
		}
	}
}

// TestEqualInformation is what the tables call "equal": header and trailer reach the caller.
func TestEqualInformation(t *testing.T) {
	for _, r := range all {
		t.Run(r.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				client := echov1.NewEchoServiceClient(dialServer(t, newServer(), r.dialOptions(asUsed)...))
				var header, trailer metadata.MD
				if _, err := client.Echo(t.Context(), request(0), grpc.Header(&header), grpc.Trailer(&trailer)); err != nil {
					t.Fatal(err)
				}
				if header == nil || trailer == nil {
					t.Errorf("the caller got header %v and trailer %v, want both", header, trailer)
				}
			})
		})
	}
}

// TestStreamsOfAlternatives holds the registry to what it says of streams.
func TestStreamsOfAlternatives(t *testing.T) {
	for _, r := range all {
		t.Run(r.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				client := echov1.NewEchoServiceClient(dialServer(t, newServer(), r.dialOptions(asUsed)...))
				if r.serverStreams {
					expand(t, t.Context(), client, 10)
				}
				switch stream, err := client.Chat(t.Context()); {
				case !r.clientStreams && r.serverStreams && status.Code(err) != codes.Unimplemented:
					t.Errorf("Chat = %v, want UNIMPLEMENTED", err)
				case r.clientStreams && err != nil:
					t.Errorf("Chat = %v", err)
				case err == nil:
					pingPong(t, stream)
					finishChat(t, stream)
				}
			})
		})
	}
}

// TestServerProcess holds the server of its own process to the same behaviour.
func TestServerProcess(t *testing.T) {
	client := echov1.NewEchoServiceClient(tcp.dial(t))
	before := attemptsAt(t, client)
	if _, err := client.Echo(t.Context(), request(failAlways)); status.Code(err) != codes.Unavailable {
		t.Errorf("Echo = %v, want UNAVAILABLE", err)
	}
	answer, err := client.Echo(t.Context(), request(0))
	if err != nil || len(answer.GetPayload()) != len(payload) {
		t.Errorf("Echo = %v, %v, want the payload", answer, err)
	}
	if got := attemptsAt(t, client) - before; got != 2 {
		t.Errorf("the server saw %d attempts, want 2", got)
	}
}

// TestDefaultBudgetOfANewClient is what "as used" means for us in an outage: three retries for
// all calls together, and one attempt for each call after them.
func TestDefaultBudgetOfANewClient(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const calls = 10
		server := newServer()
		client := echov1.NewEchoServiceClient(dialServer(t, server, ours.dialOptions(asUsed)...))
		for range calls {
			if _, err := client.Echo(t.Context(), request(failAlways)); status.Code(err) != codes.Unavailable {
				t.Errorf("Echo = %v, want UNAVAILABLE", err)
			}
		}
		if got, want := server.attempts.Load(), int64(calls+3); got != want {
			t.Errorf("the server saw %d attempts of %d calls, want %d", got, calls, want)
		}
	})
}
