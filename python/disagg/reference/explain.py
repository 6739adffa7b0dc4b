"""What is seen of pending requests and peers from outside, in plain Python: states, ages and sentences."""

from __future__ import annotations

from typing import Any

from disagg.printable import printable
from disagg.reference.addresses import canonical_address
from disagg.reference.model import SECOND, Peer, Request
from disagg.reference.peers import PeerRules
from disagg.values import Route

__all__ = ["Explanations"]


class Explanations(PeerRules):
    """Looks at the state and changes nothing."""

    given: list[list[tuple[object, int]]]  # ends: since the last poll, and between that one and the one before

    def state_of(self, obj: Any) -> int:
        """Return 0 for failed, 1 for pending, 2 for routed; KeyError when the end is over two polls ago."""
        if any(request.obj is obj for request in self.requests):
            return 1
        for ends in self.given:
            for ended, state in reversed(ends):
                if ended is obj:
                    return state
        raise KeyError("request is not known")

    def oldest(self) -> dict[str, float]:
        """Seconds that the first request of each stage has been in it; of `need_info`, since it was added."""
        lived = self.clock.read(self.now)
        ages = {"need_info": 0, "need_dp_rank": 0, "need_endpoints": 0}
        for request in self.requests:
            if request.end is None:
                since = request.added if request.stage == "need_info" else request.stage_since
                ages[request.stage] = max(ages[request.stage], lived - since)
        return {stage: age / SECOND for stage, age in ages.items()}

    def explain(self, obj: Any) -> str:
        """Return what a request waits for, in a sentence."""
        held = [request for request in self.requests if request.obj is obj]
        if not held:
            return f"has ended: {'failed' if self.state_of(obj) == 0 else 'routed'}"
        return printable(self._explain_held(held[0]))

    def explain_peer(self, addr: str) -> str:
        """Return what is known of an address and what happens next; KeyError when it is not known."""
        peer = self.peers[canonical_address(addr, self.options.default_port)]
        count = len(self._pending(peer))
        wait = {0: "no request waits", 1: "1 request waits"}.get(count, f"{count} requests wait")
        return printable(f"{peer.addr}: {self._progress(peer)}; {wait}")

    def _explain_held(self, request: Request) -> str:
        if isinstance(request.end, Route):
            return f"routed to dp rank {request.end.dp_rank} at {request.end.addr}; the next poll gives it"
        if request.end is not None:
            return f"failed ({request.end.kind}): {request.end.reason}; the next poll gives it"
        peer = self.peers[request.addr]
        if request.stage == "need_info":
            waited = self._waited(request.added, self.options.request_timeout_s)
            return f"waiting for the topology of {peer.addr}, {waited}: {self._progress(peer)}"
        if request.stage == "need_dp_rank":
            asked = {0: "not asked yet", 1: "asked once"}.get(request.asked, f"asked {request.asked} times")
            waited = self._waited(request.stage_since, self.options.dp_rank_timeout_s)
            what = f"the dp rank of room {request.room} at {peer.addr}, {asked}"
            return f"waiting for {what}, {waited}{self._last(peer.query_error)}"
        assert request.dp_rank is not None
        group = peer.groups[request.dp_rank]
        reading = ", the topology is read again" if group.state == "reading" else ""
        read = f"{len(group.found)} of {len(list(peer.mapping.contacts()))} read{reading}"
        waited = self._waited(request.stage_since, self.options.endpoint_timeout_s)
        what = f"the endpoints of dp rank {request.dp_rank} at {peer.addr}, {read}"
        return f"waiting for {what}, {waited}{self._last(group.last_error)}"

    def _waited(self, since: int, timeout_s: float) -> str:
        return f"{self._seconds(self.clock.read(self.now) - since)} of {timeout_s:g} s"

    @staticmethod
    def _seconds(nanoseconds: int) -> str:
        return f"{max(0, nanoseconds) / SECOND:.1f} s"

    def _progress(self, peer: Peer) -> str:
        """How far the peer is: its last error, and what comes next."""
        attempt = f"attempt {peer.attempt + 1} of {self.policy.max_attempts}"
        due = f"in {self._seconds(peer.until - self.now)}"
        if peer.state == "ready":
            missed = f", {peer.beats_missed} looks at it in a row failed" if peer.beats_missed else ""
            info = peer.info
            sizes = f"tp {info.attn_tp_size} x cp {info.attn_cp_size} x pp {info.pp_size} x dp {info.dp_size}"
            return f"ready, epoch {peer.epoch}, {sizes}{missed}"
        if peer.state == "marked":
            assert peer.mark is not None
            probe = "under way" if peer.fetch is not None else due
            return f"{peer.mark.reason.removeprefix(peer.addr + ': ')}; probe {probe}"
        next_step = {
            "unknown": "nothing is known of it, nobody asks",
            "fetching": f"{attempt} is under way",
            "waiting": f"{attempt} goes out with the next poll" if peer.waits_for_poll else f"{attempt} {due}",
        }[peer.state]
        return f"{peer.attempt_error[1]}; {next_step}" if peer.attempt and peer.attempt_error[1] else next_step
