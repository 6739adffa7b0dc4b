"""`Resolver(metrics=True)`: what prometheus-client shows, when it is imported, and that nothing is hurt by it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
import time

import pytest
from prometheus_client import CollectorRegistry, Counter, generate_latest

import disagg
from conftest import ROOT
from disagg import _core, metrics
from hostile import black_hole, refusing_address
from machines import Request
from polling import poll_until, until
from registry_client import register

DECODE = disagg.DecodeRank(attn_tp_size=1, engine_rank=0, page_size=64)
QUICK = disagg.RetryPolicy(max_attempts=2, interval_s=0.05, min_wait_s=0.0)
ADDR = "10.0.0.1:8998"


def shown(registry):
    """Every sample of ours that is not 0, but for the time at which it was made."""
    lines = generate_latest(registry).decode().splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if line.startswith("disagg_") and "_created" not in line]
    return {name: float(value) for name, value in pairs if float(value)}


def shown_counts(registry):
    return {name: value for name, value in shown(registry).items() if "_wait_" not in name}


class Pushed:
    """A machine in virtual time and what is pushed of it."""

    def __init__(self, registry):
        self.resolver = _core.Resolver(DECODE, QUICK, virtual_time=True)
        self.driver = self.resolver.driver()
        self.push = metrics.MetricsPush(self.driver, registry)
        self.now = 0.0

    def advance(self, seconds):
        self.now += seconds
        self.resolver.set_time_ns(round(self.now * 1e9))
        self.driver.on_timer()

    def fail_attempt(self):
        ((ticket, *_),) = self.driver.take_commands(10)
        self.driver.on_error(ticket, "refused", "")


@pytest.fixture
def registry():
    return CollectorRegistry()


def test_pushes_add_what_is_new_and_gauges_follow(registry):
    machine = Pushed(registry)
    machine.push.push()
    assert shown(registry) == {}, "nothing is made before the first request"
    assert generate_latest(registry) == b""
    machine.resolver.add("a", ADDR, 1)
    machine.resolver.add("b", ADDR, 2)
    machine.advance(0.25)
    for _ in range(2):  # the second finds nothing new
        machine.push.push()
        assert shown_counts(registry) == {
            "disagg_requests_added_total": 2,
            'disagg_requests_pending{stage="need_info"}': 2,
            'disagg_requests_oldest_seconds{stage="need_info"}': 0.25,
            'disagg_peers{state="fetching"}': 1,
            "disagg_http_in_flight": 1,
            "disagg_rooms_held": 2,
        }
    machine.fail_attempt()
    machine.advance(0.25)
    machine.fail_attempt()
    machine.resolver.poll()
    machine.push.push()
    assert shown_counts(registry) == {
        "disagg_requests_added_total": 2,
        'disagg_requests_ended_total{end="failed"}': 2,
        'disagg_requests_failed_total{kind="unreachable"}': 2,
        'disagg_topology_attempts_total{kind="unreachable",outcome="transient"}': 2,
        'disagg_http_requests_total{purpose="topology"}': 2,
        'disagg_peers{state="marked"}': 1,
    }
    machine.push.close()
    assert not [name for name in shown_counts(registry) if "_total" not in name], "gauges are zero"


def test_waits_come_as_one_histogram_by_stage(registry):
    machine = Pushed(registry)
    machine.resolver.add("a", ADDR, 1)
    machine.advance(0.04)
    machine.resolver.discard("a")
    machine.push.push()
    samples = shown(registry)
    for stage in ("info", "total"):
        assert samples[f'disagg_wait_seconds_sum{{stage="{stage}"}}'] == pytest.approx(0.04)
        assert samples[f'disagg_wait_seconds_count{{stage="{stage}"}}'] == 1
        assert f'disagg_wait_seconds_bucket{{le="0.025",stage="{stage}"}}' not in samples
        assert samples[f'disagg_wait_seconds_bucket{{le="0.05",stage="{stage}"}}'] == 1
        assert samples[f'disagg_wait_seconds_bucket{{le="+Inf",stage="{stage}"}}'] == 1
    assert not [name for name in samples if "dp_rank" in name or "endpoints" in name]


def test_two_resolvers_share_the_metrics_and_add_up(registry):
    one, other = Pushed(registry), Pushed(registry)
    one.resolver.add("a", ADDR, 1)
    one.advance(3.0)
    one.push.push()
    other.resolver.add("b", ADDR, 1)
    other.advance(2.0)
    other.push.push()
    oldest = 'disagg_requests_oldest_seconds{stage="need_info"}'
    samples = shown(registry)
    assert (samples["disagg_requests_added_total"], samples["disagg_http_in_flight"], samples[oldest]) == (2, 2, 1.0)
    other.advance(0.5)
    other.push.push()
    one.push.close()
    samples = shown(registry)
    assert (samples["disagg_requests_added_total"], samples["disagg_http_in_flight"]) == (2, 1)
    other.push.close()
    assert not [name for name in shown_counts(registry) if "_total" not in name]


def test_every_series_is_there_from_the_start_with_bounded_labels(registry):
    machine = Pushed(registry)
    machine.resolver.add("a", ADDR, 1)
    machine.push.push()
    before = {line.rsplit(" ", 1)[0] for line in generate_latest(registry).decode().splitlines()}
    for number in range(200):
        machine.resolver.add(number + 1000, f"10.0.1.{number}:8998", number + 10)
        machine.resolver.peer_lost(f"10.0.1.{number}:8998")
    machine.push.push()
    after = {line.rsplit(" ", 1)[0] for line in generate_latest(registry).decode().splitlines()}
    assert after == before
    assert not [line for line in after if "10.0." in line]
    for kind in disagg.FAILURE_KINDS:
        assert f'disagg_requests_failed_total{{kind="{kind}"}}' in after


def test_a_push_is_short(registry):
    machine = Pushed(registry)
    times = []
    for number in range(100):
        machine.resolver.add(number, f"10.0.1.{number}:8998", number)
        machine.resolver.peer_lost(f"10.0.1.{number}:8998")
        began = time.thread_time()
        machine.push.push()
        times.append(time.thread_time() - began)
    assert sorted(times)[50] < 0.001


def test_a_live_resolver_pushes_once_a_second_and_at_its_end(registry):
    with disagg.BootstrapServer() as server, refusing_address() as nobody, black_hole() as silent:
        register(server.address)
        with disagg.Resolver(DECODE, QUICK, metrics=True, metrics_registry=registry) as resolver:
            requests = [Request(room) for room in range(3)]
            resolver.add(requests[0], server.address, 0)
            resolver.add(requests[1], nobody, 1)
            poll_until(resolver, 2)
            until(lambda: shown(registry).get("disagg_requests_added_total") == 2)
            assert shown(registry)['disagg_peers{state="ready"}'] == 1
            resolver.add(Request("cached"), server.address, 3)
            resolver.add(requests[2], silent, 4)
        samples = shown_counts(registry)
    assert samples["disagg_requests_added_total"] == 4
    ends = {"routed_at_once": 1, "resolved": 1, "failed": 2}
    for end, count in ends.items():
        assert samples[f'disagg_requests_ended_total{{end="{end}"}}'] == count
    assert samples['disagg_requests_failed_total{kind="closed"}'] == 1
    assert not [name for name in samples if "_total" not in name], "gauges are zero"


def test_a_resolver_that_is_dropped_takes_itself_off_the_gauges(registry):
    resolver = disagg.Resolver(DECODE, metrics=True, metrics_registry=registry)
    with black_hole() as silent:
        resolver.add(Request("a"), silent, 1)
        until(lambda: shown(registry).get("disagg_rooms_held") == 1)
        with pytest.warns(ResourceWarning, match="unclosed"):
            del resolver
        until(lambda: "disagg_rooms_held" not in shown(registry))


def test_names_that_are_taken_end_the_metrics_and_nothing_else(registry, caplog):
    Counter("disagg_evictions", "somebody else's", registry=registry)
    with refusing_address() as nobody, disagg.Resolver(DECODE, metrics=True, metrics_registry=registry) as resolver:
        resolver.add(Request("a"), nobody, 1)
        until(lambda: any(record.event == "metrics_failed" for record in caplog.records))
        until(lambda: resolver.driver().counters()["http"]["topology"] > 1)
        assert resolver.health()
    assert sum(record.event == "metrics_failed" for record in caplog.records) == 1
    assert [metric.name for metric in registry.collect()] == ["disagg_evictions"], "no metric that stands still"


class Odd(BaseException):
    """What no `except Exception` catches, and what cannot be shown."""

    def __repr__(self):
        raise self


class Misleading(Exception):
    """What would forge a line of a log."""

    def __repr__(self):
        return "a\nforged"


@pytest.mark.parametrize(
    ("error", "text"), [(Odd, "no more metrics: Odd"), (Misleading, "no more metrics: a\\x0aforged")]
)
def test_registry_that_raises_whatever_it_likes_ends_the_metrics_and_nothing_else(error, text, caplog):
    class Broken(CollectorRegistry):
        def register(self, collector):
            raise error

    with refusing_address() as nobody, disagg.Resolver(DECODE, metrics=True, metrics_registry=Broken()) as resolver:
        resolver.add(Request("a"), nobody, 1)
        until(lambda: any(record.event == "metrics_failed" for record in caplog.records))
        assert resolver.health()
    assert [record.getMessage() for record in caplog.records if record.event == "metrics_failed"] == [text]


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"metrics": 1}, ValueError, "metrics 1 must be True or False"),
        ({"metrics_registry": CollectorRegistry()}, disagg.ConfigError, "metrics_registry: is used only with"),
        ({"metrics": True, "metrics_registry": "default"}, TypeError, "metrics_registry must be .*, not str"),
        ({"metrics_registry": CollectorRegistry}, TypeError, "metrics_registry must be .*, not type"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, error, text):
    with pytest.raises(error, match=text):
        disagg.Resolver(DECODE, **options)


def run_python(code, **environment):
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env=os.environ | environment,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_without_prometheus_client_the_error_says_what_to_install():
    out = run_python(
        """
        import importlib.util
        import disagg
        find = importlib.util.find_spec
        importlib.util.find_spec = lambda name: None if name == "prometheus_client" else find(name)
        decode = disagg.DecodeRank(attn_tp_size=1, engine_rank=0)
        disagg.Resolver(decode).close()
        try:
            disagg.Resolver(decode, metrics=True)
        except disagg.ConfigError as error:
            print(error)
        """
    )
    assert out == "metrics: needs prometheus-client: pip install 'disagg[metrics]'\n"


MULTIPROCESS = """
    import os
    import sys
    import time
    import disagg
    print("prometheus_client" in sys.modules)
    decode = disagg.DecodeRank(attn_tp_size=1, engine_rank=0)
    with disagg.Resolver(decode, metrics=True) as resolver:
        time.sleep(1.2)  # over a push
        print("prometheus_client" in sys.modules)
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = sys.argv[1]
        resolver.poll()
        resolver.add("waits", sys.argv[2], 1)
        resolver.add("warm-up", "2.2.2.2", 2)
        sys.stdout.flush()
        sys.stdin.read()
