"""Rank mapping: against the recorded answers of SGLang 0.5.23, and core against reference."""

from __future__ import annotations

import csv
import gzip
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

import disagg
from disagg.reference import mapping as reference
from pairs import FIELDS, fitting_pairs

KINDS = {"mha": "mha", "mla": "mla", "hyb": "hybrid_mla"}


def ranks(text):
    return tuple(int(rank) for rank in text.split())


def pair_of(row):
    decode = disagg.DecodeRank(
        attn_tp_size=int(row["d_tp"]),
        engine_rank=int(row["d_rank"]),
        pp_size=int(row["d_pp"]),
        pp_rank=int(row["d_pp_rank"]),
        kv=KINDS[row["backend"]],
        all_cp_ranks=row["all_cp"] == "1",
    )
    prefill = disagg.PrefillInfo(
        attn_tp_size=int(row["p_tp"]),
        attn_cp_size=int(row["p_cp"]),
        pp_size=int(row["p_pp"]),
        enable_dsa_cache_layer_split=row["split"] == "1",
        enable_kv_cache_sharding=row["shard"] == "1",
    )
    return decode, prefill


def test_every_recorded_answer_whose_sizes_divide_is_ours_and_every_other_is_refused(shared):
    right = refused = 0
    with gzip.open(shared / "data" / "rank_mapping_sample.csv.gz", "rt") as rows:
        for row in csv.DictReader(rows):
            decode, prefill = pair_of(row)
            small, large = sorted((int(row["d_tp"]), int(row["p_tp"])))
            if row["err"] or large % small:
                for map_ranks in (disagg.map_ranks, reference.map_ranks):
                    with pytest.raises(disagg.IncompatiblePeer):
                        map_ranks(decode, prefill)
                refused += 1
                continue
            recorded = (
                int(row["tp"]) if row["tp"] else None,
                *(ranks(row[name]) for name in ("tps", "cps", "pps")),
                int(row["dst"]),
                int(row["resp"]),
            )
            for map_ranks in (disagg.map_ranks, reference.map_ranks):
                mapping = map_ranks(decode, prefill)
                assert tuple(getattr(mapping, name) for name in FIELDS) == recorded, row
            right += 1
    assert (right, refused) == (18_687, 7_235 + 980)


sizes = st.one_of(st.sampled_from([1, 2, 3, 4, 6, 8, 16, 32, 64, 128]), st.integers(1, 512))
names = st.sampled_from([None, "auto", "bfloat16", "torch.bfloat16", "bf16", "fp8_e4m3", "torch.float8_e4m3fn"])
layouts = st.sampled_from([None, {"a": 1}, {"a": 2}])


@st.composite
def decodes(draw):
    tp, pp = draw(sizes), draw(st.sampled_from([1, 1, 2, 4]))
    return disagg.DecodeRank(
        attn_tp_size=tp,
        engine_rank=draw(st.integers(0, 2 * tp)),
        attn_cp_size=draw(st.sampled_from([1, 1, 1, 2])),
        pp_size=pp,
        pp_rank=draw(st.integers(0, pp - 1)),
        kv=draw(st.sampled_from(["mha", "mla", "hybrid_mla"])),
        all_cp_ranks=draw(st.sampled_from([None, True, False])),
        num_kv_heads=draw(st.one_of(st.none(), st.sampled_from([1, 2, 4, 8, 12]))),
        page_size=draw(st.sampled_from([None, 64, 64, 32])),
        kv_cache_dtype=draw(names),
        kv_layout=draw(st.sampled_from([None, None, "hnd", "nhd"])),
        decode_allocation_policy=draw(st.sampled_from([None, None, "early", "prefill_complete"])),
        dcp_size=draw(st.sampled_from([1, 1, 1, 2])),
        spec_layout=draw(layouts),
        requires_equal_tp=draw(st.booleans()),
        strict_dtype=draw(st.booleans()),
    )


