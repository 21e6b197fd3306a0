// Program reconcile works on a key that fails once.
package main

import (
	"fmt"
	"log"

	"github.com/grpcretry/grpcretry"
	"github.com/grpcretry/grpcretry/reconcile"
)

func main() {
	retrier, err := grpcretry.New()
	if err != nil {
		log.Fatal(err)
	}
	limiter := reconcile.NewRateLimiter[string](retrier, "/reconcile/orders")
	queue := reconcile.NewQueue(limiter, "")
	queue.Add("shop/1")
	for attempts := 1; ; attempts++ {
		key, _ := queue.Get()
		if attempts == 2 {
			queue.Forget(key)
			queue.Done(key)
			queue.ShutDown()
			fmt.Println(attempts, "attempts")
			return
		}
		queue.AddRateLimited(key)
		queue.Done(key)
	}
}
