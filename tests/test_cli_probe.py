"""`disagg probe`: what it says of registries that are ready, not ready, half there, old or hostile, or not there."""

import json
import os
import signal
import subprocess
import sys

import pytest

import disagg
from disagg.cli.app import run
from disagg.probe.era import era_of
from hostile import TOPOLOGY, answers, response, silent
from polling import until
from registry_client import register, registration, send


@pytest.fixture
def probe(capfd):
    """Run `disagg probe` in this process; returns (status, stdout, stderr)."""

    def call(*arguments):
        status = run(["probe", *map(str, arguments)])
        out, err = capfd.readouterr()
        return status, out, err

    return call


@pytest.fixture
def seen(probe):
    """The JSON object, beside the status."""

    def call(*arguments):
        status, out, err = probe(*arguments, "--json")
        assert err == ""
        return status, json.loads(out)

    return call


def answering(answer):
    """A peer that answers each request with what `answer(request line)` gives."""

    async def serve(connection):
        while request := await connection.request():
            await connection.send(answer(request[0].decode()))

    return serve


def prefill(*, topology=TOPOLOGY, rank=lambda line: b'{"rank_ip":"10.0.0.1","rank_port":7}', rooms=b"{}"):
    """A registry whose ranks answer as `rank` says, None for 404."""

    def answer(line):
        if line.startswith("POST"):
            return response(body=rooms) if isinstance(rooms, bytes) else response(rooms, b"")
        if "target_tp_rank=-1" in line:
            return response(body=topology)
        body = rank(line)
        return response("404 Not Found", b"") if body is None else response(body=body)

    return answering(answer)


class TestReady:
    def test_everything_is_asked_and_said(self, probe, seen):
        with disagg.BootstrapServer() as server:
            register(server.address, 4)
            status, out, err = probe(server.url, "--decode", "tp=8")
            assert (status, err) == (0, "")
            first, *facts = out.splitlines()
            assert first == f"{server.address} is ready"
            text = " ".join(" ".join(facts).split())
            assert "topology dp 1 x cp 1 x tp 4 x pp 1 = 4 ranks" in text
            assert "endpoints 4 of 4 known, on 10.0.0.1" in text
            assert "decode engine fits" in text
            assert "median of 6 questions" in text
            assert "warning: decode tp 8, prefill tp 4" in text
            status, document = seen(server.address)
        assert (status, document["state"], document["reason"], document["fits"]) == (0, "ready", None, None)
        assert document["topology"]["attn_tp_size"] == 4
        assert document["endpoints"] == {
            "count": 4, "asked": 4, "known": 4, "missing": [], "missing_count": 0, "hosts": ["10.0.0.1"],
        }  # fmt: skip
        assert document["instance"]
        assert (document["epoch"], document["answers_ms"]["count"]) == ("1", 6)

    def test_a_decode_engine_that_does_not_fit_is_status_1_with_every_reason(self, seen, probe):
        with disagg.BootstrapServer() as server:
            register(server.address, 4)
            status, document = seen(server.address, "--decode", "tp=3,page_size=16")
            assert (status, document["state"], document["fits"]) == (1, "incompatible", False)
            assert {reason["kind"] for reason in document["reasons"]} >= {"page_size"}
            assert len(document["reasons"]) == 2
            _, out, _ = probe(server.address, "--decode", "tp=3,page_size=16")
            assert "does not fit: 2 reasons" in out

    def test_at_most_as_many_ranks_are_asked_for_as_wanted(self, seen):
        with disagg.BootstrapServer() as server:
            register(server.address, 4)
            for count in (0, 3):
                _, document = seen(server.address, "--ranks", count)
                assert (document["state"], document["endpoints"]["asked"]) == ("ready", count)

    def test_the_older_form_is_spoken_to_old_registries(self, seen, host):
        old = (
            b'{"prefill_attn_tp_size": 2, "prefill_dp_size": 2, "prefill_pp_size": 1, "prefill_page_size": 64,'
            b' "follow_bootstrap_room": false}'
        )

        def answer(line):
            if "engine_rank=-1" in line:
                return response(body=old)
            if "engine_rank=" in line:
                return response(body=b'{"rank_ip":"10.0.0.1","rank_port":%d}' % len(line))
            return response("400 Bad Request", b"")

        status, document = seen(host.peer(answering(answer)).addr)
        assert (status, document["era"], document["dp_rank_query"]) == (0, "E2", None)
        assert document["endpoints"]["known"] == 4


