"""The inverse mapping: what a prefill rank serves, against `map_ranks` and against the reference."""

from __future__ import annotations

import pickle
from collections import defaultdict

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import disagg
from disagg.reference import serving as reference
from pairs import fitting_pairs

FIELDS = ("role", "decode_tp_ranks", "decode_pp_rank", "required_dst_info_num")


def fields(served):
    return tuple(getattr(served, name) for name in FIELDS)


def fits(decode, prefill):
    return not any(reason.severity == "fatal" for reason in disagg.compatibility(decode, prefill))


def decode_group(decode):
    """Every rank of one dp group of the decode engine."""
    for pp_rank in range(decode.pp_size):
        for tp_rank in range(decode.attn_tp_size):
            yield disagg.DecodeRank(
                attn_tp_size=decode.attn_tp_size,
                engine_rank=tp_rank,
                pp_size=decode.pp_size,
                pp_rank=pp_rank,
                kv=decode.kv,
                all_cp_ranks=decode.all_cp_ranks,
            )


def prefill_places(prefill):
    return [
        {"tp_rank": tp, "cp_rank": cp, "pp_rank": pp}
        for cp in range(prefill.attn_cp_size)
        for tp in range(prefill.attn_tp_size)
        for pp in range(prefill.pp_size)
    ]


@given(fitting_pairs(largest=24))
def test_the_inverse_is_exact_and_the_counts_agree(pair):
    """Every edge is known on both sides with one role and one count; whom nobody contacts is idle."""
    decode, prefill = pair
    assume(fits(decode, prefill))
    contacted_by, roles, awaited, answers = defaultdict(list), defaultdict(set), defaultdict(set), 0
    for rank in decode_group(decode):
        mapping = disagg.map_ranks(rank, prefill)
        answers += mapping.required_prefill_response_num
        for contact in mapping.contacts():
            place = (contact.tp, contact.cp, contact.pp)
            contacted_by[place].append((rank.attn_tp_rank, rank.pp_rank))
            roles[place].add("dummy" if contact.dummy else "real")
            awaited[place].add(mapping.required_dst_info_num)
    sent = 0
    for place in prefill_places(prefill):
        served = disagg.serve_ranks(decode, prefill, **place)
        key = (place["tp_rank"], place["cp_rank"], place["pp_rank"])
        readers = [(tp, served.decode_pp_rank) for tp in served.decode_tp_ranks]
        assert readers == contacted_by.pop(key, [])
        assert {served.role} == roles.get(key, {"idle"})
        assert {served.required_dst_info_num} == awaited.get(key, {0}) == {len(readers)}
        sent += len(readers) if served.role == "real" else 0
    assert not contacted_by, "ranks that do not exist"
    assert sent == answers


@given(fitting_pairs(), st.data())
def test_core_and_reference_agree(pair, data):
    decode, prefill = pair
    place = {
        "tp_rank": data.draw(st.integers(0, prefill.attn_tp_size - 1)),
        "cp_rank": data.draw(st.integers(0, prefill.attn_cp_size - 1)),
        "pp_rank": data.draw(st.integers(0, prefill.pp_size - 1)),
    }
    if not fits(decode, prefill):
        for serve_ranks in (disagg.serve_ranks, reference.serve_ranks):
            with pytest.raises(disagg.IncompatiblePeer):
                serve_ranks(decode, prefill, **place)
        return
    ours = disagg.serve_ranks(decode, prefill, **place)
    assert fields(ours) == fields(reference.serve_ranks(decode, prefill, **place))
    assert pickle.loads(pickle.dumps(ours)) == ours


def served(decode, prefill, *, tp_rank, cp_rank=0, pp_rank=0):
    ours = disagg.serve_ranks(
        disagg.DecodeRank(engine_rank=0, **decode),
        disagg.PrefillInfo(**prefill),
        tp_rank=tp_rank,
        cp_rank=cp_rank,
        pp_rank=pp_rank,
    )
    return fields(ours)


