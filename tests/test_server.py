"""The registry as Python sees it: what upstream's server answered, and what ours promises beyond."""

import contextlib
import itertools
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

import disagg
from registry_client import TOPOLOGY, rank_path, register, registration, send
from wire_exceptions import KEYS_NEWER_THAN_E4, OTHERWISE, TOPOLOGY_OF_E4, TOPOLOGY_VALUES

INSTANCE = "X-SGLang-Disaggregation-Instance-ID"
EPOCH = "X-Disagg-Epoch"


@pytest.fixture
def server():
    with disagg.BootstrapServer() as server:
        yield server


class TestAsRecorded:
    """Every recorded request again, in order, a fresh server for each scenario."""

    def scenarios(self, shared):
        lines = map(json.loads, (shared / "data" / "wire_sample.jsonl").read_text().splitlines())
        return [(name, list(group)) for name, group in itertools.groupby(lines, key=lambda line: line["scenario"])]

    def test_every_line_is_answered_as_recorded_or_as_the_table_says(self, shared):
        seen = set()
        for name, lines in self.scenarios(shared):
            with disagg.BootstrapServer() as server:
                for line in lines:
                    key = (name, line["n"])
                    seen.add(key)
                    self.check(server.address, key, line["req"], line["res"])
        assert len(seen) == 165
        assert set(OTHERWISE) | TOPOLOGY_OF_E4 <= seen, "an exception for a line that there is not"

    def check(self, address, key, request, recorded):
        answer = send(address, request["method"], request["path"], request.get("body"))
        assert answer.headers[INSTANCE], key
        assert answer.headers[EPOCH], key
        expected_status, expected = recorded["status"], self.parsed(recorded["body"])
        if key in OTHERWISE:
            expected_status, expected = OTHERWISE[key].status, OTHERWISE[key].value
            assert (answer.status, answer.value if answer.status < 300 else None) != (
                recorded["status"],
                self.parsed(recorded["body"]),
            ), f"{key} needs no exception"
        assert answer.status == expected_status, key
        if key in TOPOLOGY_OF_E4:
            expected |= TOPOLOGY_VALUES.get(key, ({},))[0]
            assert send(address, "GET", TOPOLOGY, headers={"X-Disagg-Client": "1"}).json() == expected, key
            expected = {field: value for field, value in expected.items() if field not in KEYS_NEWER_THAN_E4}
        if answer.status < 300:
            assert answer.value == expected, key
            assert answer.media_type == recorded["ctype"].partition(";")[0], key
        elif request["method"] != "HEAD":
            assert set(answer.json()) >= {"error", "field"}, key
        if recorded.get("allow"):
            assert answer.headers["Allow"] == recorded["allow"], key

    @staticmethod
    def parsed(body):
        try:
            return json.loads(body)
        except ValueError:
            return body


class TestConstructor:
    def test_it_listens_when_it_returns(self):
        for _ in range(20):
            with disagg.BootstrapServer() as server:
                socket.create_connection(("127.0.0.1", server.port), timeout=1).close()

    def test_address_url_and_port_name_one_place(self, server):
        assert server.address == f"127.0.0.1:{server.port}"
        assert server.url == f"http://{server.address}"
        assert server.port > 0

    @pytest.mark.parametrize("host", ["::1", "[::1]"])
    def test_ipv6(self, host):
        try:
            server = disagg.BootstrapServer(host)
        except OSError as error:
            pytest.skip(f"no IPv6 here: {error}")
        with server:
            assert server.address == f"[::1]:{server.port}"
            assert send(server.address, "GET", "/health").body == b"OK"

    def test_a_taken_port_is_an_os_error(self, server):
        with pytest.raises(OSError, match=rf'can\'t listen on host "127.0.0.1" port {server.port}') as caught:
            disagg.BootstrapServer(port=server.port)
        assert isinstance(caught.value.errno, int)

    def test_a_host_without_an_address_is_an_os_error(self):
        with pytest.raises(OSError, match="no-such-host"):
            disagg.BootstrapServer("no-such-host.invalid")

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"port": 65_536}, "port is 65536: out of range"),
            ({"port": -1}, "port is -1: out of range"),
            ({"room_ttl_s": 0.0}, "room ttl is 0: must be above 0"),
            ({"room_ttl_s": -1.0}, "room_ttl_s is -1: must be seconds, at least 0"),
            ({"room_ttl_s": float("nan")}, "room_ttl_s is NaN: must be seconds, at least 0"),
            ({"room_cap": 0}, "room cap is 0: must be at least 1"),
            ({"room_cap": -1}, "room_cap is -1: out of range"),
        ],
    )
    def test_bad_options_are_value_errors(self, options, message):
        with pytest.raises(ValueError, match=message):
            disagg.BootstrapServer(**options)

    def test_options_are_keywords(self):
        with pytest.raises(TypeError):
            disagg.BootstrapServer("127.0.0.1", 0, True)

    def test_it_does_not_pickle(self, server):
        with pytest.raises(TypeError, match="cannot pickle a BootstrapServer"):
            pickle.dumps(server)


