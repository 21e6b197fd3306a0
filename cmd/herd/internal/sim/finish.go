package sim

import (
	"slices"
	"time"
)

// This file computes the result of a run that has ended, or was stopped.

func (r *run) result(complete bool) *Result {
	end := max(r.last, r.idle)
	if r.scenario.Duration > 0 {
		end = r.end
	}
	if !complete {
		end = r.now
	}
	out := &Result{
		Scenario: r.scenario.Name,
		Strategy: r.strategy.Name,
		Seed:     r.scenario.Seed,
		Complete: complete,
		End:      time.Duration(end),
		Bucket:   time.Duration(r.bucket),
		Events:   r.events,
	}
	buckets := int((end + r.bucket - 1) / r.bucket)
	for _, g := range r.groups {
		buckets = max(buckets, len(g.seen.items))
	}
	for _, s := range r.servers {
		buckets = max(buckets, len(s.seen.items))
	}
	last := int64(buckets-1) * r.bucket
	for _, g := range r.groups {
		out.Groups = append(out.Groups, g.finish(last))
	}
	for _, c := range r.downstream {
		out.Downstream = append(out.Downstream, c.finish(last))
	}
	for _, s := range r.servers {
		out.Servers = append(out.Servers, s.finish(end, last))
	}
	r.summarise(out)
	return out
}

// finish completes the figures of a caller. The time of the last bucket is last.
func (c *caller) finish(last int64) GroupResult {
	if last >= 0 {
		c.seen.at(last)
	}
	out := c.GroupResult
	for _, b := range c.seen.items {
		out.Calls += b.Calls
		out.Succeeded += b.Succeeded
		out.Failed += b.Failed
		out.Refused += b.Refused
		out.Attempts += b.Attempts
		out.Retries += b.Retries
		out.Wasted += b.Wasted
		out.Hedges += b.Hedges
		out.Lost += b.Lost
		out.Suppressed += b.Suppressed
	}
	out.Latency = quantiles(c.succeeded)
	out.Rescued = quantiles(c.rescued)
	out.FailedAfter = quantiles(c.failed)
	out.PerCall = counts(c.perCall)
	out.Series = c.seen.items
	return out
}

func (s *server) finish(end, last int64) ServerResult {
	if last >= 0 {
		s.seen.at(last)
	}
	s.account(end, s.seen.width)
	out := s.ServerResult
	if end > 0 {
		out.MeanInside = s.stayed / float64(end)
		if s.workers > 0 {
			out.Utilisation = s.worked / float64(end) / float64(s.Workers)
		}
	}
	if s.started > 0 {
		out.MeanWait = time.Duration(s.waited / float64(s.started))
	}
	out.Series = s.seen.items
	for i := range out.Series {
		b := &out.Series[i]
		from := int64(i) * s.seen.width
		b.Capacity = s.config.Total() * s.up(from, from+s.seen.width) * time.Duration(s.seen.width).Seconds()
		out.Offered += b.Offered
		out.Retried += b.Retried
		out.Accepted += b.Accepted
		out.Rejected += b.Rejected
		out.Down += b.Down
		out.Served += b.Served
		out.Late += b.Late
	}
	return out
}

func (r *run) summarise(out *Result) {
	s := &out.Summary
	var latencies []int64
	for i, g := range out.Groups {
		s.Calls += float64(g.Calls)
		s.Succeeded += float64(g.Succeeded)
		s.Failed += float64(g.Failed)
		s.Open += float64(g.Open)
		s.Refused += float64(g.Refused)
		s.Attempts += float64(g.Attempts)
		s.Wasted += float64(g.Wasted)
		s.Hedges += float64(g.Hedges)
		s.Lost += float64(g.Lost)
		s.Suppressed += float64(g.Suppressed)
		latencies = append(slices.Clip(latencies), r.groups[i].succeeded...)
	}
	for _, one := range out.Servers {
		s.Down += float64(one.Down)
	}
	q := quantiles(latencies)
	s.P50, s.P90, s.P99, s.P999, s.Longest = q.P50, q.P90, q.P99, q.P999, q.Max
	out.Tail = tail(latencies, int(s.Failed))
	s.Done = time.Duration(r.last)
	s.Stable = r.stable(out)

	at := &out.Servers[len(out.Servers)-1]
	if s.Calls > 0 {
		s.Amplification = float64(at.Offered) / s.Calls
	}
	if r.downCalls > 0 {
		s.AmplifiedDown = float64(r.downAttempts) / float64(r.downCalls)
	}
	s.peaks(at, out.Bucket, r.outageEnd())
}

// inOutage reports whether any server has an outage now, slow start included.
func (r *run) inOutage() bool {
	for i := range r.scenario.Servers {
		for _, o := range r.scenario.Servers[i].Outages {
			if since := r.now - int64(o.From); since >= 0 && since < int64(o.For+o.SlowStart) {
				return true
			}
		}
	}
	return false
}

// peaks computes the largest numbers of attempts that arrived at a server in one bucket.
func (s *Summary) peaks(at *ServerResult, width time.Duration, outageEnd int64) {
	perSecond := 1 / width.Seconds()
	for i, b := range at.Series {
		offered := float64(b.Offered) * perSecond
		s.Peak = max(s.Peak, offered)
		if int64(i)*int64(width) < outageEnd {
			continue
		}
		s.PeakAfter = max(s.PeakAfter, offered)
		if b.Capacity > 0 {
			s.Over = max(s.Over, offered-b.Capacity*perSecond)
		}
	}
}

// outageEnd returns the end of the last outage of any server, slow start included.
func (r *run) outageEnd() (end int64) {
	for i := range r.scenario.Servers {
		for _, o := range r.scenario.Servers[i].Outages {
			end = max(end, int64(o.From+o.For+o.SlowStart))
		}
	}
	return end
}

// stable returns how long attempts kept failing after the outages; -1 if that lasted to the end,
// unless the end came because every call had succeeded.
func (r *run) stable(out *Result) time.Duration {
	outageEnd := r.outageEnd()
	stable := time.Duration(0)
	well := false // attempts have ended since the last bad bucket
	for i := range out.Groups[0].Series {
		from := int64(i) * r.bucket
		if from < outageEnd {
			continue
		}
		good, bad := 0, 0
		for _, g := range out.Groups {
			good += g.Series[i].Succeeded
			bad += g.Series[i].Wasted
		}
		switch {
		case 100*bad > good+bad:
			stable, well = time.Duration(from+r.bucket-outageEnd), false
		case good+bad > 0:
			well = true
		}
	}
	if s := out.Summary; !well && s.Failed+s.Open > 0 {
		return -1
	}
	return stable
}
