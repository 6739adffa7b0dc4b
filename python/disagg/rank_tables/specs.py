"""Engines as they are given on the command line: `tp=8,pp=1`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from disagg._core import MAX_RANKS, MAX_SIZE, PrefillInfo
from disagg.printable import printable
from disagg.rank_tables.pair import DecodeEngine
from disagg.usage import UsageError, check_kv

__all__ = ["DECODE_KEYS", "PREFILL_KEYS", "parse_decode", "parse_prefill"]

Value = int | bool | str
Reader = Callable[[str], Value]


def parse_decode(text: str, kv: str) -> DecodeEngine:
    """Read `--decode`: `tp=8,pp=1` and the other keys of DECODE_KEYS. What is not stated is not compared.

    Raises UsageError naming the key, the value and the rule.
    """
    check_kv(kv)
    fields = _fields("--decode", text, DECODE_KEYS)
    groups = int(fields.pop("dp_size", 1))
    if not 1 <= groups <= MAX_SIZE:
        raise UsageError(f"--decode dp={groups}: must be from 1 to {MAX_SIZE}")
    stated = {"page_size": None, "kv_cache_dtype": None, "engine_rank": 0, "kv": kv} | fields
    engine = DecodeEngine(fields=stated, dp_size=groups)
    try:
        engine.rank(0, 0)
    except ValueError as error:
        raise UsageError(f"--decode {error}") from None
    if engine.rank_count > MAX_RANKS:
        raise UsageError(f"--decode dp x cp x tp x pp is {engine.rank_count}: must be at most {MAX_RANKS}")
    return engine


def parse_prefill(text: str) -> PrefillInfo:
    """Read `--prefill`: `tp=4,pp=2,dp=2` and the other keys of PREFILL_KEYS. What is not stated is not compared.

    Raises UsageError naming the key, the value and the rule.
    """
    fields = _fields("--prefill", text, PREFILL_KEYS)
    stated = {"page_size": None, "kv_cache_dtype": None, "decode_allocation_policy": None} | fields
    try:
        return PrefillInfo(**stated)  # type: ignore[arg-type]  # each key's reader gives its type
    except ValueError as error:
        raise UsageError(f"--prefill {error}") from None


def _fields(option: str, text: str, keys: Mapping[str, tuple[str, Reader]]) -> dict[str, Value]:
    fields: dict[str, Value] = {}
    if any(0xD800 <= ord(char) < 0xE000 for char in text):
        raise UsageError(f"{option} {printable(ascii(text))}: must be UTF-8")
    for part in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (side.strip() for side in part.partition("="))
        field, reader = keys.get(key.replace("-", "_"), (None, None))
        if field is None or reader is None:
            raise UsageError(f"{option} {key}: no such key; there are {', '.join(keys)}")
        if not equals or not value:
            raise UsageError(f"{option} {key}: has no value; give {key}=VALUE")
        if field in fields:
            raise UsageError(f"{option} {key}: given twice")
        try:
            fields[field] = reader(value)
        except ValueError as error:
            raise UsageError(f"{option} {key}={value}: {error}") from None
    if "attn_tp_size" not in fields:
        raise UsageError(f"{option} {text or repr(text)}: has no tp; give at least tp=SIZE")
    return fields


def _number(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise ValueError("must be a whole number")
    if len(text) > MAX_DIGITS:
        raise ValueError(f"must have at most {MAX_DIGITS} digits")
    return int(text)


def _switch(text: str) -> bool:
    if text.lower() in ("yes", "true", "on", "1"):
        return True
    if text.lower() in ("no", "false", "off", "0"):
        return False
    raise ValueError("must be yes or no")


MAX_DIGITS = 18  # more than any size has; `int` of a very long text is slow

# key: (field of DecodeRank or PrefillInfo, reader)
_SHARED: dict[str, tuple[str, Reader]] = {
    "tp": ("attn_tp_size", _number),
    "cp": ("attn_cp_size", _number),
    "pp": ("pp_size", _number),
    "dp": ("dp_size", _number),
    "page_size": ("page_size", _number),
    "dtype": ("kv_cache_dtype", str),
    "layout": ("kv_layout", str),
    "policy": ("decode_allocation_policy", str),
}
DECODE_KEYS: dict[str, tuple[str, Reader]] = _SHARED | {
    "all_cp": ("all_cp_ranks", _switch),
    "kv_heads": ("num_kv_heads", _number),
    "dcp": ("dcp_size", _number),
    "equal_tp": ("requires_equal_tp", _switch),
    "strict_dtype": ("strict_dtype", _switch),
}
PREFILL_KEYS: dict[str, tuple[str, Reader]] = _SHARED | {
    "layer_split": ("enable_dsa_cache_layer_split", _switch),
    "sharding": ("enable_kv_cache_sharding", _switch),
    "follow_room": ("follow_bootstrap_room", _switch),
    "dynamic_dp": ("dynamic_dp_size", _switch),
}
