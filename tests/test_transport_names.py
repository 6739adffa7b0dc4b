"""Which addresses are dialled: what names resolve to is checked, looked up once, and dialled as it was checked."""

from __future__ import annotations

import asyncio
import logging
import pickle
import socket
import threading
import time

import pytest

import disagg
from disagg.transport import names
from disagg.transport.secret import Secret
from fake_machine import running
from hostile import answers
from machines import Request
from polling import poll_until
from registry_client import register

DECODE = disagg.DecodeRank(attn_tp_size=1, engine_rank=0, page_size=64)
QUICK = disagg.RetryPolicy(max_attempts=2, interval_s=0.1, min_wait_s=0.0)


class NameServer:
    """Stands for `getaddrinfo`: what it was asked, and what it says."""

    def __init__(self):
        self.says = {}
        self.asked = []
        self.hung = threading.Event()
        self.real = socket.getaddrinfo

    def __call__(self, host, port, *rest, **options):
        if host[0].isdigit():  # the test's own client
            return self.real(host, port, *rest, **options)
        self.asked.append(host)
        if host.startswith("hangs"):
            self.hung.wait(20)
            raise socket.gaierror(socket.EAI_AGAIN, "too late")
        ips = self.says[host]
        if callable(ips):
            ips = ips()
        return [
            (socket.AF_INET6, socket.SOCK_STREAM, 6, "", (ip, 0, 0, 0))
            if ":" in ip
            else (socket.AF_INET, socket.SOCK_STREAM, 6, "", (ip, 0))
            for ip in ips
        ]


@pytest.fixture
def server(monkeypatch):
    server = NameServer()
    monkeypatch.setattr(names.socket, "getaddrinfo", server)
    yield server
    server.hung.set()


def port_of(peer):
    return peer.addr.rpartition(":")[2]


def loopback(ip):
    return ip.startswith("127.")


def test_a_name_that_resolves_to_a_forbidden_address_is_not_dialled(host, server):
    peer = host.peer(answers())
    server.says = {"p": ["127.0.0.1"], "mixed": ["127.0.0.2", "127.0.0.1"]}
    with running(allows_resolved=lambda ip: ip == "127.0.0.2") as (machine, _):
        for name in ("p", "mixed"):
            fact = machine.fetch(f"{name}:{port_of(peer)}")
            text = f"host {name} resolves to 127.0.0.1, which is not in allowed_hosts"
            assert (fact.what, fact.message) == ("forbidden", text)
    assert peer.connections == 0


def test_the_address_that_was_checked_is_the_one_that_is_dialled(host, server):
    """DNS rebinding: a second look-up would lead elsewhere."""
    checked = host.peer(answers())
    other = host.peer(answers(), host="127.0.0.2", port=int(port_of(checked)))
    turns = iter([["127.0.0.1"], ["127.0.0.2"], ["127.0.0.2"]])
    server.says = {"rebinds": lambda: next(turns)}
    seen = []
    with running(allows_resolved=lambda ip: seen.append(ip) or ip == "127.0.0.1") as (machine, _):
        assert machine.fetch(f"rebinds:{port_of(checked)}").status == 200
        assert machine.fetch(f"rebinds:{port_of(checked)}", kind="heartbeat").status == 200
    assert (server.asked, set(seen)) == (["rebinds"], {"127.0.0.1"})
    assert (checked.connections, other.connections) == (2, 0)


def test_what_a_name_resolves_to_is_checked_again_after_its_time(host, server, monkeypatch):
    monkeypatch.setattr(names, "TTL_S", 0.05)
    peer = host.peer(answers())
    turns = iter([["127.0.0.1"], ["169.254.169.254"]])
    server.says = {"p": lambda: next(turns)}
    with running(allows_resolved=loopback) as (machine, _):
        assert machine.fetch(f"p:{port_of(peer)}", kind="heartbeat").status == 200
        time.sleep(0.1)
        assert machine.fetch(f"p:{port_of(peer)}", kind="heartbeat").what == "forbidden"