"""


def test_multiprocess_mode_that_is_set_late_works_and_values_aggregate(tmp_path):
    from prometheus_client import multiprocess

    def start():
        command = [sys.executable, "-W", "error", "-c", textwrap.dedent(MULTIPROCESS), str(tmp_path), silent]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    registry = CollectorRegistry()
    multiprocess.MultiProcessCollector(registry, path=str(tmp_path))
    with black_hole() as silent, start() as one, start() as other:
        for process in (one, other):
            assert [process.stdout.readline().strip() for _ in range(2)] == ["False", "False"]
        until(lambda: shown(registry).get('disagg_requests_pending{stage="need_info"}') == 2)
        samples = shown(registry)
        assert samples["disagg_requests_added_total"] == 4
        assert samples['disagg_requests_ended_total{end="fake"}'] == 2
        assert 0 < samples['disagg_requests_oldest_seconds{stage="need_info"}'] < 10
        names = {name.rsplit("_", 1)[0] for name in os.listdir(tmp_path)}
        assert names == {"counter", "gauge_livesum", "gauge_livemax", "histogram"}
        assert len(os.listdir(tmp_path)) == 8, "a file of each kind for each process"
    samples = shown(registry)
    assert samples['disagg_requests_failed_total{kind="closed"}'] == 2
    assert samples['disagg_wait_seconds_count{stage="total"}'] == 2
    assert "disagg_http_in_flight" not in samples, "closed"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_does_not_show_what_its_parent_holds():
    out = run_python(
        """
        import os
        import disagg
        from disagg import _core, metrics
        from prometheus_client import REGISTRY
        decode = disagg.DecodeRank(attn_tp_size=1, engine_rank=0)

        def push_one():
            resolver = _core.Resolver(decode)
            resolver.add("a", "10.0.0.1:1", 1)
            metrics.MetricsPush(resolver.driver(), None).push()
            return REGISTRY.get_sample_value("disagg_http_in_flight")

        push_one()
        print(push_one(), flush=True)
        pid = os.fork()
        if pid == 0:
            print(push_one(), flush=True)
            os._exit(0)
        os.waitpid(pid, 0)
        """
    )
    assert out.split() == ["2.0", "1.0"]


def test_readme_lists_every_metric_with_its_type_and_labels(registry):
    machine = Pushed(registry)
    machine.resolver.add("a", ADDR, 1)
    machine.push.push()
    families = {}
    for family in registry.collect():
        labels = {name for sample in family.samples for name in sample.labels} - {"le"}
        name = family.name + ("_total" if family.type == "counter" else "")
        families[name] = (family.type, labels)
    readme = (ROOT / "README.md").read_text()
    rows = re.findall(r"^\| `(disagg_\w+)` \| (\w+) \| (.*?) \|", readme, re.MULTILINE)
    assert {name: (kind, set(re.findall(r"`(\w+)`", labels))) for name, kind, labels in rows} == families
