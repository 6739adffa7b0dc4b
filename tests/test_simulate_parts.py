"""The parts of the simulator that need no process: traces, arrivals, plans, shared memory, figures."""

import gzip
import io
import json
import random
from array import array
from dataclasses import replace

import pytest

from disagg.simulate.arrivals import arrival_times, bursty_times
from disagg.simulate.options import Options, Scenario
from disagg.simulate.plan import make_plan
from disagg.simulate.progress import Counts, Progress
from disagg.simulate.scenario import Behaviour, DpChoice, build_peers
from disagg.simulate.shared import FAILED, ROUTED, Arrival, ArrivalLog, End, EndLog, SharedMemory
from disagg.simulate.stats import quantile, summary_ms
from disagg.simulate.trace import TraceError, read_trace
from disagg.usage import UsageError

GOOD = '{"timestamp": 7, "input_length": 1, "output_length": 2}'


def line(**changes):
    return json.dumps({"timestamp": 7, "input_length": 1, "output_length": 2} | changes)


# Traces.


@pytest.mark.parametrize(
    ("second", "what"),
    [
        ("nonsense", "not JSON: Expecting value at column 1"),
        ("[1, 2]", "must be an object, is [1, 2]"),
        ('{"timestamp": 8}', "has no input_length"),
        ('{"input_length": 8, "output_length": 8}', "has no timestamp"),
        (line(timestamp="8"), 'timestamp must be a number of ms from 0, is "8"'),
        (line(timestamp=True), "timestamp must be a number of ms from 0, is true"),
        (line(timestamp=-1), "timestamp must be a number of ms from 0, is -1"),
        (line(timestamp=float("inf")), "timestamp must be a number of ms from 0, is Infinity"),
        (line(timestamp=6), "timestamp 6 goes back: a line above has 7"),
        (line(input_length=1.5), "input_length must be an integer from 0, is 1.5"),
        (line(output_length=-3), "output_length must be an integer from 0, is -3"),
    ],
)
def test_a_bad_line_is_named_by_file_and_number(tmp_path, second, what):
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{GOOD}\n{second}\n{GOOD}\n")
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert str(caught.value) == f"{path}:2: {what}"
    assert caught.value.line == 2


def test_a_trace_is_read_plain_or_gzipped_whatever_its_name(tmp_path):
    text = f"{GOOD}\n\n{line(timestamp=9.5, hash_ids=[1, 2])}\n"
    (tmp_path / "plain.gz").write_text(text)
    (tmp_path / "zipped.jsonl").write_bytes(gzip.compress(text.encode()))
    assert read_trace(tmp_path / "plain.gz") == [7.0, 9.5]
    assert read_trace(tmp_path / "zipped.jsonl") == [7.0, 9.5]


def test_gzip_that_ends_early_is_refused(tmp_path):
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress(f"{GOOD}\n".encode() * 1000)[:-12])
    with pytest.raises(TraceError, match="gzip data ends early"):
        read_trace(path)


def test_a_trace_that_cannot_be_read_or_is_empty_is_refused(tmp_path):
    with pytest.raises(TraceError, match=r"none\.jsonl: cannot be read: No such file"):
        read_trace(tmp_path / "none.jsonl")
    with pytest.raises(TraceError, match="cannot be read: Is a directory"):
        read_trace(tmp_path)
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(TraceError, match=r"empty:1: holds no request"):
        read_trace(tmp_path / "empty")
    (tmp_path / "binary").write_bytes(b"\xff\xfe{}\n")
    with pytest.raises(TraceError, match=r"binary:1: not JSON in UTF-8"):
        read_trace(tmp_path / "binary")


def test_the_recorded_trace_has_its_12031_requests(shared):
    times = read_trace(shared / "data" / "mooncake_conversation.jsonl.gz")
    assert (len(times), times[0], times[-1]) == (12_031, 0, 3_536_999)


# Arrivals and plans.


def test_a_trace_starts_at_zero_and_is_divided_by_the_speed_up(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(line(timestamp=stamp) + "\n" for stamp in (1000, 3000, 5000)))
    assert arrival_times(Options(trace=path, speedup=2)) == [0, 1, 2]
    assert arrival_times(Options(trace=path, speedup=2, duration=1.5)) == [0, 1]


def test_generated_arrivals_have_the_rate_and_bursts():
    times = bursty_times(random.Random(3), 200, 100)
    assert times == sorted(times)
    assert 0 <= times[0] <= times[-1] < 100
    assert len(times) == pytest.approx(20_000, rel=0.1)
    fullest = max(sum(start <= time < start + 0.01 for time in times[index : index + 60])
                  for index, start in enumerate(times))  # fmt: skip
    assert fullest >= 12  # a Poisson stream of 2 in 10 ms never is


