"""Which ends a request may have: worked out from the scenario and the arrival, never from the Resolver.

For most requests exactly one end is allowed. Three moments are not known to the millisecond, because they
depend on when packets and timers of other processes come; around each, and only there, two ends are allowed:

- *the spent edge*: the peer's last counted attempt fails. Attempts cannot fail early, so its start is exact;
  its end is later by what the machine delays: `plan.slack_s` and twice the worst cycle that was seen.
- *the end of a cooldown*: the probe that finds a slow peer well again goes out within one interval.
- *a restart*: from when the peer goes away until the heartbeat after its return, the old route or the new.

Besides its kind, an end has a time before which it cannot come (a budget is not spent, a room not registered)
and a generous one after which it is late.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from disagg.simulate.facts import PeerFacts
from disagg.simulate.options import Options
from disagg.simulate.plan import PlannedRequest
from disagg.simulate.scenario import Behaviour, DpChoice, PeerSpec

__all__ = ["Allowed", "PeerStory", "allowed_ends"]

NS = 1_000_000_000
NEVER = 2**62
# An end that comes this much after its rule says is late, even on a busy machine.
LATE_S = 3.0


@dataclass(frozen=True, slots=True)
class Allowed:
    """One end that a request may have: `kind` is "routed" or a failure's.

    A routed one has the `life` of the peer that the route must show. The reason of a failure has all `words`.
    Times are monotonic ns.
    """

    kind: str
    not_before_ns: int = 0
    not_after_ns: int = NEVER
    life: int = 0
    words: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PeerStory:
    """What happened at one peer: when its first request was added, and what its prefill worker did when."""

    spec: PeerSpec
    addr: str
    options: Options
    first_ns: int
    slack_ns: int
    facts: PeerFacts = field(default_factory=PeerFacts)

    @property
    def late_ns(self) -> int:
        """How much later than its rule an end may come."""
        return int(LATE_S * NS) + self.slack_ns

    @property
    def interval_ns(self) -> int:
        """Nanoseconds between the starts of two attempts."""
        return int(self.options.interval_s * NS)

    @property
    def min_wait_ns(self) -> int:
        """Age below which a request is not given up with the others."""
        return int(self.options.min_wait_s * NS)

    def spent_ns(self, attempt_ns: int) -> tuple[int, int]:
        """When the last counted attempt fails, at the earliest and the latest; each takes `attempt_ns`.

        The first starts when the first request is added, each other one `interval` after the start of the one
        before, or as soon as that has failed.
        """
        gaps = (self.options.attempts - 1) * max(self.interval_ns, attempt_ns)
        spent = self.first_ns + gaps + attempt_ns
        return spent, spent + self.slack_ns


def allowed_ends(
    story: PeerStory, request: PlannedRequest, added_ns: int, registered_ns: tuple[int, int] | None
) -> list[Allowed]:
    """Return the ends that a request may have.

    `registered_ns` is just before and just after its room was registered (0: the answer never came), or None.
    """
    behaviour = story.spec.behaviour
    if behaviour is Behaviour.SLOW_START:
        return _slow_start(story, added_ns)
    if behaviour is Behaviour.RESTARTING:
        return _restarting(story, added_ns)
    if behaviour is Behaviour.PAGE_SIZE:
        words = ("page", "16", "64")
        return [Allowed("incompatible", added_ns, added_ns + story.late_ns, words=words)]
    if story.spec.has_registry:
        return _by_dp_rank(story, request, added_ns, registered_ns)
    return _never_well(story, added_ns)


def _never_well(story: PeerStory, added_ns: int) -> list[Allowed]:
    behaviour = story.spec.behaviour
    if behaviour is Behaviour.SILENT:
        # It accepts, so it is the total timeout that ends an attempt, not the one for connecting.
        silence_s = story.options.total_timeout_s
        return _gave_up(story, added_ns, "unreachable", int(silence_s * NS), (f"within {silence_s:g} s",))
    if behaviour is Behaviour.REFUSING:
        return _gave_up(story, added_ns, "unreachable", 0, ("refused",))
    return _gave_up(story, added_ns, "protocol_error", 0, ())


def _gave_up(story: PeerStory, added_ns: int, kind: str, attempt_ns: int, words: tuple[str, ...]) -> list[Allowed]:
    """For a peer that never gives a good answer: its budget is spent, then it is in cooldown for ever."""
    early, late = story.spent_ns(attempt_ns)
    ends = []
    if added_ns <= late:
        # It fails when the budget is spent, or if it is younger then, with the first attempt that fails later
        # than `min_wait` after its arrival.
        ripe = added_ns + story.min_wait_ns
        last = max(late, ripe + max(story.interval_ns, attempt_ns) + attempt_ns)
        ends.append(Allowed(kind, max(early, ripe), last + story.late_ns, words=words))
    if added_ns >= early:
        ends.append(_cooldown(story, added_ns))
    return ends


def _cooldown(story: PeerStory, added_ns: int) -> Allowed:
    return Allowed("cooldown", added_ns, added_ns + story.late_ns)


def _slow_start(story: PeerStory, added_ns: int) -> list[Allowed]:
    """Not ready until the budget is spent; cooldown; then routed once a probe found it whole."""
    spent_early, spent_late = story.spent_ns(0)
    ends = _gave_up(story, added_ns, "not_ready", 0, ("not ready",))
    if not story.facts.whole_ns:  # the run was over before
        return ends
    whole_early, whole_late = story.facts.whole_ns[0]
    cooldown_ns = int(story.options.cooldown_s * NS)
    young_ns = story.min_wait_ns + story.interval_ns  # the longest that one waits after the budget is spent
    well_early = max(whole_early, spent_early + cooldown_ns)
    if whole_early <= spent_late + young_ns:
        # Not by plan: the machine stood still for so long that some may still have waited when it became
        # whole. An attempt for them finds it, before the cooldown is over.
        well_early = whole_early
        if added_ns >= spent_early - story.min_wait_ns:
            ends.append(Allowed("routed", well_early, added_ns + young_ns + story.late_ns))
    well_late = max(whole_late, spent_late + max(cooldown_ns, young_ns + story.interval_ns))
    well_late += story.interval_ns + story.slack_ns
    if added_ns > well_late:
        ends = []
    if added_ns >= well_early:
        ends.append(Allowed("routed", well_early, added_ns + story.late_ns))
    return ends


def _restarting(story: PeerStory, added_ns: int) -> list[Allowed]:
    """Expect the old life until it goes away, the new one once a heartbeat has seen it, either in between."""
    away_ns = story.facts.away_ns
    if not away_ns:
        return [Allowed("routed", added_ns, added_ns + story.late_ns)]
    back_early, back_late = story.facts.whole_ns[1] if len(story.facts.whole_ns) > 1 else (NEVER, NEVER)
    beat_ns = int((story.options.heartbeat_interval_s + story.options.total_timeout_s) * NS)
    seen_ns = back_late + beat_ns + story.slack_ns
    ends = []
    if added_ns <= seen_ns:
        # What was added before it went may wait for an endpoint that went with it, and see the new life.
        ends.append(Allowed("routed", added_ns, max(added_ns, seen_ns) + story.late_ns, life=0))
    # First contact with a peer takes some ms; half a second if the machine is busy.
    contact_ns = NS // 2 + story.slack_ns
    if added_ns > away_ns - contact_ns and back_early < NEVER:
        ends.append(Allowed("routed", max(added_ns, back_early), max(added_ns, seen_ns) + story.late_ns, life=1))
    # Only a peer that was not known, or whose budget is shorter than its absence, can fail meanwhile.
    budget_ns = (story.options.attempts - 1) * story.interval_ns
    unknown = story.first_ns > away_ns - contact_ns
    if (unknown or budget_ns < back_late - away_ns + story.slack_ns) and away_ns <= added_ns <= seen_ns:
        ends += [Allowed(kind, away_ns) for kind in ("unreachable", "not_ready", "cooldown")]
    return ends


def _by_dp_rank(
    story: PeerStory, request: PlannedRequest, added_ns: int, registered_ns: tuple[int, int] | None
) -> list[Allowed]:
    """For a peer that is well: what decides is whether and when the dp rank becomes known."""
    if story.spec.choice in (DpChoice.ONLY, DpChoice.FOLLOW, DpChoice.PRESET):
        return [Allowed("routed", added_ns, added_ns + story.late_ns)]
    timeout_ns = int(story.options.dp_rank_timeout_s * NS)
    timed_out = Allowed(
        "dp_rank_timeout",
        added_ns + timeout_ns,
        added_ns + timeout_ns + story.late_ns,
        words=(f"room {request.room} ",),
    )
    if registered_ns is None:
        return [timed_out]
    before, after = registered_ns
    # It is asked for again after waits that double up to a second.
    known = max(added_ns, after or before) + NS
    ends = [Allowed("routed", max(added_ns, before), known + story.late_ns)]
    # By plan a room is registered within four tenths of the timeout, and asked for within eight; only when
    # the prefill worker was held up for longer may the timeout come first.
    if not after or 2 * (after - added_ns) > timeout_ns - story.slack_ns:
        ends.append(timed_out)
    return ends
