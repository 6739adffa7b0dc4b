"""The compatibility check: each rule, its two values and its words; and the value classes that it compares."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import disagg
from disagg import ReasonKind, Severity
from disagg.printable import printable
from disagg.reference import mapping as reference


def decode(**facts):
    return disagg.DecodeRank(**{"attn_tp_size": 1, "engine_rank": 0} | facts)


def prefill(**facts):
    return disagg.PrefillInfo(**{"attn_tp_size": 1} | facts)


def differences(ours, theirs):
    """The core's; the reference has the same, in the same words."""
    pair = decode(**ours), prefill(**theirs)
    reasons = disagg.compatibility(*pair)
    facts = [(reason.kind, reason.severity, reason.local, reason.remote) for reason in reasons]
    again = reference.compatibility(*pair)
    assert [(reason.kind, reason.severity, reason.local, reason.remote) for reason in again] == facts
    assert [reason.text for reason in again] == [reason.text for reason in reasons]
    return facts


def fatal(kind, local, remote):
    return [(ReasonKind(kind), Severity.FATAL, local, remote)]


def test_a_page_size_concerns_one_peer_and_names_both_values():
    """A2-10."""
    assert differences({"page_size": 64}, {"page_size": 64}) == []
    assert differences({"page_size": 64}, {"page_size": 32}) == fatal("page_size", 64, 32)


hidden = "\x1b\n\x7f\x85\xad\u061c\u180e\u200b\u200f\u2028\u202e\u2060\u2069\u206f\ufeff\ufff9\U000e0041"


def test_every_character_that_hides_or_moves_text_is_escaped():
    for char in hidden:
        (reason,) = disagg.compatibility(decode(kv_layout="hnd"), prefill(kv_layout=f"a{char}b"))
        assert f"a\\x{ord(char):02x}b at" in reason.text
        assert printable(char) == f"\\x{ord(char):02x}"


@given(
    st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from(hidden)), min_size=1).filter(
        lambda name: name != "hnd"
    )
)
def test_words_of_a_peer_cannot_break_out_of_a_reason(name):
    """The value is what the peer sent; the text is fit for a terminal, the same in core and reference."""
    ours, theirs = decode(kv_layout="hnd"), prefill(kv_layout=name)
    (reason,) = disagg.compatibility(ours, theirs)
    assert reason.remote == name
    assert reason.text == f"kv_layout hnd here, {printable(name)} at the prefill: must be equal"
    assert not re.search("[\x00-\x1f\x7f-\x9f\u202e]", reason.text)
    assert [other.text for other in reference.compatibility(ours, theirs)] == [reason.text]
    assert "\n" not in str(disagg.ProtocolError(f"a\n{name}", f"{name}\n"))


@pytest.mark.parametrize(
    ("ours", "theirs", "severity"),
    [
        ("auto", "auto", None),
        ("auto", None, None),
        ("auto", "fp8_e4m3", Severity.WARNING),
        ("bfloat16", "auto", Severity.WARNING),
        ("bfloat16", "fp8_e4m3", Severity.FATAL),
        ("fp8_e4m3", "torch.float8_e4m3fn", None),
        ("bf16", "torch.bfloat16", None),
        ("float8_e4m3fnuz", "fp8_e4m3", Severity.FATAL),
    ],
)
def test_dtypes_are_compared_by_meaning_and_auto_is_only_unresolved(ours, theirs, severity):
    """A2-11, with "auto" as DESIGN.md section 5 has it."""
    found = differences({"kv_cache_dtype": ours}, {"kv_cache_dtype": theirs})
    assert [entry[1] for entry in found] == ([severity] if severity else [])


def test_strict_dtype_refuses_auto_against_a_concrete_dtype():
    """A2-11."""
    found = differences({"strict_dtype": True}, {"kv_cache_dtype": "fp8_e4m3"})
    assert found == fatal("kv_cache_dtype", "auto", "fp8_e4m3")


def test_a_spec_layout_on_one_side_only_is_a_difference():
    layout = {"block": 4}
    assert differences({"spec_layout": layout}, {"spec_layout": dict(layout)}) == []
    assert differences({"spec_layout": layout}, {}) == fatal("spec_layout", layout, None)
    assert differences({}, {"spec_layout": layout}) == fatal("spec_layout", None, layout)


