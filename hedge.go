package grpcretry

import (
	"fmt"
	"reflect"
	"slices"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
)

// Hedging sends an attempt before the one before it has failed, so that a slow answer
// does not hold up the call (gRFC A6 #hedging-policy). The first success wins; the others
// are cancelled, with [ErrHedgeLost] as their cause, and waited for. See [WithHedging].
type Hedging struct {
	// MaxAttempts limits the attempts of a call, the first one included; at least 2. The
	// default is 2, which is one hedge.
	MaxAttempts int
	// Delay is how long to wait before each further attempt: [HedgeAfter] or
	// [HedgeAtQuantile]. It must be set.
	Delay HedgeDelay
	// NonFatalCodes are the status codes after which the next attempt is sent at once
	// while the others go on; any other failure ends the call. nil means the codes of the
	// policy, see [WithCodes]; an empty list makes every failure fatal, as A6 does with
	// a policy that has none. A [WithClassifier] is asked first, as always.
	NonFatalCodes []codes.Code
	// Budget is what hedges spend from, in addition to the budget of the method: both must
	// allow a hedge. An attempt that is sent when no other is in flight is a retry and spends
	// from the latter alone. A hedge's token is not returned when it wins. nil means 10% of
	// the calls that were answered in the last second, and one hedge that is kept for longer,
	// one such budget per Retrier and target: so a client sends no hedge before ten calls were
	// answered. [Unlimited] turns it off.
	Budget Budget
	// AllMethodsAreSafe says that every method of the service may run twice at the same
	// time. Without it [New] refuses hedging for all methods: only who names the
	// method can know.
	AllMethodsAreSafe bool
}

const defaultHedgedAttempts = 2

// WithHedging sends further attempts while the first is slow: unary calls and server
// streams. A server stream is decided by its first message or its final status. Only
// for methods that are safe to run twice at the same time: set it with [WithMethod] or
// on a single call. It is never on by default.
//
// A hedged call is not retried as others are: h.MaxAttempts takes the place of
// MaxAttempts, and after a failure with one of h.NonFatalCodes the next attempt is sent at
// once, without a backoff, unless the server asks for a wait. If a server forbids more
// attempts, those under way may still win. Each attempt after the first is paid from the
// budget; when it refuses, that attempt is not sent, and the budget is asked again after
// the delay, after twice the delay, and so on. Where h.Delay has no delay to give, the call
// is not hedged, and retried as any other.
//
// Not hedged, but retried, are also calls whose reply is not a pointer that a second
// one can be made of, and streams of methods with a client stream: [New] refuses those
// where it can know them, and the logger of [WithLogger] is told of each method once.
// [Disable] and a narrower WithMaxAttempts(1) turn hedging off too.
//
// Below the interceptor the attempts of a call run at the same time, all but the first
// on goroutines of their own: what is chained there must be safe for that. Observers and
// classifiers are still called one at a time for each call, but not always on its
// goroutine. A panic of any of them on another goroutine ends the program; one on the
// caller's is the caller's, after the other attempts have ended. A later WithHedging replaces an earlier one.
func WithHedging(h Hedging) CallOption {
	h.NonFatalCodes = slices.Clone(h.NonFatalCodes)
	return newCallOption("WithHedging", h.check(), func(s *Policy) { s.setHedging(&h) })
}

func (h *Hedging) check() error {
	switch {
	case h.MaxAttempts != 0 && h.MaxAttempts < 2:
		return fmt.Errorf("MaxAttempts: %d attempts, want at least 2", h.MaxAttempts)
	case isNil(h.Delay):
		return fmt.Errorf("Delay is not set, want HedgeAfter or HedgeAtQuantile")
	}
	if err := checkSelf(h.Delay); err != nil {
		return fmt.Errorf("Delay: %w", err)
	}
	if h.Budget != nil {
		if err := checkBudget(h.Budget); err != nil {
			return fmt.Errorf("Budget: %w", err)
		}
	}
	if len(h.NonFatalCodes) > 0 {
		if err := checkCodes(h.NonFatalCodes); err != nil {
			return fmt.Errorf("NonFatalCodes: %w", err)
		}
	}
	return nil
}

// checkHedging finds hedging where it must not be: for all methods without the word that
// they are safe, and for methods that are known to have a client stream.
func (m *methodPolicies) checkHedging() error {
	if h := m.all.Hedging; h != nil && !h.AllMethodsAreSafe {
		return fmt.Errorf("grpcretry: WithHedging for all methods, without AllMethodsAreSafe: " +
			"name the methods that are safe to run twice with WithMethod")
	}
	for pattern, p := range m.methods {
		own := resolve(m.fallback, p.scopes[len(p.scopes)-1]) // wider ones are for the other methods
		if own.Hedging != nil && sendsStream(pattern) {
			return fmt.Errorf("grpcretry: WithHedging in WithMethod %s: "+
				"a method with a client stream cannot be hedged", pattern)
		}
	}
	return nil
}

