"""SGLang's own prefills and decodes, of three eras, meet at our registry."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import disagg
import sglang_wheel

SCRIPT = Path(__file__).with_name("registry_scenario.py")

# A first run fetches 40 MB a version.
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def sglang(shared):
    """Run a scenario of registry_scenario.py with a version's own code; returns what it printed."""

    def run(version, server, scenario):
        site = sglang_wheel.site_or_skip(version)
        command = [sys.executable, str(SCRIPT), str(shared / "tools"), str(site), server.address, scenario]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.fixture
def server():
    with disagg.BootstrapServer() as server:
        yield server


def test_a_decode_queue_finds_every_rank_of_the_group_that_the_room_says(sglang, server):
    seen = sglang("0.5.23", server, "follow")
    assert seen["failed"] == []
    assert seen["info"] == {"attn_tp_size": 2, "dp_size": 2, "page_size": 64}
    assert seen["dp_ranks"] == [0, 1]
    assert seen["endpoints"] == [seen["ports"][:2], seen["ports"][2:]]


def test_rooms_that_the_senders_registered_are_found(sglang, server):
    seen = sglang("0.5.23", server, "round_robin")
    assert seen["failed"] == []
    assert seen["dp_ranks"] == [1, 0]
    assert seen["endpoints"] == [[seen["ports"][1]], [seen["ports"][0]]]


def test_there_is_no_topology_before_the_last_rank(sglang, server):
    seen = sglang("0.5.23", server, "incomplete")
    assert (seen["early"], seen["late"]) == (False, True)
    assert seen["info"]["attn_tp_size"] == 2


def test_a_restart_with_another_size_is_seen(sglang, server):
    seen = sglang("0.5.23", server, "restarted")
    assert seen["failed"] == []
    assert seen["info"]["attn_tp_size"] == 2
    assert seen["endpoints"] == [seen["ports"]]


PREFILLS = {"E2": ("0.5.9", "prefill_e2"), "E4": ("0.5.10", "prefill_e4"), "E7": ("0.5.23", "prefill")}
DECODES = {"E2": ("0.5.9", "decode_e2"), "E4": ("0.5.10", "decode_e4"), "E7": ("0.5.23", "decode")}


@pytest.mark.parametrize("prefill", PREFILLS)
def test_a_prefill_of_any_era_is_found_by_a_decode_of_any_era(sglang, prefill):
    with disagg.BootstrapServer(old_decodes=True) as server:
        version, scenario = PREFILLS[prefill]
        ports = sglang(version, server, scenario)["ports"]
        for decode, (version, scenario) in DECODES.items():
            seen = sglang(version, server, scenario)
            assert seen["info"] == {"attn_tp_size": 1, "dp_size": 1, "page_size": 64}, decode
            assert seen["endpoints"] == [ports], decode


def test_an_old_decode_can_not_read_what_a_new_prefill_says_unless_told_to_expect_it(sglang, server):
    """Why there is `old_decodes`: with SGLang's own server this pair never works."""
    sglang("0.5.23", server, "prefill")
    assert sglang("0.5.10", server, "decode_e4")["info"] is None