def test_the_same_options_give_the_same_plan_and_another_seed_another():
    options = Options(rate=100, duration=2)
    assert make_plan(options) == make_plan(options)
    assert make_plan(options).requests != make_plan(replace(options, seed=2)).requests


def test_mixed_has_one_of_each_trouble():
    kinds = [peer.behaviour for peer in build_peers(Options())]
    assert kinds.count(Behaviour.HEALTHY) == 4
    assert {*kinds} == {*Behaviour}
    with pytest.raises(UsageError, match="one of each kind"):
        build_peers(Options(peers=11))


def test_dark_and_healthy_have_the_peers_that_they_say():
    dark = {peer.behaviour for peer in build_peers(Options(scenario=Scenario.DARK))}
    assert dark == {Behaviour.SILENT, Behaviour.REFUSING, Behaviour.RUBBISH}
    healthy = build_peers(Options(scenario=Scenario.HEALTHY, peers=20))
    assert {peer.behaviour for peer in healthy} == {Behaviour.HEALTHY}
    assert {peer.choice for peer in healthy} == {
        DpChoice.ONLY,
        DpChoice.FOLLOW,
        DpChoice.PROMPT,
        DpChoice.PRESET,
    }


def test_a_slow_peer_is_whole_only_when_nobody_waits_for_it_any_more():
    plan = make_plan(Options())
    slow = next(peer.index for peer in plan.peers if peer.behaviour is Behaviour.SLOW_START)
    first = next(request.due_s for request in plan.requests if request.peer == slow)
    assert plan.last_rank_s[slow] - first == pytest.approx(3 * 0.5 + 1.0 + 0.5 + 0.38 + 0.5)


def test_rooms_are_unique_and_ranks_are_within_the_dp_size():
    plan = make_plan(Options(rate=500, duration=5))
    assert len({request.room for request in plan.requests}) == len(plan.requests)
    for request in plan.requests:
        peer = plan.peers[request.peer]
        assert 0 <= request.dp_rank < peer.layouts[0].dp
        assert (request.preset is not None) == (peer.choice is DpChoice.PRESET)


# Shared memory.


def test_arrivals_come_out_as_they_went_in_and_only_once():
    memory = SharedMemory(ArrivalLog.bytes_for(2))
    writer, reader = ArrivalLog(memory), ArrivalLog(memory)
    assert reader.read() is None
    arrivals = [Arrival(0, 3, 2**63 - 1, None), Arrival(1, 0, 0, 0)]
    for arrival in arrivals:
        writer.write(arrival)
    assert [reader.read(), reader.read(), reader.read()] == [*arrivals, None]
    memory.close()


def test_half_an_arrival_is_not_there_yet():
    memory = SharedMemory(ArrivalLog.bytes_for(1))
    ArrivalLog(memory).write(Arrival(0, 3, 12345, 1))
    whole = memory.map[:]
    for size in range(1, 28):
        memory.map[:] = whole[:size] + bytes(len(whole) - size)
        if memory.map[:] != whole:
            assert ArrivalLog(memory).read() is None
    memory.close()


def test_ends_past_the_capacity_are_counted():
    memory = SharedMemory(EndLog.bytes_for(0))
    log = EndLog(memory)
    for number in range(1030):
        log.write(End(number, ROUTED, 0, 0, 1, 2))
    assert log.count == 1030
    assert len(log.read(log.count)) == 1024
    log_of_unknown = EndLog(memory)
    log_of_unknown.write(End(None, FAILED, 1, 2, 3, 4))
    assert log_of_unknown.read(1) == [End(None, FAILED, 1, 2, 3, 4)]
    memory.close()


# Figures.


def test_quantiles_are_nearest_ranks():
    ordered = list(range(1, 1001))
    assert [quantile(ordered, share) for share in (0, 0.5, 0.99, 0.999, 1)] == [1, 500, 990, 999, 1000]
    assert quantile([], 0.5) == 0
    assert summary_ms(array("q", [2_000_000, 1_000_000])) == {
        "count": 2, "p50": 1.0, "p99": 2.0, "p99_9": 2.0, "max": 2.0,
    }  # fmt: skip


def test_progress_is_plain_lines_where_there_is_no_terminal():
    stream = io.StringIO()
    progress = Progress(stream)
    counts = Counts(1.5, 100, 40, 20, 5, 3.25)
    progress.show(counts)
    progress.show(counts)  # too soon for a second line
    assert stream.getvalue() == ("  1.5 s  arrived 40/100  routed 20  failed 5  pending 15  worst cycle 3.2 ms\n")
