"""Jitter as a function: the same everywhere for the same seed, address and attempt."""

from __future__ import annotations

__all__ = ["unit_interval"]

_MASK = 2**64 - 1


def unit_interval(seed: int, addr: str, attempt: int) -> float:
    """Return a number in [0, 1): FNV-1a of the address, mixed with seed and attempt by SplitMix64's finaliser."""
    state = 0xCBF29CE484222325
    for byte in addr.encode():
        state = ((state ^ byte) * 0x100000001B3) & _MASK
    state = (state ^ seed) + attempt * 0x9E3779B97F4A7C15 & _MASK
    state = ((state ^ state >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ state >> 27) * 0x94D049BB133111EB) & _MASK
    return ((state ^ state >> 31) >> 11) * 2.0**-53