// sendsStream says whether the program knows "/pkg.Service/Method" as one with a client
// stream. Generated code makes its methods known.
func sendsStream(method string) bool {
	service := serviceOf(method)
	name := protoreflect.FullName(service[1:len(service)-1] + "." + method[len(service):])
	if !name.IsValid() {
		return false
	}
	found, err := protoregistry.GlobalFiles.FindDescriptorByName(name)
	if err != nil {
		return false
	}
	descriptor, ok := found.(protoreflect.MethodDescriptor)
	return ok && descriptor.IsStreamingClient()
}

// The reply of an attempt is its own; that of the first is the caller's. Two kinds of
// replies can be made a second time: protobuf messages, and pointers, to what the zero
// value is a good start for, as for every codec that unmarshals.

// A replyType makes replies like the caller's. It is read off that before the first
// attempt, which writes to it.
type replyType struct {
	of    any // protoreflect.MessageType or, of another reply, reflect.Type
	found any // a copy of the reply as it was found; nil if it was empty
}

func typeOfReply(r any) replyType {
	if m, ok := r.(proto.Message); ok {
		return replyType{m.ProtoReflect().Type(), newReply(r).found}
	}
	return replyType{of: reflect.TypeOf(r).Elem()} // a copy might share memory with the caller's
}

// make returns a reply like the caller's, as the first attempt found it.
func (t replyType) make() any {
	if message, ok := t.of.(protoreflect.MessageType); ok {
		if t.found != nil {
			return proto.Clone(t.found.(proto.Message))
		}
		return message.New().Interface()
	}
	made := reflect.New(t.of.(reflect.Type))
	if t.found != nil {
		made.Elem().Set(reflect.ValueOf(t.found).Elem())
	}
	return made.Interface()
}

// hedgingObstacle returns why a call cannot be hedged, "" if it can; desc is nil for a unary
// call, reply for a stream.
func hedgingObstacle(desc *grpc.StreamDesc, reply any) string {
	switch {
	case desc == nil && !canHedge(reply):
		return "no second reply can be made of its type"
	case desc != nil && desc.ClientStreams:
		return "it has a client stream"
	default:
		return ""
	}
}

// canHedge reports whether typeOfReply can make another one like reply.
func canHedge(reply any) bool {
	v := reflect.ValueOf(reply)
	return v.Kind() == reflect.Pointer && !v.IsNil()
}

// copyReply puts what a winning attempt received where the caller wants it.
func copyReply(to, from any) {
	if m, ok := to.(proto.Message); ok {
		proto.Reset(m)
		proto.Merge(m, from.(proto.Message))
		return
	}
	reflect.ValueOf(to).Elem().Set(reflect.ValueOf(from).Elem()) // nobody else has what that refers to
}

// A HedgeDelay says when a hedge is due. [HedgeAfter] and [HedgeAtQuantile] make those of
// this package; others may be written, such as a switch around one of those, and must be safe
// for concurrent use. One HedgeDelay may serve any number of methods and Retriers.
type HedgeDelay interface {
	// Delay is asked when a call to method, "/pkg.Service/Method", starts at the time
	// now: after which time, 0 or more, without a success is its next attempt to be
	// sent? The answer holds for all attempts of the call. If ok is false, the call is not hedged.
	Delay(method string, now time.Time) (d time.Duration, ok bool)
	// Answered is told how long the first attempt of a call took to succeed, also of a call
	// that is not hedged as there was no delay. If lost, it was cancelled after that time,
	// because another attempt had won: it would have taken longer. For a stream it is the
	// time to the first message. It runs at the end of every such call.
	Answered(method string, took time.Duration, lost bool, now time.Time)
}

// delay asks Delay about a call that starts now.
func (h *Hedging) delay(method string) (time.Duration, bool) {
	if d, fixed := h.Delay.(hedgeAfter); fixed {
		return time.Duration(d), true // spare the clock
	}
	return h.Delay.Delay(method, time.Now())
}

// answered reports how long a first attempt took to the delay that measures them; lost says
// that another attempt had won.
func (c *call) answered(a *attempt, lost bool) {
	if c.learner == nil || a.number > 1 {
		return
	}
	now := time.Now()
	c.learner.Answered(c.method, now.Sub(origin)-a.start, lost, now)
}

// HedgeAfter sends a hedge after each d without a success; with 0 all attempts are sent at
// once. A negative d is refused by [New].
func HedgeAfter(d time.Duration) HedgeDelay { return hedgeAfter(d) }

type hedgeAfter time.Duration

func (d hedgeAfter) Delay(string, time.Time) (time.Duration, bool)   { return time.Duration(d), true }
func (d hedgeAfter) Answered(string, time.Duration, bool, time.Time) {}

// String describes the delay to readers of a policy.
func (d hedgeAfter) String() string { return "after " + time.Duration(d).String() }

func (d hedgeAfter) check() error { return checkNotNegative(time.Duration(d)) }
