"""`disagg.Resolver` in a process: lifetime, fork, pickle, import cost, options."""

from __future__ import annotations

import gc
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import time
import weakref

import pytest

import disagg
from machines import Request
from polling import poll_until

DECODE = disagg.DecodeRank(attn_tp_size=1, engine_rank=0, page_size=64)
QUICK = disagg.RetryPolicy(max_attempts=2, interval_s=0.1, min_wait_s=0.0)
NOBODY = "127.0.0.1:1"


def run_python(code):
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_dead_peer_fails_with_address_attempts_and_last_error():
    with disagg.Resolver(DECODE, QUICK) as resolver:
        request = Request("a")
        assert resolver.add(request, NOBODY, 1) is None
        ((ended, failure),) = poll_until(resolver, 1).items()
    assert ended is request
    assert (failure.kind, failure.http_status, failure.addr, failure.attempts) == ("unreachable", 503, NOBODY, 2)
    assert failure.reason.startswith("127.0.0.1:1: gave up after 2 attempts: ")
    assert "refused" in failure.reason


def test_requests_of_one_event_share_one_failure():
    with disagg.Resolver(DECODE, QUICK) as resolver:
        for room in range(3):
            resolver.add(Request(room), NOBODY, room)
        failures = list(poll_until(resolver, 3).values())
    assert failures[0] is failures[1] is failures[2]


def test_close_fails_what_is_pending_and_is_idempotent():
    resolver = disagg.Resolver(DECODE)
    request = Request("a")
    resolver.add(request, NOBODY, 1)
    step = resolver.close()
    assert [(r, f.kind) for r, f in step.failed] == [(request, "closed")]
    assert resolver.close().failed == ()
    late = Request("late")
    assert resolver.add(late, NOBODY, 2) is None
    assert [(r, f.kind) for r, f in resolver.poll().failed] == [(late, "closed")]
    assert not resolver.health()
    assert "closed" in resolver.health().reason


def test_closing_ends_the_thread():
    before = threading.active_count()
    with disagg.Resolver(DECODE) as resolver:
        assert resolver.health()
        assert threading.active_count() == before + 1
    assert threading.active_count() == before


def test_a_resolver_that_is_dropped_ends_its_thread_and_says_so():
    def drop_one():
        disagg.Resolver(DECODE).add(Request("held by the resolver"), NOBODY, 1)
        gc.collect()

    gc.collect()
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with pytest.warns(ResourceWarning, match="unclosed"):
        drop_one()
    until = time.monotonic() + 10
    while threading.active_count() > threads and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() == threads
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_pending_at_exit_does_not_hang_the_interpreter():
    started = time.monotonic()
    run_python(
        """
        import disagg
        resolver = disagg.Resolver(disagg.DecodeRank(attn_tp_size=1, engine_rank=0))
        resolver.add(object(), "127.0.0.1:1", 1)
        """
    )
    assert time.monotonic() - started < 20


def test_resolver_is_dead_in_a_forked_child():
    out = run_python(
        """
        import os
        import disagg
        with disagg.Resolver(disagg.DecodeRank(attn_tp_size=1, engine_rank=0)) as resolver:
            pid = os.fork()
            if pid == 0:
                seen = []
                for call in (lambda: resolver.add(object(), "127.0.0.1:1", 1), resolver.poll):
                    try:
                        call()
                    except RuntimeError as error:
                        seen.append(str(error))
                    else:
                        seen.append("no error")
                print(seen[0] == seen[1], "fork" in seen[0], bool(resolver.health()), flush=True)
                os._exit(0)
            os.waitpid(pid, 0)
            print(bool(resolver.health()))
        """
    )
    assert out.split() == ["True", "True", "False", "True"]


def test_values_pickle_and_owners_do_not():
    with disagg.Resolver(DECODE, QUICK) as resolver:
        for room in range(2):
            resolver.add(Request(room), NOBODY, room)
        failure = next(iter(poll_until(resolver, 2).values()))
        with pytest.raises(TypeError, match="cannot pickle"):
            pickle.dumps(resolver)
    with disagg.BootstrapServer() as server, pytest.raises(TypeError, match="cannot pickle"):
        pickle.dumps(server)
    for value in (DECODE, QUICK, disagg.RetryPolicy.per_cycle(7), failure, disagg.PrefillInfo(attn_tp_size=2)):
        assert pickle.loads(pickle.dumps(value)) == value


def test_import_is_light():
    out = run_python(
        """
        import sys
        import disagg
        print([m for m in ("asyncio", "httptools", "typer", "prometheus_client") if m in sys.modules])
        """
    )
    assert out.strip() == "[]"


def test_routed_requests_and_their_objects_are_let_go():
    with disagg.Resolver(DECODE, QUICK) as resolver:
        requests = [Weak() for _ in range(50)]
        seen = [weakref.ref(request) for request in requests]
        for room, request in enumerate(requests):
            resolver.add(request, NOBODY, room)
        del requests, request
        gc.collect()
        assert all(ref() is not None for ref in seen), "a pending request is held"
        poll_until(resolver, 50)
        for _ in range(2):  # `state_of` remembers an end until the second poll after it
            resolver.poll()
        gc.collect()
        assert not any(ref() is not None for ref in seen)
        assert not any(resolver.stats()["pending"].values())


class Weak:
    """A request that can be watched."""


def test_a_resolver_in_a_cycle_with_its_requests_is_collected():
    resolver = disagg._core.Resolver(DECODE, virtual_time=True)
    request = Weak()
    request.resolver = resolver
    resolver.add(request, NOBODY, 1)
    seen = weakref.ref(request)
    del request, resolver
    gc.collect()
    assert seen() is None


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"dp_rank_timeout_s": 0.0}, ValueError),
        ({"request_timeout_s": float("nan")}, ValueError),
        ({"max_in_flight": 0}, ValueError),
        ({"total_timeout_s": -1}, ValueError),
        ({"max_addresses": 0}, ValueError),
        ({"default_port": 0}, ValueError),
        ({"no_such_option": 1}, TypeError),
    ],
)
def test_bad_option_is_refused_by_name(options, error):
    with pytest.raises(error, match=next(iter(options))):
        disagg.Resolver(DECODE, **options)


def test_options_are_documented_with_their_defaults():
    doc = disagg.ResolverOptions.__doc__
    for name in disagg.ResolverOptions.__annotations__:
        assert f"{name}:" in doc or f"{name}," in doc, name


def test_policies_default_to_one_place():
    assert disagg.RetryPolicy() == disagg.RetryPolicy.spaced()
    from disagg.reference.model import Policy

    mine, reference = disagg.RetryPolicy(), Policy()
    for name in ("max_attempts", "interval_s", "multiplier", "max_interval_s", "jitter", "cooldown_s", "min_wait_s"):
        assert getattr(mine, name) == getattr(reference, name)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_closing_in_a_forked_child_leaves_the_parent_alone():
    out = run_python(
        """
        import os
        import disagg
        with disagg.Resolver(disagg.DecodeRank(attn_tp_size=1, engine_rank=0)) as resolver:
            pid = os.fork()
            if pid == 0:
                raise SystemExit(0)  # leaves the context manager
            os.waitpid(pid, 0)
            print(bool(resolver.health()))
        """
    )
    assert out.strip() == "True"
