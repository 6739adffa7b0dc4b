"""Topology answers of every era, and bodies that no server should send."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import disagg
from disagg.reference import wire as reference
from machines import topology

FIELDS = (
    "attn_tp_size",
    "attn_cp_size",
    "dp_size",
    "pp_size",
    "page_size",
    "kv_cache_dtype",
    "follow_bootstrap_room",
    "enable_dsa_cache_layer_split",
    "enable_kv_cache_sharding",
    "prefill_http_port",
    "kv_layout",
    "decode_allocation_policy",
    "dynamic_dp_size",
    "spec_layout",
)
numbers = st.one_of(
    st.integers(1, 8),
    st.sampled_from(["8", "08", "+8", " 8", "8 ", "8.0", "1_0", "٣", "", 8.0, True, 0, -1, 2**40, None, [], "x"]),
)
flags = st.sampled_from([True, False, 0, 1, 2, "true", "false", "True", "", None])
texts = st.sampled_from([None, "auto", "hnd", 5, ""])
KEYS = {
    "attn_tp_size": numbers,
    "prefill_attn_tp_size": numbers,
    "attn_cp_size": numbers,
    "dp_size": numbers,
    "prefill_dp_size": numbers,
    "prefill_tp_size": numbers,
    "pp_size": numbers,
    "prefill_pp_size": numbers,
    "page_size": numbers,
    "prefill_page_size": numbers,
    "prefill_http_port": numbers,
    "kv_cache_dtype": texts,
    "kv_layout": texts,
    "decode_allocation_policy": texts,
    "follow_bootstrap_room": flags,
    "enable_dsa_cache_layer_split": flags,
    "enable_kv_cache_sharding": flags,
    "dynamic_dp_size": flags,
    "dsv41_spec_layout": st.sampled_from([None, {}, {"a": [1]}, 5, "x"]),
    "target_tp_rank": st.sampled_from([None, 3, "x"]),
    "future_field": st.sampled_from([None, 1, {"a": 1}]),
}
good = st.fixed_dictionaries({"attn_tp_size": st.integers(1, 8), "dp_size": st.integers(1, 8)})
bodies = st.one_of(
    st.builds(lambda base, rest: json.dumps(base | rest).encode(), good, st.fixed_dictionaries({}, optional=KEYS)),
    st.fixed_dictionaries({}, optional=KEYS).map(lambda body: json.dumps(body).encode()),
    st.binary(max_size=40),
    st.recursive(st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5)), st.lists, max_leaves=5).map(
        lambda value: json.dumps(value).encode()
    ),
)


def core_topology(body):
    try:
        info = disagg.PrefillInfo.from_json(body)
    except disagg.ProtocolError as error:
        return "not ready" if "must not be null" in error.rule else "protocol error"
    return {name: getattr(info, name) for name in FIELDS} | {"extras": info.extras}


def reference_topology(body):
    try:
        info = reference.parse_topology(body)
    except disagg.ProtocolError:
        return "protocol error"
    return "not ready" if info is None else {name: getattr(info, name) for name in FIELDS} | {"extras": info.extras}


@given(bodies)
def test_core_and_reference_read_the_same(body):
    assert core_topology(body) == reference_topology(body)


four = st.lists(st.one_of(st.integers(0, 4), st.sampled_from([-1, True, 1.0, "1", None, 65_536, 2**70])), max_size=5)
waiting = st.fixed_dictionaries(
    {},
    optional={
        "sizes": st.one_of(st.none(), st.lists(st.integers(1, 3), min_size=4, max_size=4), four),
        "registered": st.one_of(st.integers(0, 20), st.sampled_from([None, "1", 1.0, True, -1])),
        "missing": st.one_of(st.none(), st.lists(st.one_of(st.lists(st.integers(0, 3), min_size=4, max_size=4), four))),
    },
)


@given(st.one_of(waiting.map(lambda body: json.dumps(body).encode()), bodies))
def test_core_and_reference_read_the_same_from_a_503(body):
    assert disagg._core.parse_not_ready(body) == reference.parse_not_ready(body)


@given(bodies, st.data())
def test_mutated_bodies_never_do_more_than_raise_protocol_error(body, data):
    mutated = bytearray(body)
    for _ in range(data.draw(st.integers(1, 4))):
        if mutated:
            mutated[data.draw(st.integers(0, len(mutated) - 1))] = data.draw(st.integers(0, 255))
    core_topology(bytes(mutated))


def test_topology_of_each_era_is_read():
    """A2-12: unknown keys are kept, missing ones defaulted, nulls of E4 ignored."""
    old = {"prefill_attn_tp_size": 4, "prefill_dp_size": 2, "prefill_pp_size": 1, "prefill_page_size": 64}
    e2 = disagg.PrefillInfo.from_json(json.dumps(old))
    assert (e2.attn_tp_size, e2.dp_size, e2.page_size, e2.kv_cache_dtype) == (4, 2, 64, None)
    e4 = disagg.PrefillInfo.from_json(topology(tp=4, target_tp_rank=None, target_tp_ranks=[1], future_field={"a": 1}))
    assert e4.extras == {"future_field": {"a": 1}}
    e7 = disagg.PrefillInfo.from_json(topology(tp=4, kv_layout="hnd", enable_kv_cache_sharding=True))
    assert (e7.kv_layout, e7.enable_kv_cache_sharding, e7.decode_allocation_policy) == ("hnd", True, "early")


def test_false_as_a_string_is_false():
    assert not disagg.PrefillInfo.from_json(topology(enable_kv_cache_sharding="false")).enable_kv_cache_sharding


@pytest.mark.parametrize("value", ["+8", " 8", "8.0", "1_0", "٣", 8.0, True, 0, -2, 2**40])
def test_nonsense_names_field_and_value(value):
    """A1-17."""
    body = json.dumps({"attn_tp_size": value, "dp_size": 1})
    with pytest.raises(disagg.ProtocolError) as caught:
        disagg.PrefillInfo.from_json(body)
    assert caught.value.field == "attn_tp_size"
    assert caught.value.value in body


def test_duplicate_keys_are_refused():
    with pytest.raises(disagg.ProtocolError) as caught:
        disagg.PrefillInfo.from_json('{"attn_tp_size": 1, "attn_tp_size": 2, "dp_size": 1}')
    assert caught.value.field == "attn_tp_size"


def test_eras_that_nobody_ships_are_named():
    with pytest.raises(disagg.ProtocolError) as caught:
        disagg.PrefillInfo.from_json('{"prefill_tp_size": 4, "prefill_dp_size": 1}')
    assert caught.value.field == "era"
