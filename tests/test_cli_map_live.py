"""`disagg map --prefill ADDRESS`: live registries, ready or not, and what answers in their place."""

import gc
import os
import threading

import pytest

import disagg
from disagg.transport.asker import Asker, NoAnswer
from hostile import TOPOLOGY, answers, response, silent
from map_command import described
from registry_client import register, send


def test_the_names_of_peers_cannot_break_out_of_the_text(map_engines, host):
    peer = host.peer(answers(response(body=TOPOLOGY.replace(b'"auto"', b'"\\u001b[2Jx\\ny"'))))
    status, out, _ = map_engines("--decode", "tp=4,dtype=auto,strict_dtype=yes", "--prefill", peer.addr)
    assert status == 1
    assert "\x1b" not in out
    assert "x\ny" not in out


class TestLiveRegistry:
    """`--prefill ADDRESS`."""

    def test_a_ready_registry_is_asked_for_sizes_and_room(self, map_engines):
        with disagg.BootstrapServer() as server:
            register(server.address, 4, load_balance_method="round_robin", system_dp_size=2)
            register(server.address, 4, load_balance_method="round_robin", system_dp_size=2, system_dp_rank=1)
            send(server.address, "POST", "/register_dp_rank", '{"bootstrap_room": 6, "dp_rank": 1}')
            for text in (server.url, server.url + "/", server.address):
                status, out, err = map_engines("--decode", "tp=8", "--prefill", text, "--room", "6")
                assert (status, err) == (0, "")
                assert "prefill dp 2 x cp 1 x tp 4 x pp 1 = 8 ranks" in out
                assert "room 6 is at dp rank 1 (the registry's answer)" in out
            assert (
                "room 8: dp rank not known (the registry does not know it yet)"
                in (map_engines("--decode", "tp=8", "--prefill", server.url, "--room", "8")[1])
            )
            document = described(map_engines, "--decode", "tp=8,page_size=16", "--prefill", server.url, status=1)
            assert document["prefill"]["address"] == server.address
            assert [reason["kind"] for reason in document["reasons"]] == ["page_size", "unequal_tp"]

    def test_a_registry_that_is_not_ready_is_status_1(self, map_engines):
        with disagg.BootstrapServer() as server:
            status, out, err = map_engines("--decode", "tp=8", "--prefill", server.address)
        assert (status, out) == (1, "")
        assert err == (f"disagg map: {server.address} is not ready: it answered 503, no rank has registered\n")

    def test_a_registry_that_nobody_runs_is_status_2(self, map_engines):
        status, out, err = map_engines("--decode", "tp=8", "--prefill", "127.0.0.1:1")
        assert (status, out) == (2, "")
        assert err.startswith("disagg map: 127.0.0.1:1 not reached in 1 attempt: connection refused")

    def test_a_silent_one_is_given_up_after_the_timeout(self, map_engines, host):
        peer = host.peer(silent())
        status, _, err = map_engines("--decode", "tp=8", "--prefill", peer.addr, "--timeout-s", "0.2")
        assert (status, peer.connections) == (2, 1)
        assert "no complete answer within 0.2 s" in err

    @pytest.mark.parametrize(
        ("body", "status", "line"),
        [
            (b"<html>", "200 OK", "answered with a bad topology: body"),
            (TOPOLOGY.replace(b'"attn_tp_size":4', b'"attn_tp_size":0'), "200 OK", "bad topology: attn_tp_size 0"),
            (TOPOLOGY.replace(b'"attn_tp_size":4', b'"attn_tp_size":null'), "200 OK", "is not ready"),
            (b"nothing here", "404 Not Found", "answered 404 to the topology query: no bootstrap registry there?"),
            (b"", "302 Found", "answered 302 to the topology query"),
        ],
    )
    def test_an_answer_that_is_no_topology_is_status_1(self, map_engines, host, body, status, line):
        peer = host.peer(answers(response(status, body)))
        ended, out, err = map_engines("--decode", "tp=8", "--prefill", peer.addr)
        assert (ended, out) == (1, "")
        assert line in err
        assert err.count("\n") == 1

    def test_the_older_form_is_asked_where_the_newer_is_not_understood(self, map_engines, host):
        old = (
            b'{"prefill_attn_tp_size": 2, "prefill_dp_size": 4, "prefill_pp_size": 1, "prefill_page_size": 64,'
            b' "follow_bootstrap_room": false}'
        )

        async def era_2(connection):
            while request := await connection.request():
                known = b"engine_rank=-1" in request[0]
                status, body = (b"200 OK", old) if known else (b"400 Bad Request", b"")
                await connection.send(b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body))

        peer = host.peer(era_2)
        status, out, _ = map_engines("--decode", "tp=2", "--prefill", peer.addr, "--room", "7")
        assert (status, peer.requests) == (0, 2)
        assert "prefill dp 4 x cp 1 x tp 2 x pp 1" in out
        assert "room 7 is at dp rank 3 (room modulo dp size 4)" in out

    @pytest.mark.parametrize(
        ("reply", "why"),
        [
            (response(body=b'{"5": -1}'), "a bad answer to the dp-rank query: 5 -1: must be"),
            (response(body=b"[]"), "a bad answer to the dp-rank query: body []: must be a json object"),
            (response(body=b'{"5": 4}'), "the registry says 4, which is not below dp size 4"),
            (response("503 Busy", b""), "the registry answered 503 to the dp-rank query"),
            (b"SSH-2.0\r\n", "no answer to the dp-rank query: "),
        ],
    )
    def test_a_bad_answer_about_the_room_does_not_withhold_the_map(self, map_engines, host, reply, why):
        asks = TOPOLOGY.replace(b'"dp_size":1', b'"dp_size":4').replace(b'room":true', b'room":false')

        async def registry(connection):
            while request := await connection.request():
                await connection.send(reply if request[0].startswith(b"POST") else response(body=asks))

        status, out, err = map_engines("--decode", "tp=4", "--prefill", host.peer(registry).addr, "--room", "5")
        assert (status, err) == (0, "")
        assert f"room 5: dp rank not known ({why}" in " ".join(out.split())
        assert "what each prefill rank of one dp group serves" in out

    def test_nothing_is_left_running(self, map_engines):
        before, open_files = threading.active_count(), os.listdir("/proc/self/fd")
        map_engines("--decode", "tp=8", "--prefill", "127.0.0.1:1")
        gc.collect()
        assert threading.active_count() == before
        assert len(os.listdir("/proc/self/fd")) == len(open_files)


def test_a_question_after_the_transport_s_end_is_answered_at_once():
    asker = Asker(timeout_s=5)
    with asker:
        asker.fail_all("it broke")  # as the transport says it, while a question waits
        with pytest.raises(NoAnswer, match="it broke"):
            asker.ask("127.0.0.1:1", "/route")
        asker._transport.stop()
        with pytest.raises(NoAnswer, match="the transport does not run"):
            asker.ask("127.0.0.1:1", "/route")
