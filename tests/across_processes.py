"""What test_process_manners.py runs in other processes, which import it by name."""

from __future__ import annotations

import os
import time

import disagg

DECODE = disagg.DecodeRank(attn_tp_size=4, engine_rank=1, page_size=64, kv="mla")
INFO = disagg.PrefillInfo(attn_tp_size=8, pp_size=2, dp_size=2, page_size=64, extras={"n": [1, None, "x"]})


def values():
    """One of each value class; made anew, so equal to those of another process by their fields only."""
    mapping = disagg.map_ranks(DECODE, INFO)
    endpoint = disagg.Endpoint(dp=1, cp=0, tp=2, pp=1, ip="10.0.0.7", port=41000, dummy=True)
    route = disagg.Route("10.0.0.7:8998", 1, mapping, (endpoint,), INFO, epoch=3)
    failure = disagg.Failure("peer_lost", "gone", 503, "10.0.0.7:8998", 2, contacted=((0, 0, 1, 0),))
    event = disagg.Event("peer_lost", "10.0.0.7:8998", 3, "old", None, (7, 8))
    return [
        DECODE,
        INFO,
        mapping,
        disagg.serve_ranks(DECODE, INFO, tp_rank=2),
        disagg.RetryPolicy(max_attempts=3, jitter=0.5),
        disagg.RetryPolicy.per_cycle(7),
        endpoint,
        route,
        failure,
        event,
        disagg.Step(5, ((1, route),), ((2, failure),), (event,), more=True),
        *disagg.compatibility(DECODE, disagg.PrefillInfo(attn_tp_size=3, page_size=32)),
    ]


def errors():
    """One of each error class."""
    return [
        disagg.ConfigError("token", "needs allowed_hosts"),
        disagg.IncompatiblePeer(disagg.compatibility(DECODE, disagg.PrefillInfo(attn_tp_size=3, page_size=32))),
        disagg.ProtocolError("dp_size", "-7", "must be a size"),
        disagg.PeerUnreachable("10.0.0.7:8998", 15, "refused"),
        disagg.DpRankTimeout("10.0.0.7:8998", 7, 30.0),
        disagg.NotAllowed("10.0.0.7:8998"),
    ]


def fields(error):
    return type(error), error.args, vars(error), str(error)


def echo(sent_values, sent_errors):
    """Return what was sent, if it is what this process makes itself."""
    assert sent_values == values()
    assert [fields(error) for error in sent_errors] == [fields(error) for error in errors()]
    return os.getpid(), sent_values, sent_errors


def raise_nth(number):
    raise errors()[number]


def fail_with_own(_):
    """Make a Resolver of this process's own, and return how a request to nobody ends."""
    retry = disagg.RetryPolicy(max_attempts=1, min_wait_s=0.0)
    with disagg.BootstrapServer() as server, disagg.Resolver(DECODE, retry) as resolver:
        assert server.port
        resolver.add("request", "127.0.0.1:1", 1)
        until = time.monotonic() + 30
        while not (step := resolver.poll()).failed:
            assert time.monotonic() < until
            time.sleep(0.001)
        return step.failed
