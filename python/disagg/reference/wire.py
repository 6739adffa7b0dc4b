"""Bodies that a bootstrap server answers with, read strictly, in plain Python (WIRE.md section 3)."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Iterable
from typing import Any

from disagg.errors import ProtocolError
from disagg.reference.mapping import PrefillInfo

__all__ = ["parse_dp_ranks", "parse_endpoint", "parse_topology"]

MAX_SIZE = 65_535
MAX_RANKS = 65_536
OLD_NAMES = {
    "attn_tp_size": "prefill_attn_tp_size",
    "dp_size": "prefill_dp_size",
    "pp_size": "prefill_pp_size",
    "page_size": "prefill_page_size",
}
SIZES = ("attn_tp_size", "attn_cp_size", "dp_size", "pp_size")
NAMES = ("kv_cache_dtype", "kv_layout")
FLAGS = {
    "follow_bootstrap_room": True,
    "enable_dsa_cache_layer_split": False,
    "enable_kv_cache_sharding": False,
    "dynamic_dp_size": False,
}
OTHERS = ("page_size", "prefill_http_port", "decode_allocation_policy", "dsv41_spec_layout")
IGNORED = (
    "target_tp_rank",
    "target_tp_ranks",
    "target_cp_ranks",
    "target_pp_ranks",
    "required_dst_info_num",
    "required_prefill_response_num",
)
KNOWN = {*SIZES, *OLD_NAMES.values(), *NAMES, *FLAGS, *OTHERS, *IGNORED}


def parse_topology(body: bytes) -> PrefillInfo | None:
    """Return what the prefill engine is, or None when its sizes are null: not ready.

    Raises ProtocolError naming the field.
    """
    fields = _load(body, unique=True)
    if "attn_tp_size" not in fields and "prefill_attn_tp_size" not in fields:
        for name in ("prefill_tp_size", "prefill_dp_size"):
            if name in fields:
                raise ProtocolError("era", name, "an era before E2 is not spoken")
    sizes = {name: _size(fields, name) for name in SIZES}
    if any(size is None for size in sizes.values()):
        return None
    stated = {name: value for name, value in fields.items() if value is not None}
    optional: dict[str, Any] = dict(sizes)
    optional |= {name: _flag(name, stated[name]) if name in stated else default for name, default in FLAGS.items()}
    for name in NAMES:
        optional[name] = _string(name, stated[name]) if name in stated else None
    policy = fields.get("decode_allocation_policy", "early")
    layout = stated.get("dsv41_spec_layout")
    if layout is not None and not isinstance(layout, dict):
        raise ProtocolError("dsv41_spec_layout", str(layout), "neither an object nor null")
    port = stated.get("prefill_http_port")
    info = PrefillInfo(
        **optional,
        page_size=_either_name(fields, "page_size", 2**32 - 1),
        decode_allocation_policy=None if policy is None else _string("decode_allocation_policy", policy),
        prefill_http_port=None if port is None else _integer("prefill_http_port", port, 1, 65_535),
        spec_layout=layout,
        extras={name: value for name, value in fields.items() if name not in KNOWN},
    )
    if info.dp_size * info.attn_cp_size * info.attn_tp_size * info.pp_size > MAX_RANKS:
        raise ProtocolError("sizes", "", f"more than {MAX_RANKS} ranks")
    return info


def parse_endpoint(body: bytes) -> tuple[str, int]:
    """Return IP (or name) and port of a rank answer. Raises ProtocolError naming the field."""
    fields = _load(body, unique=True)
    for name in ("rank_ip", "rank_port"):
        if name not in fields:
            raise ProtocolError(name, "", "missing")
    host = fields["rank_ip"]
    if not isinstance(host, str) or not _is_host(host):
        raise ProtocolError("rank_ip", str(host), "no host")
    return host, _integer("rank_port", fields["rank_port"], 1, 65_535)


def parse_dp_ranks(body: bytes, rooms: Iterable[int]) -> dict[int, int]:
    """Return the dp ranks of those of `rooms` that the answer names well; a bad entry concerns its room only.

    Raises ProtocolError when the body is no JSON object.
    """
    entries = _load(body, unique=False)
    ranks = {}
    for room in rooms:
        values = entries.get(str(room), [])
        if len(values) == 1:
            try:
                ranks[room] = _integer(str(room), values[0], 0, 2**32 - 1)
            except ProtocolError:
                continue
    return ranks


class _Float(str):
    """The text of a number that is no integer."""


def _load(body: bytes, *, unique: bool) -> dict[str, Any]:
    """Read an object; with `unique` duplicate keys are refused at any depth, else values are lists of all."""

    def pairs(entries: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in entries:
            if unique and name in found:
                raise ProtocolError(name, str(value), "duplicate key")
            if unique:
                found[name] = value
            else:
                found.setdefault(name, []).append(value)
        return found

    def constant(text: str) -> None:
        raise ValueError(text)

    try:
        text = body.decode()
        loaded = json.loads(text, object_pairs_hook=pairs, parse_float=_Float, parse_constant=constant)
    except (ValueError, RecursionError):
        raise ProtocolError("body", repr(body[:80]), "not JSON") from None
    if not isinstance(loaded, dict):
        raise ProtocolError("body", text[:80], "not an object")
    return loaded


def _integer(name: str, value: object, lowest: int, highest: int) -> int:
    if isinstance(value, str) and not isinstance(value, _Float) and value.isascii() and value.isdigit():
        value = int(value)
    if type(value) is not int or not lowest <= value <= highest:
        raise ProtocolError(name, str(value), f"not an integer from {lowest} to {highest}")
    return value


def _either_name(fields: dict[str, Any], name: str, highest: int) -> int | None:
    keys = [key for key in (name, OLD_NAMES.get(name, name)) if fields.get(key) is not None]
    values = {_integer(key, fields[key], 1, highest) for key in keys}
    if len(values) > 1:
        raise ProtocolError(OLD_NAMES[name], str(values), "stated twice, and differently")
    return values.pop() if values else None


def _size(fields: dict[str, Any], name: str) -> int | None:
    """Return a size; None when it is null. Absent ones are 1 where an era had none."""
    size = _either_name(fields, name, MAX_SIZE)
    if size is not None:
        return size
    if name in fields or OLD_NAMES.get(name) in fields:
        return None
    if name in ("attn_tp_size", "dp_size"):
        raise ProtocolError(name, "", "missing")
    return 1


def _flag(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    if type(value) is int and value in (0, 1):
        return value == 1
    if type(value) is str and value in ("true", "false"):
        return value == "true"
    raise ProtocolError(name, str(value), "not a boolean")


def _string(name: str, value: object) -> str:
    if type(value) is not str:
        raise ProtocolError(name, str(value), "not a string")
    return value


def _is_host(text: str) -> bool:
    number, percent, zone = text.partition("%")
    try:
        ipaddress.ip_address(number)
    except ValueError:
        labels = text.removesuffix(".").split(".")
        return len(text) <= 253 and all(
            re.fullmatch(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?", label) for label in labels
        )
    return not percent or (":" in number and re.fullmatch(r"[A-Za-z0-9._~-]{1,64}", zone) is not None)