class TestClose:
    def test_it_frees_the_port_and_is_idempotent(self):
        server = disagg.BootstrapServer()
        server.close()
        server.close(timeout_s=0)
        assert repr(server) == f"<BootstrapServer {server.address} closed>"
        with disagg.BootstrapServer(port=server.port) as again:
            assert repr(again) == f"<BootstrapServer {server.address} listening>"
            assert send(again.address, "GET", "/health").status == 200
        with pytest.raises(ConnectionRefusedError):
            send(server.address, "GET", "/health")

    def test_idle_connections_do_not_hold_it_up(self, server):
        with contextlib.ExitStack() as stack:
            for _ in range(20):
                stack.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            started = time.monotonic()
            server.close(timeout_s=10)
            assert time.monotonic() - started < 5

    def test_a_bad_timeout_is_a_value_error_and_closes_nothing(self, server):
        with pytest.raises(ValueError, match="timeout_s is -1"):
            server.close(timeout_s=-1)
        assert send(server.address, "GET", "/health").status == 200

    def test_an_unused_server_goes_with_its_last_reference(self):
        server = disagg.BootstrapServer()
        port = server.port
        del server
        disagg.BootstrapServer(port=port).close()

    def test_many_threads_may_close_one_server(self, server):
        threads = [threading.Thread(target=server.close) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()

    def test_a_process_ends_with_its_server_open(self):
        program = "import disagg; server = disagg.BootstrapServer(); print(server.port)"
        done = subprocess.run([sys.executable, "-c", program], timeout=30, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
class TestFork:
    def in_child(self, work):
        pid = os.fork()
        if pid == 0:
            signal.alarm(10)
            code = 1
            with contextlib.suppress(BaseException):
                work()
                code = 0
            os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

    def test_the_childs_copy_is_dead_and_the_parents_lives(self):
        server = disagg.BootstrapServer()
        holder = [server]

        def work():
            assert repr(server).endswith("closed>")
            assert server.address == f"127.0.0.1:{server.port}"
            server.close()
            holder.clear()

        assert self.in_child(work) == 0
        assert send(server.address, "GET", "/health").status == 200
        server.close()

    def test_a_child_that_lives_on_does_not_keep_the_port(self):
        server = disagg.BootstrapServer()
        pid = os.fork()
        if pid == 0:
            signal.alarm(30)
            time.sleep(30)
            os._exit(0)
        try:
            server.close()
            with pytest.raises(ConnectionRefusedError):
                send(server.address, "GET", "/health")
            disagg.BootstrapServer(port=server.port).close()
        finally:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


class TestTables:
    def test_a06_02_one_rank_four_times_is_not_ready(self, server):
        for _ in range(4):
            assert send(server.address, "PUT", "/route", registration(4, 0)).status == 200
        assert send(server.address, "GET", TOPOLOGY).status == 503
        for rank in (1, 2, 3):
            send(server.address, "PUT", "/route", registration(4, rank))
        assert send(server.address, "GET", TOPOLOGY).status == 200

    def test_a06_03_a_restart_with_another_size_takes_over_when_complete(self, server):
        register(server.address, 4)
        before = send(server.address, "GET", TOPOLOGY)
        send(server.address, "PUT", "/route", registration(2, 0, rank_port=3000))
        assert send(server.address, "GET", TOPOLOGY).json()["attn_tp_size"] == 4
        send(server.address, "PUT", "/route", registration(2, 1, rank_port=3001))
        after = send(server.address, "GET", TOPOLOGY)
        assert after.json()["attn_tp_size"] == 2
        assert (before.headers[EPOCH], after.headers[EPOCH]) == ("1", "2")
        assert before.headers[INSTANCE] != after.headers[INSTANCE]

    def test_a_rank_that_moved_is_merged_after_two_seconds(self, server):
        register(server.address, 2)
        send(server.address, "PUT", "/route", registration(2, 1, rank_port=3001))
        assert send(server.address, "GET", rank_path(1)).json()["rank_port"] == 2001
        deadline = time.monotonic() + 10
        while send(server.address, "GET", rank_path(1)).json()["rank_port"] == 2001:
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert send(server.address, "GET", rank_path(1)).headers[EPOCH] == "2"

    def test_ranks_that_disagree_are_told_both_values(self, server):
        send(server.address, "PUT", "/route", registration(2, 0))
        answer = send(server.address, "PUT", "/route", registration(2, 1, page_size=32))
        assert answer.status == 409
        body = answer.json()
        assert (body["field"], body["registered"], body["sent"]) == ("page_size", "64", "32")

    def test_a04_11_rooms_expire_and_are_capped(self):
        with disagg.BootstrapServer(room_ttl_s=0.5, room_cap=2) as server:
            for room in (1, 2, 3):
                body = json.dumps({"bootstrap_room": room, "dp_rank": room})
                send(server.address, "POST", "/register_dp_rank", body)
            query = json.dumps({"bootstrap_rooms": [1, 2, 3]})
            assert send(server.address, "POST", "/query_dp_ranks", query).json() == {"2": 2, "3": 3}
            time.sleep(0.6)
            assert send(server.address, "POST", "/query_dp_ranks", query).json() == {}

    def test_old_decodes_see_no_key_they_do_not_know(self):
        newer = {
            "enable_kv_cache_sharding": False,
            "decode_allocation_policy": "early",
            "prefill_http_port": 30000,
        }
        with disagg.BootstrapServer(old_decodes=True) as server:
            register(server.address, enable_dsa_cache_layer_split=True, **newer)
            told = send(server.address, "GET", TOPOLOGY).json()
        assert set(told) & KEYS_NEWER_THAN_E4 == {"enable_dsa_cache_layer_split"}

    def test_a06_13_a_pickle_is_not_json(self, server):
        body = pickle.dumps({"attn_tp_size": 1}, protocol=0).decode("ascii")
        assert send(server.address, "PUT", "/route", body).status == 400

    def test_one_hundred_ranks_may_come_at_once(self, server):
        def put(rank):
            assert send(server.address, "PUT", "/route", registration(100, rank)).status == 200

        threads = [threading.Thread(target=put, args=(rank,)) for rank in range(100)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert send(server.address, "GET", TOPOLOGY).json()["attn_tp_size"] == 100


PROBE = """
import http.client, sys, time
connection = http.client.HTTPConnection(sys.argv[1], timeout=5)
worst, until = 0.0, time.monotonic() + 1.5
print("ready", flush=True)
while time.monotonic() < until:
    started = time.monotonic()
    connection.request("GET", "/health")
    assert connection.getresponse().read() == b"OK"
    worst = max(worst, time.monotonic() - started)
    time.sleep(0.01)
print(worst)
"""


def test_it_answers_while_python_holds_the_gil(server):
    """A5-05, the server's half."""
    probe = subprocess.Popen([sys.executable, "-c", PROBE, server.address], stdout=subprocess.PIPE, text=True)
    assert probe.stdout.readline() == "ready\n"
    # One C call that never lets go: no other Python thread runs meanwhile.
    started = time.monotonic()
    while time.monotonic() - started < 2.0:
        sum(range(20_000_000))
    output, _ = probe.communicate(timeout=10)
    assert float(output) < 0.25, "it waited for the interpreter"
