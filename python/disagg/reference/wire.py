"""Reading the answers of a bootstrap server in plain Python (WIRE.md section 3, DESIGN.md section 8).

The `json` module does the grammar; every number stays the text that stood in the body until a rule asks for it, and
every object stays a list of pairs, so that a key that stands twice is seen.
"""

from __future__ import annotations

import ipaddress
import json
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, NoReturn, TypeAlias, TypeGuard

from disagg.errors import ProtocolError
from disagg.reference.mapping import PrefillInfo

__all__ = [
    "RankEndpoint",
    "Table",
    "parse_dp_ranks",
    "parse_endpoint",
    "parse_not_ready",
    "parse_table",
    "parse_topology",
]

MAX_SIZE = 65_535
MAX_RANKS = 65_536
MAX_ROOM = 2**63 - 1
MAX_DEPTH = 127
OLD_NAMES = {
    "attn_tp_size": "prefill_attn_tp_size",
    "dp_size": "prefill_dp_size",
    "pp_size": "prefill_pp_size",
    "page_size": "prefill_page_size",
}
KNOWN = {
    "attn_tp_size", "attn_cp_size", "dp_size", "pp_size", "page_size", "kv_cache_dtype", "follow_bootstrap_room",
    "enable_dsa_cache_layer_split", "enable_kv_cache_sharding", "prefill_http_port", "kv_layout",
    "decode_allocation_policy", "dynamic_dp_size", "dsv41_spec_layout", *OLD_NAMES.values(),
}  # fmt: skip
IGNORED = {
    "target_tp_rank", "target_tp_ranks", "target_cp_ranks", "target_pp_ranks", "required_dst_info_num",
    "required_prefill_response_num",
}  # fmt: skip


class RankEndpoint(NamedTuple):
    """Where one prefill rank listens."""

    ip: str
    port: int


@dataclass(frozen=True)
class Table:
    """All that one answer to `GET /routes` says; `ranks` by (dp, cp, tp, pp)."""

    instance: str | None
    epoch: str | None
    info: PrefillInfo
    ranks: dict[tuple[int, ...], RankEndpoint]


@dataclass(frozen=True)
class _Number:
    """A JSON number as it stood in the body."""

    text: str


@dataclass(frozen=True)
class _Object:
    """A JSON object as it stood in the body, keys that stand twice included."""

    pairs: list[tuple[str, _Value]]


_Value: TypeAlias = "bool | str | _Number | list[_Value] | _Object | None"


def parse_topology(body: bytes) -> PrefillInfo | None:
    """The prefill engine that a topology answer of era E2 or later describes; None when its sizes are null (not ready).

    Raises `ProtocolError` naming the field; `body` if it is not a JSON object, `era` for E0 and E1.
    """
    return _topology(_fields(_object(body)))


def _topology(fields: dict[str, _Value]) -> PrefillInfo | None:
    if not {"attn_tp_size", "prefill_attn_tp_size"} & fields.keys():
        for key in ("prefill_tp_size", "prefill_dp_size"):
            if key in fields:
                raise ProtocolError("era", key, "must be of a protocol era with attn_tp_size")
    sizes = {}
    for name in ("attn_tp_size", "attn_cp_size", "dp_size", "pp_size"):
        present = name in fields or OLD_NAMES.get(name) in fields
        if not present and name in ("attn_tp_size", "dp_size"):
            raise ProtocolError(name, "", "must be present")
        sizes[name] = _under_either_name(fields, name, MAX_SIZE) if present else 1
    if None in sizes.values():
        return None
    known_sizes = {name: size for name, size in sizes.items() if size is not None}
    info = PrefillInfo(
        **known_sizes,
        page_size=_under_either_name(fields, "page_size", 2**32 - 1),
        kv_cache_dtype=_name(fields, "kv_cache_dtype"),
        follow_bootstrap_room=_flag(fields, "follow_bootstrap_room", default=True),
        enable_dsa_cache_layer_split=_flag(fields, "enable_dsa_cache_layer_split", default=False),
        enable_kv_cache_sharding=_flag(fields, "enable_kv_cache_sharding", default=False),
        prefill_http_port=_port(fields),
        kv_layout=_name(fields, "kv_layout"),
        decode_allocation_policy=_policy(fields),
        dynamic_dp_size=_flag(fields, "dynamic_dp_size", default=False),
        spec_layout=_layout(fields),
        extras={
            key: _plain(key, fields[key], fields[key])
            for key in sorted(fields, key=str.encode)
            if key not in KNOWN and key not in IGNORED
        },
    )
    ranks = math.prod(known_sizes.values())
    if ranks > MAX_RANKS:
        raise ProtocolError("sizes", str(ranks), f"dp x cp x tp x pp must be at most {MAX_RANKS}")
    return info


def parse_endpoint(body: bytes) -> RankEndpoint:
    """Where a rank listens, from a rank answer; other keys are ignored.

    Raises `ProtocolError` naming the field.
    """
    return _endpoint(_fields(_object(body)))