class TestNotReady:
    def test_ranks_that_are_missing_are_named(self, probe):
        with disagg.BootstrapServer() as server:
            status, out, _ = probe(server.address)
            assert (status, out.splitlines()[0]) == (
                1,
                f"{server.address} is not ready: it answered 503, no rank has registered",
            )
            send(server.address, "PUT", "/route", registration(4, 2))
            status, out, _ = probe(server.address)
        assert status == 1
        assert "waiting for tp0 and 2 more" in out

    def test_a_registry_that_counts_twice_says_it_is_ready_and_lacks_ranks(self, seen, host):
        """A6-02: upstream counts PUTs, so that one rank that registers four times makes an engine of four "ready"."""
        peer = host.peer(
            prefill(rank=lambda line: b'{"rank_ip":"10.0.0.1","rank_port":7}' if "tp_rank=0" in line else None)
        )
        status, document = seen(peer.addr)
        assert (status, document["state"]) == (1, "incomplete")
        assert document["reason"] == ("says it is ready, but has no dp0/cp0/tp1/pp0, dp0/cp0/tp2/pp0, dp0/cp0/tp3/pp0")
        assert document["endpoints"]["missing_count"] == 3

    @pytest.mark.parametrize(
        ("reply", "state", "words"),
        [
            (response("401 Unauthorized", b""), "unauthorized", "wants a token"),
            (response("404 Not Found", b""), "not_a_registry", "no bootstrap registry there?"),
            (response("302 Found", b"", "Location: http://127.0.0.1:1/"), "not_a_registry", "answered 302"),
            (response("503 Busy", b""), "not_ready", "not all prefill ranks"),
            (response(body=b"<html>"), "protocol_error", "bad topology"),
            (response(body=b"[" * 5000), "protocol_error", "bad topology"),
            (response(body=TOPOLOGY.replace(b'"attn_tp_size":4', b'"attn_tp_size":null')), "not_ready", "null sizes"),
            (response(body=TOPOLOGY.replace(b'"auto"', b'"\\u001b[2J"')), "incomplete", "bad endpoint"),
        ],
        ids=["401", "404", "302", "503", "html", "deep", "null", "control characters"],
    )
    def test_whatever_answers_is_named(self, probe, seen, host, reply, state, words):
        peer = host.peer(answers(reply))
        status, document = seen(peer.addr)
        assert (status, document["state"]) == (1, state)
        assert words in document["reason"]
        status, out, err = probe(peer.addr)
        assert (status, err) == (1, "")
        assert words in " ".join(out.split())
        assert "\x1b" not in out


class TestUnreachable:
    def test_nobody_there_is_status_2(self, probe, seen):
        status, out, err = probe("127.0.0.1:1")
        assert (status, err) == (2, "")
        assert out == "127.0.0.1:1 is unreachable: connection refused (ECONNREFUSED)\n"
        status, document = seen("127.0.0.1:1")
        assert (status, document["state"], document["answers_ms"]) == (2, "unreachable", None)

    def test_a_silent_one_is_given_up_after_the_timeout(self, probe, host):
        status, out, _ = probe(host.peer(silent()).addr, "--timeout-s", "0.2")
        assert status == 2
        assert "no complete answer within 0.2 s" in out

    def test_one_that_falls_silent_half_way_is_said_to(self, seen, host):
        async def serve(connection):
            while request := await connection.request():
                if b"target_tp_rank=-1" not in request[0]:
                    return
                await connection.send(response(body=TOPOLOGY))

        status, document = seen(host.peer(serve).addr)
        assert (status, document["state"]) == (1, "incomplete")
        assert document["reason"].startswith("no answer for rank dp0/cp0/tp0/pp0: ")
        assert document["dp_rank_query"].startswith("was not answered (")


class TestWarnings:
    def test_an_endpoint_that_leads_nowhere_from_elsewhere(self, seen, host):
        """A6-17: a rank that advertises a wildcard is dialled by each decode at itself."""
        ips = iter(["0.0.0.0", "10.0.0.1", "::", "10.0.0.2"])
        peer = host.peer(prefill(rank=lambda line: b'{"rank_ip":"%s","rank_port":7}' % next(ips).encode()))
        _, document = seen(peer.addr)
        assert document["warnings"] == [], "the registry itself is on loopback: all of it may be"
        from disagg.probe.look import Endpoints, Look, RankAt

        look = Look("10.0.0.9:8998", endpoints=Endpoints(2, 2, [RankAt("dp0/cp0/tp0/pp0", "0.0.0.0", 7)]))
        assert look.warnings() == ["rank dp0/cp0/tp0/pp0 advertises 0.0.0.0, which leads nowhere from another host"]

    def test_ranks_on_one_endpoint(self, seen, host):
        _, document = seen(host.peer(prefill()).addr)
        assert document["warnings"] == [
            "ranks dp0/cp0/tp0/pp0 and dp0/cp0/tp1/pp0 advertise the same endpoint, 10.0.0.1 port 7"
        ]

    def test_two_registries_behind_one_address(self, seen, host):
        instances = iter("abcdefgh")

        def answer(line):
            body = TOPOLOGY if "tp_rank=-1" in line else b'{"rank_ip":"10.0.0.1","rank_port":%d}' % len(line)
            header = f"X-SGLang-Disaggregation-Instance-ID: {next(instances)}"
            return response("200 OK", b"{}" if line.startswith("POST") else body, header)

        _, document = seen(host.peer(answering(answer)).addr, "--ranks", "0")
        assert document["warnings"] == [
            "instance or epoch changed while it was asked: it restarts, or several answer at this address"
        ]

    @pytest.mark.parametrize(
        ("rooms", "says"), [("405 Not Allowed", "was answered 405"), (b"[]", "was answered badly")]
    )
    def test_dp_ranks_that_only_a_broken_query_knows(self, seen, host, rooms, says):
        needs_it = TOPOLOGY.replace(b'"dp_size":1', b'"dp_size":2').replace(b'room":true', b'room":false')
        _, document = seen(host.peer(prefill(topology=needs_it, rooms=rooms)).addr, "--ranks", "0")
        (warning,) = document["warnings"]
        assert says in warning
        _, document = seen(host.peer(prefill(rooms=rooms)).addr, "--ranks", "0")
        assert document["warnings"] == [], "with one dp rank nobody asks"


