"""Lists of hosts: core against reference and `ipaddress`, what entries may be, and what they allow in virtual time."""

from __future__ import annotations

import ipaddress
import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import disagg
from disagg import _core
from disagg.reference.hosts import HostList
from machines import A, B, add, answer_endpoints, answer_topology, endpoint, make, make_ready, topology

LABELS = st.sampled_from(["a", "A", "b", "prefill", "svc", "p-1", "x_y", "10", "0x1f"])
NAMES = st.lists(LABELS, min_size=1, max_size=4).map(".".join)
V4 = st.one_of(st.integers(0, 2**32 - 1), st.sampled_from([0x0A000000, 0x0A000001, 0x0AFFFFFF, 0x7F000001]))
V6 = st.one_of(
    st.integers(0, 2**128 - 1),
    st.sampled_from([0, 1, 0xFD << 120, 0xFFFF0A000001]),
    V4.map(lambda v4: 0xFFFF << 32 | v4),
)
V4_TEXTS, V6_TEXTS = V4.map(lambda v: str(ipaddress.IPv4Address(v))), V6.map(lambda v: str(ipaddress.IPv6Address(v)))
JUNK = st.text(alphabet="aA1.:%/[]*-_ é", max_size=8)


@st.composite
def networks(draw):
    kind = draw(st.sampled_from([ipaddress.IPv4Address, ipaddress.IPv6Address]))
    width = 32 if kind is ipaddress.IPv4Address else 128
    prefix = draw(st.one_of(st.integers(0, width), st.integers(0, 140)))
    number = draw(V4 if width == 32 else V6)
    if draw(st.booleans()):
        number = number >> (width - min(prefix, width)) << (width - min(prefix, width))
    return f"{kind(number)}/{prefix}"


ENTRIES = st.one_of(NAMES, NAMES.map("*.{}".format), NAMES.map("{}.".format), V4_TEXTS, V6_TEXTS, networks(), JUNK)
HOSTS = st.one_of(
    NAMES,
    NAMES.map("{}.".format),
    V4_TEXTS,
    V6_TEXTS,
    V6_TEXTS.map("[{}]".format),
    V6_TEXTS.map("{}%eth0".format),
    JUNK,
)


def made(kind, entries):
    try:
        return kind(entries), None
    except disagg.ConfigError as error:
        return None, str(error)


@given(st.lists(ENTRIES, max_size=4), st.lists(HOSTS, min_size=1, max_size=20))
def test_core_and_reference_agree_on_entries_and_hosts(entries, hosts):
    core, why = made(_core.HostList, entries)
    reference, why_not = made(HostList, entries)
    assert (core is None) == (reference is None), (why, why_not)
    if core is None:
        assert unquoted(why) == unquoted(why_not)
        return
    for host in hosts:
        assert core.verdict(host) == reference.verdict(host), host
        assert core.allows_resolved(host) == reference.allows_resolved(host), host


def unquoted(text):
    return re.sub('".*"', "", text)  # Rust and Python escape what is odd in an entry in their own way


@given(st.lists(networks(), min_size=1, max_size=4), st.one_of(V4_TEXTS, V6_TEXTS))
def test_an_ip_address_is_allowed_exactly_in_the_listed_networks(entries, host):
    core, _ = made(_core.HostList, entries)
    try:
        listed = [ipaddress.ip_network(entry) for entry in entries]
    except ValueError:
        listed = None
    assert (core is None) == (listed is None)
    if core is None:
        return
    ip = ipaddress.ip_address(host)
    v4 = ip if ip.version == 4 else ip.ipv4_mapped
    if v4 is None:
        expected = any(ip in network for network in listed)
    else:
        # IPv4 also as IPv4-mapped IPv6, on either side; no other IPv6 network holds it
        mapped = ipaddress.ip_address(f"::ffff:{v4}")
        expected = any(v4 in network or (mapped in network and network.prefixlen >= 96) for network in listed)
    assert core.verdict(host) == ("allowed" if expected else "refused")


@pytest.mark.parametrize("option", ["allowed_hosts", "allowed_rank_hosts"])
@pytest.mark.parametrize(
    ("entries", "text"),
    [
        ([], "is empty; leave it out to allow every host"),
        (["p1", "*"], 'entry "*" would allow every name; leave the option out to allow every host'),
        (["10.0.0.1/8"], 'entry "10.0.0.1/8" has bits set behind its prefix'),
        (["p1:8998"], 'entry "p1:8998" must have no port; all ports of a host are allowed'),
    ],
)
def test_a_faulty_entry_is_a_config_error_that_names_it(option, entries, text):
    for make_one in (lambda: make(**{option: entries}).core, lambda: disagg.Resolver(DECODE, **{option: entries})):
        with pytest.raises(disagg.ConfigError) as error:
            make_one()
        assert (error.value.option, error.value.rule) == (option, text)
        assert str(pickle.loads(pickle.dumps(error.value))) == f"{option}: {text}"


def test_one_text_is_no_list_of_hosts():
    with pytest.raises(TypeError):
        disagg.Resolver(DECODE, allowed_hosts="prefill-1")


DECODE = disagg.DecodeRank(attn_tp_size=1, engine_rank=0, page_size=64)


# -- bootstrap addresses