def _endpoint(fields: dict[str, _Value]) -> RankEndpoint:
    ip = _required(fields, "rank_ip")
    if not isinstance(ip, str) or not _is_host(_text("rank_ip", ip)):
        _refuse("rank_ip", ip, "must be an ip address or a host name")
    return RankEndpoint(ip, _integer("rank_port", _required(fields, "rank_port"), 1, 65_535))


def parse_table(body: bytes) -> Table:
    """Topology and endpoints of one dp rank.

    Raises `ProtocolError` naming the field.
    """
    fields = _fields(_object(body))
    stated, listed = _required(fields, "topology"), _required(fields, "ranks")
    if not isinstance(stated, _Object):
        _refuse("topology", stated, "must be a json object")
    info = _topology(_fields(stated))
    if info is None:
        _refuse("topology", stated, "must not be null")
    if not isinstance(listed, list):
        _refuse("ranks", listed, "must be a list")
    ranks = {}
    for item in listed:
        if not isinstance(item, _Object):
            _refuse("ranks", item, "must be a json object")
        rank = _fields(item)
        at = tuple(_integer(axis, _required(rank, axis), 0, MAX_SIZE - 1) for axis in ("dp", "cp", "tp", "pp"))
        if at in ranks:
            _refuse("ranks", listed, "must stand only once")
        ranks[at] = _endpoint(rank)
    return Table(_name(fields, "instance_id"), _name(fields, "epoch"), info, ranks)


def parse_dp_ranks(body: bytes, rooms: Iterable[int]) -> dict[int, int]:
    """The dp ranks of those of `rooms` that a dp-rank answer resolves; a malformed entry resolves nothing.

    Raises `ProtocolError` about `body`, if it is not a JSON object.
    """
    pairs = _object(body).pairs
    ranks = {}
    for room in rooms:
        entries = [value for key, value in pairs if key == str(room)]
        if len(entries) != 1 or not 0 <= room <= MAX_ROOM:
            continue
        try:
            ranks[room] = _integer(str(room), entries[0], 0, 2**32 - 1)
        except ProtocolError:
            continue
    return ranks


def parse_not_ready(body: bytes) -> str | None:
    """What the body of a 503 says is missing, as a clause; None when it does not say so or contradicts itself."""
    try:
        fields = _fields(_object(body))
        registered, sizes, missing = (
            _plain(key, fields[key], fields[key]) for key in ("registered", "sizes", "missing")
        )
    except (ProtocolError, KeyError):
        return None
    if type(registered) is not int or registered < 0:
        return None
    if sizes is None and registered == 0:
        return "no rank has registered"
    first = missing[0] if isinstance(missing, list) and missing else None
    if not _are_four(sizes) or not _are_four(first) or any(at >= size for at, size in zip(first, sizes, strict=True)):
        return None
    unnamed = math.prod(sizes) - registered - 1
    if math.prod(sizes) > MAX_RANKS or unnamed < 0:
        return None
    parts = zip(("dp", "cp", "tp", "pp"), first, sizes, strict=True)
    name = "/".join(f"{axis}{rank}" for axis, rank, size in parts if size > 1 or axis == "tp")
    return f"waiting for {name}" + (f" and {unnamed} more" if unnamed else "")