@st.composite
def prefills(draw):
    tp, cp, pp = draw(sizes), draw(st.sampled_from([1, 1, 2, 8])), draw(st.sampled_from([1, 1, 2, 3, 4]))
    return disagg.PrefillInfo(
        attn_tp_size=tp,
        attn_cp_size=cp,
        pp_size=pp,
        dp_size=draw(st.integers(1, 65_536 // (tp * cp * pp))) % 65_535 or 1,
        page_size=draw(st.sampled_from([None, 64, 64, 32])),
        kv_cache_dtype=draw(names),
        enable_dsa_cache_layer_split=draw(st.booleans()),
        enable_kv_cache_sharding=draw(st.booleans()),
        kv_layout=draw(st.sampled_from([None, None, "hnd", "nhd"])),
        decode_allocation_policy=draw(st.sampled_from([None, "early", "early", "prefill_complete"])),
        spec_layout=draw(layouts),
    )


def outcome(map_ranks, decode, prefill):
    try:
        mapping = map_ranks(decode, prefill)
    except disagg.IncompatiblePeer as error:
        return [(reason.kind, reason.severity, reason.local, reason.remote) for reason in error.reasons]
    contacts = [(c.cp, c.tp, c.pp, c.dummy) for c in mapping.contacts()]
    return tuple(getattr(mapping, name) for name in FIELDS), contacts


@given(decodes(), prefills())
def test_core_and_reference_agree(decode, prefill):
    assert outcome(disagg.map_ranks, decode, prefill) == outcome(reference.map_ranks, decode, prefill)
    mine, other = disagg.compatibility(decode, prefill), reference.compatibility(decode, prefill)
    assert [(r.kind, r.severity, r.local, r.remote) for r in mine] == [
        (r.kind, r.severity, r.local, r.remote) for r in other
    ]


@given(fitting_pairs())
def test_core_and_reference_agree_on_pairs_that_fit(pair):
    """Of sizes drawn apart few fit, so that mostly reasons are compared above, and mostly mappings here."""
    assert outcome(disagg.map_ranks, *pair) == outcome(reference.map_ranks, *pair)


@given(st.integers(1, 64), st.integers(1, 64), st.data())
def test_core_and_reference_deal_out_heads_alike(heads, tp_size, data):
    rank = data.draw(st.integers(0, tp_size - 1))
    held = disagg.kv_head_range(heads, tp_size, rank)
    assert (held if held is None else tuple(range(*held))) == reference.kv_heads(heads, tp_size, rank)


@given(decodes())
def test_equal_topologies_give_the_identity(decode):
    if decode.kv == "mha" and decode.attn_cp_size == 1 and decode.dcp_size == 1:
        prefill = disagg.PrefillInfo(
            attn_tp_size=decode.attn_tp_size,
            pp_size=decode.pp_size,
            page_size=decode.page_size,
            kv_cache_dtype=decode.kv_cache_dtype,
            kv_layout=decode.kv_layout,
            decode_allocation_policy=None if decode.decode_allocation_policy == "prefill_complete" else "early",
            spec_layout=decode.spec_layout,
        )
        reasons = disagg.compatibility(decode, prefill)
        assert {reason.kind for reason in reasons} <= {"num_kv_heads", "prefill_complete"}
        if not reasons:
            mapping = disagg.map_ranks(decode, prefill)
            assert mapping.target_tp_ranks == (decode.attn_tp_rank,)
            assert mapping.target_pp_ranks == (decode.pp_rank,)
            assert (mapping.required_dst_info_num, mapping.required_prefill_response_num) == (1, 1)


@given(st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([1, 2, 3]))
def test_decode_ranks_together_read_every_prefill_rank(decode_tp, prefill_tp, stages):
    prefill = disagg.PrefillInfo(attn_tp_size=prefill_tp, pp_size=stages)
    read = set()
    for rank in range(decode_tp):
        mapping = disagg.map_ranks(disagg.DecodeRank(attn_tp_size=decode_tp, engine_rank=rank), prefill)
        read |= {(contact.tp, contact.pp) for contact in mapping.contacts()}
        assert mapping.required_prefill_response_num == mapping.contact_count
    assert read == {(tp, pp) for tp in range(prefill_tp) for pp in range(stages)}


def map_both(decode, prefill):
    """The core's answer, or its refusal; the reference says the same."""
    assert outcome(disagg.map_ranks, decode, prefill) == outcome(reference.map_ranks, decode, prefill)
    return disagg.map_ranks(decode, prefill)


def mapped(decode_tp, rank, kv="mha", all_cp_ranks=None, **prefill):
    decode = disagg.DecodeRank(attn_tp_size=decode_tp, engine_rank=rank, kv=kv, all_cp_ranks=all_cp_ranks)
    return map_both(decode, disagg.PrefillInfo(**prefill))


def test_mla_block_has_one_real_rank_and_named_dummies():
    """A1-01."""
    mapping = mapped(4, 1, "mla", attn_tp_size=16)
    assert mapping.target_tp_rank == 4
    assert [(c.tp, c.dummy) for c in mapping.contacts()] == [(4, False), (5, True), (6, True), (7, True)]
    assert (mapping.required_dst_info_num, mapping.required_prefill_response_num) == (1, 1)


def test_every_rank_of_the_block_is_real_without_mla():
    """A1-02."""
    assert mapped(2, 1, attn_tp_size=4).target_tp_ranks == (2, 3)
    assert mapped(2, 1, attn_tp_size=4).required_prefill_response_num == 2
    wide = mapped(4, 3, attn_tp_size=2)
    assert (wide.target_tp_ranks, wide.required_dst_info_num) == ((1,), 2)


@pytest.mark.parametrize(("decode_tp", "prefill_tp"), [(4, 3), (8, 3), (6, 4), (2, 3), (4, 6)])
def test_sizes_that_do_not_divide_are_refused_with_both_values(decode_tp, prefill_tp):
    """A1-07: upstream floors, and reads a rank that does not exist or never reads some."""
    for rank in range(decode_tp):
        with pytest.raises(disagg.IncompatiblePeer) as caught:
            mapped(decode_tp, rank, attn_tp_size=prefill_tp)
        text = str(caught.value)
        assert str(decode_tp) in text
        assert str(prefill_tp) in text


def test_pipeline_stages_line_up_or_decode_holds_them_all():
    """A1-08."""
    one = mapped(1, 0, attn_tp_size=1, pp_size=1)
    assert one.target_pp_ranks == (0,)
    decode = disagg.DecodeRank(attn_tp_size=1, engine_rank=0, pp_size=2, pp_rank=1)
    assert map_both(decode, disagg.PrefillInfo(attn_tp_size=1, pp_size=2)).target_pp_ranks == (1,)
    for stages in (1, 4):
        with pytest.raises(disagg.IncompatiblePeer, match="2"):
            map_both(decode, disagg.PrefillInfo(attn_tp_size=1, pp_size=stages))


def test_higher_stages_are_contacted_first():
    """A1-09: the list stays ascending, the order of contact does not."""
    decode = disagg.DecodeRank(attn_tp_size=2, engine_rank=1)
    mapping = map_both(decode, disagg.PrefillInfo(attn_tp_size=4, pp_size=2))
    assert mapping.target_pp_ranks == (0, 1)
    assert [(c.tp, c.pp) for c in mapping.contacts()] == [(2, 1), (2, 0), (3, 1), (3, 0)]
    assert mapping.required_prefill_response_num == 4


def test_context_parallel_ranks_are_read_first_or_all():
    """A1-10, A1-12."""
    assert mapped(1, 0, attn_tp_size=1, attn_cp_size=8).target_cp_ranks == (0,)
    for rank in range(4):
        narrow = mapped(4, rank, "mla", attn_tp_size=1, attn_cp_size=4)
        assert (narrow.target_tp_ranks, narrow.target_cp_ranks, narrow.required_dst_info_num) == ((0,), (0,), 4)
    mapping = mapped(1, 0, all_cp_ranks=True, attn_tp_size=1, attn_cp_size=8)
    assert mapping.target_cp_ranks == tuple(range(8))
    assert mapping.required_prefill_response_num == 8


def test_hybrid_reads_the_whole_block_of_every_context_parallel_rank():
    """A1-14."""
    mapping = mapped(2, 0, "hybrid_mla", attn_tp_size=4, attn_cp_size=2)
    assert (mapping.target_tp_ranks, mapping.target_cp_ranks) == ((0, 1), (0, 1))
    assert mapping.required_prefill_response_num == 4
    assert not any(contact.dummy for contact in mapping.contacts())


@pytest.mark.parametrize(
    ("kv", "said", "read"),
    [
        ("mla", None, (0,)),
        ("mla", True, (0, 1)),
        ("hybrid_mla", None, (0, 1)),
        ("hybrid_mla", False, (0,)),
    ],
)
def test_all_cp_ranks_is_taken_as_said_and_else_on_for_hybrid_mla(kv, said, read):
    assert mapped(1, 0, kv, said, attn_tp_size=1, attn_cp_size=2).target_cp_ranks == read


@pytest.mark.parametrize("switch", ["enable_dsa_cache_layer_split", "enable_kv_cache_sharding"])
def test_context_parallel_ranks_that_own_a_part_are_all_read(switch):
    """Sharding acts here and not in TP when CP is above 1."""
    mapping = mapped(4, 1, "mla", attn_tp_size=4, attn_cp_size=2, **{switch: True})
    assert (mapping.target_tp_rank, mapping.target_tp_ranks, mapping.target_cp_ranks) == (1, (1,), (0, 1))
    assert (mapping.required_dst_info_num, mapping.required_prefill_response_num) == (1, 2)


def test_sharding_of_a_single_cp_rank_acts_in_tp_and_only_for_mla():
    sharded = {"attn_tp_size": 4, "enable_kv_cache_sharding": True}
    mla = mapped(4, 1, "mla", **sharded)
    assert (mla.target_tp_rank, mla.target_tp_ranks) == (None, (0, 1, 2, 3))
    assert (mla.required_dst_info_num, mla.required_prefill_response_num) == (4, 4)
    for kv in ("mha", "hybrid_mla"):
        assert mapped(4, 1, kv, **sharded).target_tp_ranks == (1,)


def test_the_rank_in_the_engine_counts_modulo_attention_tp():
    """A1-15: the decode engine's own dp groups have no part in it."""
    assert mapped(4, 6, "mla", attn_tp_size=8) == mapped(4, 2, "mla", attn_tp_size=8)


def test_neighbouring_ranks_hold_the_same_head_when_heads_are_replicated():
    """A1-04, A1-05: 0,0,1,1 and neither 0,1,0,1 nor 0,0,0,0."""
    assert [disagg.kv_head_range(2, 4, rank) for rank in range(4)] == [(0, 1), (0, 1), (1, 2), (1, 2)]
    assert [reference.kv_heads(2, 4, rank) for rank in range(4)] == [(0,), (0,), (1,), (1,)]
    assert disagg.kv_head_range(8, 3, 0) is reference.kv_heads(8, 3, 0) is None
    decode = disagg.DecodeRank(attn_tp_size=1, engine_rank=0, num_kv_heads=2)
    assert map_both(decode, disagg.PrefillInfo(attn_tp_size=4)).target_tp_ranks == (0, 1, 2, 3)


@pytest.mark.parametrize("map_one", [disagg.map_ranks, reference.map_ranks], ids=["core", "reference"])
def test_one_rank_of_eight_does_not_hold_all_heads(map_one):
    """A1-06: 4 heads on 8 prefill ranks; the ranks that are read cover them, rank 0 alone would not."""
    decode = disagg.DecodeRank(attn_tp_size=1, engine_rank=0, num_kv_heads=4)
    mapping = map_one(decode, disagg.PrefillInfo(attn_tp_size=8))
    held = [disagg.kv_head_range(4, 8, rank) for rank in mapping.target_tp_ranks]
    assert {head for first, end in held for head in range(first, end)} == {0, 1, 2, 3}
    assert held[0] == (0, 1)
    assert mapping.required_prefill_response_num == 8


@pytest.mark.parametrize("engine_rank", [13, 5, 8 * 13 + 5])
def test_the_decode_s_own_dp_group_does_not_move_the_mapping(engine_rank):
    """A1-15: only the attention-TP rank counts, whatever group the engine rank is in."""
    mapping = mapped(8, engine_rank, attn_tp_size=4, dp_size=4)
    assert mapping == mapped(8, 5, attn_tp_size=4)
    assert mapping.target_tp_ranks == (2,)


def test_all_reasons_come_at_once_with_both_values():
    decode = disagg.DecodeRank(attn_tp_size=4, engine_rank=0, page_size=64, kv_layout="hnd")
    prefill = disagg.PrefillInfo(attn_tp_size=3, page_size=32, kv_layout="nhd")
    with pytest.raises(disagg.IncompatiblePeer) as caught:
        disagg.map_ranks(decode, prefill)
    error = caught.value
    assert [reason.kind for reason in error.reasons] == ["page_size", "kv_layout", "tp_divisibility"]
    for reason in error.reasons:
        assert reason.text in str(error)
        assert str(reason.local) in reason.text
        assert str(reason.remote) in reason.text
    assert pickle.loads(pickle.dumps(error)).reasons == error.reasons


@pytest.mark.parametrize("size", [0, -2, 2**40, True, 1.0, "8"])
def test_absurd_sizes_are_refused_before_anything_is_built(size):
    """A1-17."""
    with pytest.raises((ValueError, TypeError), match="attn_tp_size"):
        disagg.PrefillInfo(attn_tp_size=size)
    with pytest.raises((ValueError, TypeError), match="attn_tp_size"):
        disagg.DecodeRank(attn_tp_size=size, engine_rank=0)