@pytest.mark.parametrize("addr", ["10.0.0.2", "[::ffff:10.0.0.2]:8998", "prefill-1", "PREFILL-1.svc:1", "[::1]"])
def test_a_forbidden_address_fails_out_of_the_next_poll_and_costs_nothing(addr):
    pair = make(allowed_hosts=["10.0.0.1", "*.prefill.svc"], max_addresses=1)
    request = add(pair, "forbidden", addr)
    assert (pair.flights, pair.held) == ([], [request])
    failure = (pair.poll() and pair.ends)[request]
    host = failure.addr.rpartition(":")[0]
    assert (failure.kind, failure.http_status, failure.attempts) == ("not_allowed", 403, 0)
    assert failure.reason == f"{failure.addr}: host {host} is not in allowed_hosts"
    assert not any(pair.core.stats()["peers"].values())
    assert add(pair, "allowed") in pair.held
    assert pair.only("topology").addr == A


def test_a_forbidden_address_evicts_nobody():
    pair = make({"max_attempts": 1, "min_wait_s": 0.0}, allowed_hosts=["10.0.0.1"], max_addresses=1)
    add(pair, "a")
    pair.fail(pair.only("topology"))
    pair.poll()
    add(pair, "b", B)
    pair.poll()
    assert pair.core.stats()["evictions"] == 0
    assert pair.core.explain_peer(A)


def test_a_warm_up_transfer_needs_no_entry():
    pair = make(allowed_hosts=["10.0.0.1"])
    assert pair.ends[add(pair, "fake", "2.2.2.2:8998")].fake


def test_a_name_is_asked_where_only_networks_are_listed_and_told_when_it_leads_elsewhere():
    pair = make(allowed_hosts=["10.0.0.0/8"])
    requests = [add(pair, name, "prefill-1") for name in "ab"]
    text = "host prefill-1 resolves to 169.254.169.254, which is not in allowed_hosts"
    pair.fail(pair.only("topology"), "forbidden", text)
    pair.poll()
    assert {pair.ends[request] for request in requests} == {pair.ends[requests[0]]}
    failure = pair.ends[requests[0]]
    assert (failure.kind, failure.http_status, failure.attempts) == ("not_allowed", 403, 1)
    assert failure.reason == f"prefill-1:8998: {text}"
    later = add(pair, "later", "prefill-1")
    pair.poll()
    assert pair.ends[later] == failure, "permanent: at once, until a probe finds it otherwise"
    assert pair.flights == []
    pair.advance(15.0)
    answer_topology(pair, topology())
    assert add(pair, "back", "prefill-1") in pair.held


@pytest.mark.parametrize("kind", ["heartbeat", "topology", "dp_ranks", "endpoint"])
def test_a_peer_that_was_ready_and_now_leads_elsewhere_is_lost(kind):
    pair = make(track_rooms=True)
    body = topology(dp=2, follow=False)
    request = add(pair, "a", room=77)
    answer_topology(pair, body)
    if kind in ("endpoint", "topology"):
        pair.answer(pair.only("dp_ranks"), 200, b'{"77": 1}')
    if kind == "topology":
        answer_endpoints(pair)
    if kind == "heartbeat":
        pair.advance(5.0)
    pair.fail(pair.only(kind), "forbidden", "host p resolves to 10.0.0.9, which is not in allowed_hosts")
    step = pair.poll()
    assert [event.kind for event in step.events] == ["peer_lost"]
    assert pair.ends[request].kind == "not_allowed"
    assert pair.flights == []
    pair.advance(15.0)
    answer_topology(pair, body)
    assert [event.kind for event in pair.poll().events] == ["peer_back"]


# -- spellings


def test_other_spellings_of_a_cached_address_are_routed_at_once():
    pair = make()
    route = make_ready(pair, topology())
    for _ in range(3):
        for spelling in ("10.0.0.1", "10.0.0.1:08998"):
            assert pair.ends[add(pair, spelling, spelling)].endpoints == route.endpoints


def test_a_spelling_of_a_forgotten_address_is_not_mistaken_for_another():
    pair = make(peer_ttl_s=10.0)
    make_ready(pair, topology())
    make_ready(pair, topology(), B, room=2)
    add(pair, "spelled", "10.0.0.1")
    for _ in range(30):
        add(pair, "keeps B", B)
        pair.advance(0.5)
        for flight in list(pair.flights):
            pair.answer(flight, 200, topology())
    request = add(pair, "again", "10.0.0.1")
    assert request in pair.held
    assert pair.only("topology").addr == A


# -- endpoints in answers


@pytest.mark.parametrize("ip", ["10.0.1.1", "::1", "rank-0", "10.0.0.1.evil.example"])
def test_a_forbidden_rank_ip_is_a_failed_look_up_and_in_no_route(ip):
    pair = make({"interval_s": 1.0}, allowed_rank_hosts=["10.0.0.0/24"], endpoint_timeout_s=3.0)
    request = add(pair, "a")
    answer_topology(pair, topology())
    for _ in range(3):
        pair.answer(pair.only("endpoint"), 200, endpoint(ip=ip))
        assert not [flight for flight in pair.flights if flight.kind == "endpoint"], "paced"
        pair.advance(1.0)
    failure = pair.ends[request]
    assert failure.kind == "endpoint_timeout"
    assert f'protocol error: rank_ip "{ip}" is not in allowed_rank_hosts' in failure.reason


@pytest.mark.parametrize("ip", ["10.0.0.9", "::ffff:10.0.0.9", "Rank-0.Prefill.svc"])
def test_an_allowed_rank_ip_comes_as_it_was_sent(ip):
    pair = make(allowed_rank_hosts=["10.0.0.0/24", "*.prefill.svc"])
    request = add(pair, "a")
    answer_topology(pair, topology())
    pair.answer(pair.only("endpoint"), 200, endpoint(ip=ip))
    answer_topology(pair, topology())
    pair.poll()
    assert pair.ends[request].endpoints[0].ip == ip
