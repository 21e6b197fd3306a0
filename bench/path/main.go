// Command path shows where the time of a call goes that succeeds on its first attempt: it makes such
// calls through the interceptor alone, takes a processor profile meanwhile, and draws what
// is in it.
//
//	path -for 20s -picture ../docs/path.svg
//
// With -calls it makes so many calls and measures nothing: for tools that do, such as
// callgrind, which counts instructions whatever else the machine does.
package main

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"io"
	"os"
	"runtime"
	"runtime/pprof"
	"time"

	"github.com/google/pprof/profile"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"github.com/grpcretry/grpcretry"
	echov1 "github.com/grpcretry/grpcretry/proto/echo/v1"
)

func main() {
	if err := run(os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "path:", err)
		os.Exit(1)
	}
}

func run(args []string, out io.Writer) error {
	flags := flag.NewFlagSet("path", flag.ContinueOnError)
	length := flags.Duration("for", 20*time.Second, "how long to make calls; the profile has a hundred samples a second")
	picture := flags.String("picture", "", "draw the picture into this file")
	calls := flags.Int("calls", 0, "only make so many calls")
	kept := flags.String("profile", "", "keep the profile in this file, for go tool pprof")
	if err := flags.Parse(args); err != nil {
		return err
	}
	call, closeConn, err := caller()
	if err != nil {
		return err
	}
	defer func() { _ = closeConn() }()
	if *calls > 0 {
		for range *calls {
			call()
		}
		return nil
	}
	repeat(call, *length/20) // what is made once
	made := 0
	raw, err := profiled(func() { made = repeat(call, *length) })
	if err != nil {
		return err
	}
	if *kept != "" {
		if err := os.WriteFile(*kept, raw, 0o644); err != nil {
			return err
		}
	}
	p, err := profile.ParseData(raw)
	if err != nil {
		return err
	}
	b := breakDown(p, made)
	b.print(out)
	if *picture == "" {
		return nil
	}
	return os.WriteFile(*picture, []byte(b.draw(machine())), 0o644)
}

// caller makes a call as a generated stub does, with default options, but for gRPC.
func caller() (call func(), closeConn func() error, err error) {
	cc, err := grpc.NewClient("dns:///echo.example:443", grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
	intercept := grpcretry.UnaryClientInterceptor(grpcretry.WithBuiltInRetryDisabled()) // as that of DialOptions
	req, reply, opts := &echov1.EchoRequest{}, &echov1.EchoResponse{}, []grpc.CallOption{grpc.StaticMethod()}
	call = func() {
		_ = intercept(ctx, echov1.EchoService_Echo_FullMethodName, req, reply, cc, invoke, opts...)
	}
	return call, func() error { cancel(); return cc.Close() }, nil
}

// invoke stands for gRPC.
func invoke(context.Context, string, any, any, *grpc.ClientConn, ...grpc.CallOption) error {
	return nil
}

// repeat makes calls for that long, and returns how many.
func repeat(call func(), length time.Duration) (calls int) {
	const between = 1000 // looks at the clock
	for start := time.Now(); time.Since(start) < length; calls += between {
		for range between {
			call()
		}
	}
	return calls
}

func profiled(f func()) ([]byte, error) {
	runtime.GC()
	var raw bytes.Buffer
	if err := pprof.StartCPUProfile(&raw); err != nil {
		return nil, err
	}
	f()
	pprof.StopCPUProfile()
	return raw.Bytes(), nil
}

func machine() string {
	return fmt.Sprintf("Go %s, %s/%s, %s", runtime.Version()[2:], runtime.GOOS, runtime.GOARCH, time.Now().UTC().Format(time.DateOnly))
}