@pytest.mark.parametrize("name", ["kv_layout", "decode_allocation_policy"])
def test_a_name_that_one_side_does_not_state_is_not_compared(name):
    assert differences({name: "early"}, {name: None}) == []
    assert differences({name: None}, {name: "early"}) == []
    assert differences({name: "early"}, {name: "late"}) == fatal(name, "early", "late")


def test_a_cache_that_cannot_be_sliced_needs_equal_tp():
    """A1-13: refused at the fetch, not by a hang when sending."""
    found = differences({"attn_tp_size": 4, "requires_equal_tp": True, "kv": "hybrid_mla"}, {})
    assert found == fatal("equal_tp", 4, 1)


def test_sharded_mla_needs_equal_tp_and_then_reads_every_rank():
    sharded = {"attn_tp_size": 2, "enable_kv_cache_sharding": True}
    assert differences({"kv": "mla"}, sharded) == fatal("sharding_tp", 1, 2)
    mapping = disagg.map_ranks(decode(kv="mla", attn_tp_size=2), prefill(**sharded))
    assert (mapping.target_tp_rank, mapping.target_tp_ranks) == (None, (0, 1))
    assert (mapping.required_dst_info_num, mapping.required_prefill_response_num) == (2, 2)
    assert not any(contact.dummy for contact in mapping.contacts())


def test_unequal_tp_of_per_head_caches_is_one_warning_and_still_maps():
    """A1-03."""
    pair = decode(), prefill(attn_tp_size=2)
    (reason,) = disagg.compatibility(*pair)
    assert (reason.kind, reason.severity) == (ReasonKind.UNEQUAL_TP, Severity.WARNING)
    assert disagg.map_ranks(*pair).target_tp_ranks == (0, 1)


def test_prefill_complete_needs_a_peer_of_one_rank_whichever_side_states_it():
    complete = {"decode_allocation_policy": "prefill_complete"}
    assert differences(complete, complete) == []
    assert differences(complete, complete | {"pp_size": 2}) == fatal("prefill_complete", "prefill_complete", (1, 1, 2))
    assert differences({}, complete | {"attn_cp_size": 2}) == fatal("prefill_complete", None, (1, 2, 1))


def test_decode_context_parallelism_needs_mla_prefill_cp_1_and_no_sharding():
    assert differences({"dcp_size": 2, "kv": "mla"}, {}) == []
    assert differences({"dcp_size": 2}, {}) == fatal("dcp_kv", 2, None)
    found = differences({"dcp_size": 2, "kv": "mla"}, {"attn_cp_size": 2, "enable_kv_cache_sharding": True})
    assert found == fatal("dcp_prefill_cp", 2, 2) + fatal("dcp_sharding", 2, True)


def test_heads_that_neither_side_can_deal_out_evenly_are_refused():
    """A1-04, A1-05: the true head count, on both sides."""
    assert differences({"num_kv_heads": 2}, {"attn_tp_size": 4})[0][0] == ReasonKind.UNEQUAL_TP
    found = differences({"num_kv_heads": 3, "kv": "hybrid_mla"}, {"attn_tp_size": 2})
    assert found == fatal("num_kv_heads", (3, 1), (3, 2))
    found = differences({"num_kv_heads": 3, "kv": "hybrid_mla", "attn_tp_size": 2}, {})
    assert found == fatal("num_kv_heads", (3, 2), (3, 1))
    assert differences({"num_kv_heads": 3, "kv": "mla"}, {"attn_tp_size": 2}) == []


def test_more_contacts_than_4096_are_refused_before_anything_is_built():
    ours = {"all_cp_ranks": True}
    assert differences(ours, {"attn_cp_size": 4_096}) == []
    assert differences(ours, {"attn_cp_size": 4_097}) == fatal("contacts", None, 4_097)
    ours, sharded = {"attn_tp_size": 4_097, "kv": "mla"}, {"attn_tp_size": 4_097, "enable_kv_cache_sharding": True}
    assert differences(ours, sharded) == fatal("contacts", None, 4_097)