def _are_four(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and len(value) == 4 and all(type(item) is int and item >= 0 for item in value)


def _object(body: bytes) -> _Object:
    def not_json(constant: str) -> NoReturn:
        raise ValueError(constant)  # NaN and Infinity

    try:
        value: _Value = json.loads(
            body.decode("utf-8"),
            object_pairs_hook=_Object,
            parse_int=_Number,
            parse_float=_Number,
            parse_constant=not_json,
        )
        if isinstance(value, _Object):
            for key, _ in value.pairs:
                key.encode("utf-8")  # an unpaired surrogate is no text
    except (ValueError, RecursionError):
        raise ProtocolError("body", _start(body), "must be json") from None
    if not isinstance(value, _Object):
        raise ProtocolError("body", _start(body), "must be a json object")
    return value


def _start(body: bytes) -> str:
    return body[:320].decode("utf-8", "replace")[:80]


def _fields(value: _Object) -> dict[str, _Value]:
    fields: dict[str, _Value] = {}
    for key, field in value.pairs:
        if key in fields:
            _refuse(key, field, "must stand only once")
        fields[key] = field
    return fields


def _required(fields: dict[str, _Value], key: str) -> _Value:
    if key not in fields:
        raise ProtocolError(key, "", "must be present")
    return fields[key]


def _refuse(key: str, value: _Value, rule: str) -> NoReturn:
    raise ProtocolError(key[:80], _source(value)[:80], rule)


def _source(value: _Value) -> str:
    """The value as JSON; only its spacing and escapes may differ from what stood in the body."""
    if isinstance(value, _Number):
        return value.text
    if isinstance(value, list):
        return "[" + ",".join(map(_source, value)) + "]"
    if isinstance(value, _Object):
        return "{" + ",".join(f"{json.dumps(key)}:{_source(field)}" for key, field in value.pairs) + "}"
    return json.dumps(value)


def _text(key: str, value: str, whole: _Value = None) -> str:
    """The string, if it is text: an unpaired surrogate is none."""
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        _refuse(key, value if whole is None else whole, "must be json")
    return value


def _integer(key: str, value: _Value, least: int, most: int) -> int:
    digits = value.text if isinstance(value, _Number) else value
    if isinstance(digits, str):
        _text(key, digits)
    if not isinstance(digits, str) or not re.fullmatch("[0-9]+", digits):
        _refuse(key, value, "must be an integer or a string of ascii digits")
    digits = digits.lstrip("0") or "0"
    if len(digits) > 20 or not least <= int(digits) <= most:
        _refuse(key, value, f"must be from {least} to {most}")
    return int(digits)


def _under_either_name(fields: dict[str, _Value], name: str, most: int) -> int | None:
    """The number under its new or its old name; None if neither states one."""
    old_name = OLD_NAMES.get(name, name)
    stated = {
        key: _integer(key, fields[key], 1, most)
        for key in (name, old_name)
        if key in fields and fields[key] is not None
    }
    if len(set(stated.values())) > 1:
        _refuse(old_name, fields[old_name], "must not differ from the same size under its other name")
    return next(iter(stated.values()), None)


def _flag(fields: dict[str, _Value], key: str, *, default: bool) -> bool:
    value = fields.get(key)
    if value is None:
        return default
    if isinstance(value, str):
        _text(key, value)
    if value is True or value == "true" or value == _Number("1"):
        return True
    if value is False or value == "false" or value == _Number("0"):
        return False
    _refuse(key, value, 'must be true, false, 0, 1, "true" or "false"')


def _name(fields: dict[str, _Value], key: str) -> str | None:
    value = fields.get(key)
    if value is None:
        return None
    if not isinstance(value, str):
        _refuse(key, value, "must be a string or null")
    return _text(key, value)


def _policy(fields: dict[str, _Value]) -> str | None:
    """Leaving the policy out says "early"; null says nothing."""
    return _name(fields, "decode_allocation_policy") if "decode_allocation_policy" in fields else "early"


def _port(fields: dict[str, _Value]) -> int | None:
    value = fields.get("prefill_http_port")
    return None if value is None else _integer("prefill_http_port", value, 1, 65_535)


def _layout(fields: dict[str, _Value]) -> dict[str, object] | None:
    value = fields.get("dsv41_spec_layout")
    if value is None:
        return None
    plain = _plain("dsv41_spec_layout", value, value)
    if not isinstance(plain, dict):
        _refuse("dsv41_spec_layout", value, "must be an object or null")
    return plain


def _plain(key: str, value: _Value, whole: _Value, depth: int = 1) -> object:
    """The value as plain Python; an int beyond 64 bits becomes the nearest float."""
    if isinstance(value, str):
        return _text(key, value, whole)
    if isinstance(value, _Number):
        return _plain_number(key, value, whole)
    if isinstance(value, list | _Object) and depth > MAX_DEPTH:
        _refuse(key, whole, "must be json")
    if isinstance(value, list):
        return [_plain(key, item, whole, depth + 1) for item in value]
    if isinstance(value, _Object):
        plain: dict[str, object] = {}
        for name, field in value.pairs:
            _text(key, name, whole)
            item = _plain(key, field, whole, depth + 1)
            if name in plain:
                _refuse(key, whole, "must stand only once")
            plain[name] = item
        return plain
    return value


def _plain_number(key: str, value: _Number, whole: _Value) -> int | float:
    if re.fullmatch("-?[0-9]{1,20}", value.text) and -(2**63) <= int(value.text) < 2**64:
        return int(value.text)
    number = float(value.text)
    if math.isinf(number):
        _refuse(key, whole, "must be json")
    return number


def _is_host(text: str) -> bool:
    """Whether the text may be an IP address (IPv6 with or without a zone) or a host name."""
    address, percent, zone = text.partition("%")
    if percent:
        return _is_ip(address, version=6) and bool(re.fullmatch(r"(?!-)[A-Za-z0-9._-]{1,63}(?<!-)", zone))
    if _is_ip(text):
        return True
    name = text.removesuffix(".")
    labels = name.split(".")
    if len(name) > 253 or re.fullmatch("[0-9]*", labels[-1]):
        return False
    return all(re.fullmatch("(?!-)[A-Za-z0-9_-]{1,63}(?<!-)", label) for label in labels)


def _is_ip(text: str, version: int | None = None) -> bool:
    try:
        return ipaddress.ip_address(text).version in ((4, 6) if version is None else (version,))
    except ValueError:
        return False