class TestWatch:
    def test_a_look_is_printed_when_something_changed(self):
        with disagg.BootstrapServer() as server:
            command = [sys.executable, "-m", "disagg.cli", "probe", server.address, "--watch", "--interval-s", "0.05"]
            watching = subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, text=True)
            try:
                assert json.loads(watching.stdout.readline())["state"] == "not_ready"
                register(server.address, 2)
                states = []
                while not states or states[-1] != "ready":
                    states.append(json.loads(watching.stdout.readline())["state"])
                server.close()
                assert json.loads(watching.stdout.readline())["state"] == "unreachable"
                watching.send_signal(signal.SIGINT)
                assert watching.wait(10) == 130
            finally:
                watching.kill()
                watching.communicate()

    def test_looks_that_show_the_same_are_not_printed_again(self, probe, host):
        peer = host.peer(prefill())
        status, out, _ = probe(peer.addr, "--watch", "--interval-s", "0.01", "--looks", "3")
        assert (status, out.count("is ready")) == (0, 1)
        until(lambda: peer.requests == 18)


class TestUse:
    def test_the_token_goes_out_and_nowhere_else(self, probe, host, tmp_path, monkeypatch):
        heads = []

        async def serve(connection):
            while request := await connection.request():
                heads.append(b"".join(request))
                await connection.send(response("401 Unauthorized", b""))

        (tmp_path / "token").write_text("s3cret\n")
        monkeypatch.setenv("DISAGG_TOKEN_FILE", str(tmp_path / "token"))
        _, out, err = probe(host.peer(serve).addr)
        assert b"Bearer s3cret" in heads[0]
        assert "s3cret" not in out + err

    @pytest.mark.parametrize("content", [b"", b"\n", b"two words", b"\xff", b"x" * 4097])
    def test_a_file_without_a_token_is_refused(self, probe, tmp_path, content):
        (tmp_path / "token").write_bytes(content)
        status, out, err = probe("127.0.0.1:1", "--token-file", tmp_path / "token")
        assert (status, out) == (2, "")
        assert "must hold one token" in err

    @pytest.mark.parametrize(
        ("arguments", "line"),
        [
            (("x y",), "ADDRESS x y: "),
            (("127.0.0.1:1", "--timeout-s", "0"), "--timeout-s 0: must be from 0.01 to 600 seconds"),
            (("127.0.0.1:1", "--interval-s", "nan"), "--interval-s nan: must be from 0.01 to 600 seconds"),
            (("127.0.0.1:1", "--ranks", "-1"), "--ranks -1: must be from 0 to"),
            (("127.0.0.1:1", "--looks", "2"), "--looks 2: needs --watch"),
            (("127.0.0.1:1", "--decode", "pp=2"), "--decode pp=2: has no tp"),
            (("127.0.0.1:1", "--kv", "gqa"), "--kv gqa: must be one of"),
            (("127.0.0.1:1", "--token-file", "/nowhere/token"), "--token-file /nowhere/token: no such file"),
        ],
    )
    def test_wrong_use_is_one_line(self, probe, arguments, line):
        status, out, err = probe(*arguments)
        assert (status, out) == (2, "")
        assert err.startswith(f"disagg probe: {line}")
        assert err.count("\n") == 1

    def test_nothing_is_left_open(self, probe):
        probe("127.0.0.1:1")
        before = len(os.listdir("/proc/self/fd"))
        probe("127.0.0.1:1")
        assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("key", "era"),
    [
        ("page_size", "E3"), ("target_tp_ranks", "E4"), ("prefill_http_port", "E5"), ("dsv41_spec_layout", "E6"),
        ("kv_layout", "E7"),
    ],
)  # fmt: skip
def test_the_newest_key_tells_the_era(key, era):
    assert era_of(json.dumps({"attn_tp_size": 1, key: None}).encode(), is_old=False).name == era
