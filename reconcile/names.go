package reconcile

// The names of the metrics. docs/reconcile.md in the repository lists their meanings.
const (
	MetricRetries        = "grpcretry.reconcile.retries"
	MetricForwarded      = "grpcretry.reconcile.forwarded"
	MetricFailingKeys    = "grpcretry.reconcile.failing_keys"
	MetricWaitingKeys    = "grpcretry.reconcile.waiting_keys"
	MetricBudgetBalance  = "grpcretry.reconcile.budget.balance"
	MetricBudgetRefusals = "grpcretry.reconcile.budget.refusals"
	MetricQueueDepth     = "grpcretry.reconcile.queue.depth"
	MetricQueueOldest    = "grpcretry.reconcile.queue.oldest"
	MetricInFlight       = "grpcretry.reconcile.in_flight"
	MetricRateWait       = "grpcretry.reconcile.rate_wait.duration"
)

// The names of the attributes. No key is ever an attribute.
const (
	AttrName   = "grpcretry.reconcile.name"
	AttrReason = "grpcretry.reconcile.reason"
)

// The values of [AttrReason]: why a failed key returns when it does. A key that goes to the slow lane for another
// reason of package grpcretry has that one's word, as in the metrics.
const (
	ReasonBackoff      = "backoff"       // the budget paid, and the policy's backoff applies
	ReasonPushback     = "pushback"      // the budget paid, and the server named the wait by pushback
	ReasonRetryInfo    = "retry_info"    // the same by RetryInfo or Kubernetes' Retry-After
	ReasonBudget       = "budget"        // slow lane: the budget refused
	ReasonExhausted    = "exhausted"     // slow lane: the key has failed MaxAttempts times in a row
	ReasonNotRetryable = "not_retryable" // slow lane: the policy does not retry this failure
	ReasonServer       = "server"        // slow lane: the server forbade a retry, or named too long a wait
	ReasonMaxElapsed   = "max_elapsed"   // slow lane: the policy's MaxElapsed has passed
)