def test_decode_cp_above_1_is_refused():
    assert differences({"attn_cp_size": 2}, {"attn_cp_size": 2}) == fatal("decode_cp", 2, 2)


def test_sizes_are_bounded_each_and_as_a_product():
    """A1-17."""
    assert prefill(attn_tp_size=256, dp_size=256).dp_size == 256
    with pytest.raises(ValueError, match=r"dp x cp x tp x pp is 65792: must be at most 65536"):
        prefill(attn_tp_size=257, dp_size=256)
    with pytest.raises(ValueError, match=r"attn_cp_size 65536: must be from 1 to 65535"):
        decode(attn_cp_size=65_536)
    with pytest.raises(ValueError, match=r"pp_rank 2: must be below pp_size 2"):
        decode(pp_size=2, pp_rank=2)
    with pytest.raises(ValueError, match=r"kv gqa: must be one of mha, mla, hybrid_mla"):
        decode(kv="gqa")


def test_the_words_of_each_reason():
    ours = {
        "attn_tp_size": 4,
        "attn_cp_size": 2,
        "pp_size": 2,
        "num_kv_heads": 5,
        "dcp_size": 2,
        "requires_equal_tp": True,
        "decode_allocation_policy": "prefill_complete",
        "spec_layout": {"block": 4},
    }
    theirs = {"attn_tp_size": 6, "attn_cp_size": 2, "enable_kv_cache_sharding": True, "page_size": 32}
    with pytest.raises(disagg.IncompatiblePeer) as caught:
        disagg.map_ranks(decode(**ours), prefill(**theirs))
    assert str(caught.value).split("; ") == [
        "page_size 64 here, 32 at the prefill: must be equal",
        "decode_allocation_policy prefill_complete here, early at the prefill: must be equal",
        'spec_layout {"block":4} here, none at the prefill: must be equal',
        "prefill tp 6 cp 2 pp 1: policy prefill_complete needs tp, cp and pp 1",
        "decode tp 4, prefill tp 6: this cache needs equal tp",
        "decode tp 4 does not divide prefill tp 6",
        "num_kv_heads 5 over tp 4 here, 5 over tp 6 at the prefill: one must divide the other",
        "decode cp 2: must be 1",
        "decode pp 2, prefill pp 1: must be equal, or 1 at the decode",
        "dcp_size 2: needs kv mla or hybrid_mla, not mha",
        "dcp_size 2, prefill cp 2: dcp needs prefill cp 1",
        "dcp_size 2, prefill sharding on: dcp needs it off",
    ]


trees = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip


@given(st.dictionaries(st.text(max_size=3), trees, max_size=3))
def test_values_survive_pickle_copy_and_their_own_repr(tree):
    values = [decode(attn_tp_size=8, engine_rank=3, spec_layout=tree), prefill(attn_tp_size=4, extras=tree)]
    values.append(disagg.map_ranks(decode(attn_tp_size=8, engine_rank=3), values[1]))
    for value in values:
        assert pickle.loads(pickle.dumps(value)) == value
        assert copy.deepcopy(value) == value
        assert eval(repr(value), vars(disagg)) == value
        assert hash(copy.copy(value)) == hash(value)
    assert values[1].extras == tree


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (disagg.ConfigError("token", "needs allowed_hosts"), "token: needs allowed_hosts"),
        (disagg.ProtocolError("dp_size", "-1", "must be from 1 to 9"), "dp_size -1: must be from 1 to 9"),
        (disagg.PeerUnreachable("a:1", 15, "refused"), "a:1 not reached in 15 attempts: refused"),
        (disagg.DpRankTimeout("a:1", 7, 30.0), "a:1 has no dp rank for room 7 after 30 s"),
        (disagg.NotAllowed("a:1"), "a:1 is not in allowed_hosts"),
    ],
)
def test_errors_pickle_and_build_their_words_from_their_facts(error, text):
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) == text
    assert vars(again) == vars(error)
    assert isinstance(error, disagg.DisaggError)


def test_every_kind_of_reason_is_enumerable_with_its_name():
    assert [kind.value for kind in ReasonKind][:3] == ["page_size", "kv_cache_dtype", "kv_layout"]
    assert ReasonKind("contacts") is ReasonKind.CONTACTS
