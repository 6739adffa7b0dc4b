"""Rank mapping from Python: ours, SGLang 0.5.23's own `_resolve_rank_mapping`, and the reference, on the same pairs."""

from __future__ import annotations

from operator import attrgetter
from types import SimpleNamespace

import pytest

import disagg
from disagg.reference import mapping as reference
from pairs import FIELDS

CALLS = 200

# A first run fetches SGLang's wheel, 40 MB.
pytestmark = pytest.mark.timeout(900)

read_fields = attrgetter(*FIELDS)

# name: (decode fields, prefill fields, the answer's FIELDS); the first and last are the rows of the baseline
PAIRS = {
    "tp 8 onto tp 8": (
        {"attn_tp_size": 8, "engine_rank": 5},
        {"attn_tp_size": 8},
        (5, (5,), (0,), (0,), 1, 1),
    ),
    "tp 4 onto tp 16, mla": (
        {"attn_tp_size": 4, "engine_rank": 1, "kv": "mla"},
        {"attn_tp_size": 16},
        (4, (4, 5, 6, 7), (0,), (0,), 1, 1),
    ),
    "tp 8 onto tp 2": (
        {"attn_tp_size": 8, "engine_rank": 5},
        {"attn_tp_size": 2},
        (1, (1,), (0,), (0,), 4, 1),
    ),
    "tp 1 onto tp 32 cp 8 pp 8": (
        {"attn_tp_size": 1, "engine_rank": 0, "all_cp_ranks": True},
        {"attn_tp_size": 32, "attn_cp_size": 8, "pp_size": 8},
        (0, tuple(range(32)), tuple(range(8)), tuple(range(8)), 1, 32 * 8 * 8),
    ),
}


def ours(decode, prefill, _request):
    ours_decode, ours_prefill = disagg.DecodeRank(**decode), disagg.PrefillInfo(**prefill)
    return lambda: disagg.map_ranks(ours_decode, ours_prefill)


def by_reference(decode, prefill, _request):
    its_decode, its_prefill = reference.DecodeRank(**decode), reference.PrefillInfo(**prefill)
    return lambda: reference.map_ranks(its_decode, its_prefill)


def by_sglang(decode, prefill, request):
    """Upstream's method on a manager that holds what it reads, and a PrefillServerInfo, which it fills in each time."""
    sglang = request.getfixturevalue("sglang")
    kind = decode.get("kv", "mha")
    manager = SimpleNamespace(
        attn_tp_size=decode["attn_tp_size"],
        attn_cp_size=1,
        attn_cp_rank=0,
        pp_size=1,
        pp_rank=0,
        kv_args=SimpleNamespace(engine_rank=decode["engine_rank"]),
        is_mla_backend=kind == "mla",
        is_hybrid_mla_backend=kind == "hybrid_mla",
        enable_all_cp_ranks_for_transfer=decode.get("all_cp_ranks", False),
    )
    info = sglang.conn.PrefillServerInfo(
        attn_tp_size=prefill["attn_tp_size"],
        attn_cp_size=prefill.get("attn_cp_size", 1),
        pp_size=prefill.get("pp_size", 1),
        dp_size=1,
        page_size=64,
        kv_cache_dtype="auto",
        follow_bootstrap_room=True,
    )
    resolve = sglang.conn.CommonKVManager._resolve_rank_mapping

    def call():
        resolve(manager, info)
        return info

    return call


def reading(make):
    """`make`'s call, then a read of each field: SGLang builds its lists in the call, we build our tuples when read."""

    def make_both(*pair_and_request):
        map_pair = make(*pair_and_request)

        def call():
            mapping = map_pair()
            read_fields(mapping)
            return mapping

        return call

    return make_both


SIDES = {
    "disagg": ours,
    "sglang": by_sglang,
    "reference": by_reference,
    "disagg, fields read": reading(ours),
    "sglang, fields read": reading(by_sglang),
}


def answer(mapping):
    """The mapping's FIELDS; SGLang's lists are our tuples."""
    return tuple(tuple(field) if isinstance(field, list) else field for field in read_fields(mapping))


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("pair", PAIRS)
def bench_map_ranks(benchmark, pair, side, request):
    benchmark.group = f"map_ranks, {CALLS} calls, {pair}"
    decode, prefill, expected = PAIRS[pair]
    call = SIDES[side](decode, prefill, request)

    def calls():
        for _ in range(CALLS):
            call()

    benchmark(calls)
    assert answer(call()) == expected


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.benchmark(group="all ranks of tp 1024 onto tp 512, mla")
def bench_map_a_whole_engine(benchmark, side, scale, request):
    size = int(1024 * scale) // 2 * 2
    pairs = [
        ({"attn_tp_size": size, "engine_rank": rank, "kv": "mla"}, {"attn_tp_size": size // 2}) for rank in range(size)
    ]
    calls = [SIDES[side](decode, prefill, request) for decode, prefill in pairs]

    def call_all():
        for call in calls:
            call()

    benchmark(call_all)
    expected = [(rank // 2, (rank // 2,), (0,), (0,), 2, 1) for rank in range(size)]
    assert [answer(call()) for call in calls] == expected
