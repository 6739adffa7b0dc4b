"""What a request ends with (CASES.md X-03, X-04): the first specific reason, and a status that says that it failed."""

from __future__ import annotations

import pytest

import disagg
from disagg.reference.rules import STATUS
from machines import A, add, make, topology


@pytest.mark.parametrize("kind", disagg.FAILURE_KINDS)
def test_every_kind_suggests_a_status_that_no_client_takes_for_success(kind):
    """X-04: and core and reference the same one, but for what is told, which has its status from outside."""
    assert 400 <= disagg.FAILURE_KINDS[kind] < 600
    assert STATUS.get(kind, disagg.FAILURE_KINDS["told"]) == disagg.FAILURE_KINDS[kind]


@pytest.mark.parametrize("status", [0, 200, 204, 302, 399, 600])
def test_engine_cannot_fail_a_room_with_a_status_of_success(status):
    """X-04: refused, and nothing is remembered of it."""
    pair = make()
    request = add(pair, "a", room=77)
    with pytest.raises(ValueError, match=f"http_status {status} is not from 400 to 599"):
        pair.core.fail_room(77, "input too long", status)
    with pytest.raises(ValueError, match="http_status"):
        pair.core.fail_room(78, "input too long", status)
    pair.poll()
    assert request in pair.held
    assert pair.core.stats()["tombstones"] == 0


@pytest.mark.parametrize("is_pending", [True, False], ids=["pending", "not yet known"])
def test_first_specific_reason_wins_over_all_that_is_said_later(is_pending):
    """X-03: not what was heard last, and with the status that came with it."""
    pair = make()
    request = add(pair, "a", room=77) if is_pending else None
    pair.both("fail_room", 77, "input too long", 400)
    pair.both("fail_room", 77, "aborted", 500)
    request = request or add(pair, "a", room=77)
    pair.both("peer_lost", A)
    pair.poll()
    failure = pair.ends[request]
    assert (failure.kind, failure.reason, failure.http_status) == ("told", "input too long", 400)


def test_reason_that_was_first_is_not_replaced_by_one_that_is_told():
    """X-03: the other way round."""
    pair = make()
    request = add(pair, "a", room=77)
    pair.answer(pair.only("topology"), 200, topology(page_size=32))
    assert pair.both("fail_room", 77, "aborted", 500) == [False, False]
    pair.poll()
    assert (pair.ends[request].kind, pair.ends[request].http_status) == ("incompatible", 409)
