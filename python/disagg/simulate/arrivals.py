"""When requests arrive: a trace's times, or Poisson arrivals with bursts."""

from __future__ import annotations

import random

from disagg.simulate.options import Options
from disagg.simulate.trace import MAX_REQUESTS, read_trace
from disagg.usage import UsageError

__all__ = ["arrival_times", "bursty_times"]

# A fifth of the requests come in bursts of 25 on average, each within 10 ms: what a load balancer that has
# just lost a decode engine, or a batch client, does to the others.
BURST_SHARE = 0.2
BURST_MEAN = 25
BURST_SPREAD_S = 0.010


def arrival_times(options: Options) -> list[float]:
    """Return the arrival time of each request in seconds from the start of the run, ascending.

    With a trace, its times from its first request, divided by the speed-up, cut at `duration` if given.
    Raises UsageError (a TraceError for the trace) when there is nothing to run, or too much.
    """
    if options.trace is None:
        duration = Options.DEFAULT_DURATION_S if options.duration is None else options.duration
        if options.rate * duration > MAX_REQUESTS:
            raise UsageError(f"--rate {options.rate:g} --duration {duration:g}: more than {MAX_REQUESTS} requests")
        return bursty_times(random.Random(options.seed), options.rate, duration)
    stamps = read_trace(options.trace)
    scale = 1000 * options.speedup
    times = [(stamp - stamps[0]) / scale for stamp in stamps]
    if options.duration is not None:
        times = [time for time in times if time <= options.duration]
    if times[-1] > MAX_DURATION_S:
        raise UsageError(
            f"--trace {options.trace}: takes {times[-1]:.0f} s at --speedup {options.speedup:g}; "
            f"at most {MAX_DURATION_S} s are run: raise --speedup or give --duration"
        )
    return times


def bursty_times(rng: random.Random, rate: float, duration: float) -> list[float]:
    """Draw about `rate * duration` times in [0, duration): a Poisson stream, and bursts at Poisson times.

    At least one time comes out, so that a run is never empty.
    """
    times = list(_poisson(rng, rate * (1 - BURST_SHARE), duration))
    for start in _poisson(rng, rate * BURST_SHARE / BURST_MEAN, duration):
        size = rng.randint(BURST_MEAN // 2, BURST_MEAN + BURST_MEAN // 2)
        times.extend(start + rng.random() * BURST_SPREAD_S for _ in range(size))
    return sorted(time for time in times if time < duration) or [0.0]


def _poisson(rng: random.Random, rate: float, duration: float) -> list[float]:
    times: list[float] = []
    time = rng.expovariate(rate)
    while time < duration:
        times.append(time)
        time += rng.expovariate(rate)
    return times


MAX_DURATION_S = 3600