def test_a_name_is_looked_up_once_for_all_that_ask_meanwhile_and_for_all_ports(host, server):
    peers = [host.peer(answers()) for _ in range(4)]
    gate = threading.Event()
    server.says = {"p": lambda: gate.wait(5) and ["127.0.0.1"]}
    with running() as (machine, _):
        tickets = [machine.ask(f"p:{port_of(peer)}", kind=kind) for peer in peers for kind in ("topology", "heartbeat")]
        time.sleep(0.2)
        gate.set()
        assert {machine.wait(ticket).status for ticket in tickets} == {200}
        assert machine.fetch(f"p:{port_of(peers[0])}", kind="heartbeat").status == 200
    assert server.asked == ["p"]


def test_a_failed_look_up_is_not_remembered(host, server):
    peer = host.peer(answers())

    def unknown():
        server.says["p"] = ["127.0.0.1"]
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    server.says = {"p": unknown}
    with running() as (machine, _):
        assert machine.fetch(f"p:{port_of(peer)}").what == "dns"
        assert machine.fetch(f"p:{port_of(peer)}").status == 200


def test_64_names_whose_look_up_hangs_delay_no_other_and_hold_one_thread_each(host, server):
    peer = host.peer(answers())
    server.says = {"p": ["127.0.0.1"]}
    with running(connect_timeout_s=0.3) as (machine, _):
        for _ in range(3):
            tickets = [machine.ask(f"hangs-{number}:1") for number in range(64)]
            assert machine.fetch(f"p:{port_of(peer)}", kind="heartbeat").status == 200
            facts = [machine.wait(ticket) for ticket in tickets]
            assert {(fact.what, fact.message) for fact in facts} == {("timeout", "no connection within 0.3 s")}
        assert server.asked.count("p") == 1
        assert len(server.asked) == 65
        server.says["q"] = ["127.0.0.1"]
        began = time.monotonic()
        assert machine.fetch(f"q:{port_of(peer)}").status == 200
        assert time.monotonic() - began < 0.3


def test_a_look_up_that_waited_for_a_thread_is_made_if_somebody_still_wants_it(server):
    server.says = {"p": ["127.0.0.1"]}

    async def main():
        resolver = names.Names(max_wait_s=0.2, max_threads=1)
        hanging = asyncio.create_task(resolver.resolve("hangs", 1))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(resolver.resolve("p", 1), 0.2)
        await asyncio.sleep(0.2)
        again = asyncio.create_task(resolver.resolve("p", 1))
        await asyncio.sleep(0)
        server.hung.set()
        found = await again
        with pytest.raises(socket.gaierror):
            await hanging
        await resolver.close()
        return found

    assert asyncio.run(main()) == [(socket.AF_INET, ("127.0.0.1", 1))]


def test_what_is_remembered_is_bounded(server):
    async def main():
        resolver = names.Names(max_wait_s=5.0)
        for number in range(names.MAX_KNOWN + 10):
            server.says[f"p{number}"] = ["127.0.0.1"]
            await resolver.resolve(f"p{number}", 1)
        known, asking = len(resolver._known), len(resolver._asking)
        await resolver.close()
        return known, asking

    assert asyncio.run(main()) == (names.MAX_KNOWN, 0)


# -- through a Resolver


def end_of(resolver, addr):
    request = Request(addr)
    assert resolver.add(request, addr, 1) is None
    return poll_until(resolver, 1)[request]


def test_what_is_forbidden_before_a_look_up_is_neither_looked_up_nor_sent_to(host, server):
    peer = host.peer(answers())
    with disagg.Resolver(DECODE, QUICK, allowed_hosts=["p", "10.0.0.0/8"]) as resolver:
        for addr in (peer.addr, f"q:{port_of(peer)}", f"localhost:{port_of(peer)}"):
            failure = end_of(resolver, addr)
            assert (failure.kind, failure.http_status) == ("not_allowed", 403)
        assert not any(resolver.stats()["http"].values())
    assert (server.asked, peer.connections) == ([], 0)


