"""Waits for what a live `disagg.Resolver` does, and polls it as a scheduler would."""

from __future__ import annotations

import time


def until(condition, within_s=20):
    """Wait until it holds."""
    end = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def poll_until(resolver, count, within_s=30):
    """Poll until `count` requests have ended; returns the end of each, in order of ending."""
    ends = {}
    until = time.monotonic() + within_s
    while len(ends) < count:
        assert time.monotonic() < until, ends
        step = resolver.poll()
        assert not ends.keys() & {request for request, _ in step.resolved + step.failed}, "ended twice"
        ends |= dict(step.resolved + step.failed)
        time.sleep(0.001)
    return ends