def test_a_dummy_waits_for_the_decode_rank_of_its_block_too():
    """A1-01: unless it hears from the decode rank it waits until its timeout."""
    decode, prefill = {"attn_tp_size": 4, "kv": "mla"}, {"attn_tp_size": 16}
    assert served(decode, prefill, tp_rank=4) == ("real", (1,), 0, 1)
    assert [served(decode, prefill, tp_rank=tp) for tp in (5, 6, 7)] == [("dummy", (1,), 0, 1)] * 3


def test_without_mla_a_prefill_rank_waits_for_every_decode_rank_that_reads_it():
    """A1-02."""
    assert served({"attn_tp_size": 4}, {"attn_tp_size": 2}, tp_rank=1) == ("real", (2, 3), 0, 2)
    assert served({"attn_tp_size": 2}, {"attn_tp_size": 4}, tp_rank=3) == ("real", (1,), 0, 1)


def test_context_parallel_ranks_that_nobody_reads_are_idle():
    """A1-10: they take part without waiting for anybody."""
    decode = {"attn_tp_size": 1}
    assert served(decode, {"attn_tp_size": 1, "attn_cp_size": 8}, tp_rank=0) == ("real", (0,), 0, 1)
    assert served(decode, {"attn_tp_size": 1, "attn_cp_size": 8}, tp_rank=0, cp_rank=5) == ("idle", (), None, 0)
    all_cp = decode | {"all_cp_ranks": True}
    assert served(all_cp, {"attn_tp_size": 1, "attn_cp_size": 8}, tp_rank=0, cp_rank=5)[0] == "real"


def test_a_stage_serves_its_own_decode_stage_or_the_one_that_holds_all():
    """A1-08."""
    prefill = {"attn_tp_size": 2, "pp_size": 2}
    assert served({"attn_tp_size": 2, "pp_size": 2}, prefill, tp_rank=1, pp_rank=1) == ("real", (1,), 1, 1)
    assert served({"attn_tp_size": 2}, prefill, tp_rank=1, pp_rank=1) == ("real", (1,), 0, 1)


def test_with_sharding_every_prefill_rank_serves_every_decode_rank():
    prefill = {"attn_tp_size": 4, "enable_kv_cache_sharding": True}
    assert served({"attn_tp_size": 4, "kv": "mla"}, prefill, tp_rank=3) == ("real", (0, 1, 2, 3), 0, 4)


@pytest.mark.parametrize(
    ("place", "text"),
    [
        ({"tp_rank": 4}, "tp_rank 4: must be from 0 to 3"),
        ({"tp_rank": 0, "cp_rank": 2}, "cp_rank 2: must be from 0 to 1"),
        ({"tp_rank": 0, "pp_rank": -1}, "pp_rank -1: must be from 0 to 0"),
        ({"tp_rank": 2**70}, f"tp_rank {2**70}: must be from 0 to 3"),
    ],
)
def test_a_rank_that_the_engine_does_not_have_is_refused_with_value_and_range(place, text):
    decode, prefill = (
        disagg.DecodeRank(attn_tp_size=4, engine_rank=0),
        disagg.PrefillInfo(attn_tp_size=4, attn_cp_size=2),
    )
    for serve_ranks in (disagg.serve_ranks, reference.serve_ranks):
        with pytest.raises(ValueError, match=f"^{text}$"):
            serve_ranks(decode, prefill, **place)


def test_a_pair_that_does_not_fit_is_refused_with_its_reasons():
    decode, prefill = disagg.DecodeRank(attn_tp_size=4, engine_rank=0), disagg.PrefillInfo(attn_tp_size=3)
    with pytest.raises(disagg.IncompatiblePeer, match="prefill tp 3 does not divide decode tp 4"):
        disagg.serve_ranks(decode, prefill, tp_rank=0)