@pytest.mark.parametrize("hosts", [["p", "10.0.0.0/8"], ["10.0.0.0/8"]])
def test_a_request_to_a_name_that_leads_to_a_forbidden_address_is_not_allowed(host, server, hosts):
    peer = host.peer(answers())
    server.says = {"p": ["127.0.0.1"]}
    with disagg.Resolver(DECODE, QUICK, allowed_hosts=hosts) as resolver:
        failure = end_of(resolver, f"P:{port_of(peer)}")
    assert (failure.kind, failure.http_status) == ("not_allowed", 403)
    text = f"p:{port_of(peer)}: host p resolves to 127.0.0.1, which is not in allowed_hosts"
    assert failure.reason == text
    assert peer.connections == 0


@pytest.mark.parametrize("hosts", [["p"], ["*.P.", "p", "127.0.0.0/8"], ["127.0.0.1"]])
def test_a_name_that_leads_to_an_allowed_address_is_routed(server, hosts):
    server.says = {"p": ["127.0.0.1"]}
    with disagg.BootstrapServer() as registry, disagg.Resolver(DECODE, QUICK, allowed_hosts=hosts) as resolver:
        register(registry.address)
        assert isinstance(end_of(resolver, registry.address.replace("127.0.0.1", "p")), disagg.Route)


# -- the token

TOKEN = "s3cr3t-token"
SHORT = {"endpoint_timeout_s": 0.5, "heartbeat_interval_s": 0.1}


def test_the_token_is_sent_to_peers_with_every_request_and_shown_nowhere(host, caplog):
    caplog.set_level(logging.DEBUG)
    peer = host.peer(answers())
    with disagg.Resolver(DECODE, QUICK, allowed_hosts=["127.0.0.1"], token=TOKEN, **SHORT) as resolver:
        failure = end_of(resolver, peer.addr)
        shown = [repr(resolver), repr(vars(resolver)), repr(resolver._transport._options), str(failure), caplog.text]
        with pytest.raises(TypeError, match="pickle"):
            pickle.dumps(resolver._transport._options)
    assert peer.heads
    assert all(f"authorization: bearer {TOKEN}\r\n".encode() in head.lower() for head in peer.heads)
    assert not [text for text in shown if TOKEN in text]


@pytest.mark.parametrize("kind", ["topology", "heartbeat"])
def test_both_pools_send_the_token(host, kind):
    peer = host.peer(answers())
    with running(token=Secret(TOKEN)) as (machine, _):
        assert machine.fetch(peer.addr, kind=kind).status == 200
    assert f"authorization: bearer {TOKEN}\r\n".encode() in peer.heads[0].lower()


def test_no_token_no_header(host):
    peer = host.peer(answers())
    with disagg.Resolver(DECODE, QUICK, allowed_hosts=["127.0.0.1"], **SHORT) as resolver:
        end_of(resolver, peer.addr)
    assert peer.heads
    assert not [head for head in peer.heads if b"authorization" in head.lower()]


@pytest.mark.parametrize("token", ["", "a\nb", "a\rX-Injected: 1", "é", "a b", "a\x7f", "\x00"])
def test_a_token_that_cannot_be_sent_is_a_config_error_that_does_not_show_it(token):
    with pytest.raises(disagg.ConfigError) as error:
        disagg.Resolver(DECODE, allowed_hosts=["p"], token=token)
    assert str(error.value) == "token: must be one or more visible ASCII characters"


def test_a_token_without_allowed_hosts_is_a_config_error():
    with pytest.raises(disagg.ConfigError, match=r"^token: needs allowed_hosts") as error:
        disagg.Resolver(DECODE, token=TOKEN)
    assert TOKEN not in repr(error.value)


def test_a_token_of_another_type_is_not_shown_either():
    with pytest.raises(TypeError, match=r"^token must be a str or None, not bytes$"):
        disagg.Resolver(DECODE, allowed_hosts=["p"], token=TOKEN.encode())


def test_a_secret_neither_shows_itself_nor_pickles():
    secret = Secret(TOKEN)
    assert (repr(secret), str(secret), f"{secret}", secret.reveal()) == (*["Secret(...)"] * 3, TOKEN)
    with pytest.raises(TypeError, match="cannot pickle Secret"):
        pickle.dumps(secret)
