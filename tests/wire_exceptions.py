"""Where our registry answers otherwise than SGLang 0.5.23 did in wire_sample.jsonl, and why.

Each reason is a rule of WIRE.md section 4, or of DESIGN.md section 8, to which it points. A line that is not
here is answered as recorded.
"""

from typing import NamedTuple


class Otherwise(NamedTuple):
    """What we answer: the status, and of a 200 the JSON value, unless it follows from the recorded one."""

    status: int
    reason: str
    value: object = None


NOT_AN_INTEGER = "integers are JSON integers or ASCII digits; query values may be exactly -1; bad input is 400"
ROOM_RANGE = "rooms are 0..2^63-1"
DP_RANK_RANGE = "dp ranks are 0..65,535"
SET_OF_RANKS = "ready is the set of coordinates being complete, not the number of PUTs"
OWN_EXPIRY = "an entry lives for its own 600 s, whatever the sweep's period"
NEWER_KEYS = "keys newer than E4 are in the answer only if a PUT carried one or the client sent X-Disagg-Client"
NULL_IS_ABSENT = "a null optional is an absent one"

# The keys of a recorded topology answer that a prefill of era E4 knows nothing of.
KEYS_NEWER_THAN_E4 = {
    "enable_dsa_cache_layer_split",
    "decode_allocation_policy",
    "enable_kv_cache_sharding",
    "prefill_http_port",
    "kv_layout",
    "dsv41_spec_layout",
}

# Topology answers to which NEWER_KEYS applies: the recorded PUTs of these scenarios are of era E4.
TOPOLOGY_OF_E4 = {
    ("single", 2),
    ("optional_absent", 2),
    ("load_balance_null", 2),
    ('load_balance_""', 2),
    ('load_balance_"auto"', 2),
    ('load_balance_"FOLLOW_BOOTSTRAP_ROOM"', 2),
    ('load_balance_"minimum_tokens"', 2),
    ("load_balance_true", 2),
    ("grid_2222", 32),
    ("dp_system", 3),
}

# Values in such an answer that differ, by line.
TOPOLOGY_VALUES = {("load_balance_null", 2): ({"follow_bootstrap_room": True}, NULL_IS_ABSENT)}


def _all(scenario: str, numbers: str, otherwise: Otherwise) -> dict[tuple[str, int], Otherwise]:
    return {(scenario, int(number)): otherwise for number in numbers.split()}


OTHERWISE: dict[tuple[str, int], Otherwise] = {
    **_all("cold", "8 9 10 11 12 13 14", Otherwise(400, NOT_AN_INTEGER)),
    **_all("single", "4 11 13", Otherwise(400, NOT_AN_INTEGER)),
    **_all("dp_both", "3 4 5", Otherwise(503, SET_OF_RANKS)),
    **_all("rooms", "12 14 16 18 20 22 24 26 28", Otherwise(400, NOT_AN_INTEGER)),
    **_all("rooms", "4 8 10", Otherwise(400, ROOM_RANGE)),
    **_all("rooms", "32 34 40 42 44 46 48", Otherwise(400, NOT_AN_INTEGER)),
    **_all("rooms", "36 38", Otherwise(400, DP_RANK_RANGE)),
    **_all("rooms", "54 58 60", Otherwise(400, ROOM_RANGE)),
    **_all("rooms", "62 64 66 68 70 72 74 80 82 84 86 88", Otherwise(400, NOT_AN_INTEGER)),
    **_all("expiry_interval_1s", "9 10 11 12 13", Otherwise(200, OWN_EXPIRY, {"1": 1})),
}
