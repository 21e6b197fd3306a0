package main

import (
	"context"
	"io"
)

func writeDocs(ctx context.Context, folder string, w io.Writer) error { return nil }
