"""Text that may hold what a peer sent, made fit for a terminal and a log line."""

from __future__ import annotations

import re

__all__ = ["printable"]


def printable(text: str) -> str:
    r"""Escape as `\xNN` what moves a cursor, breaks a line, or turns or hides text; the core does the same."""
    return UNPRINTABLE.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


# The controls, and Unicode's invisible and bidirectional format characters.
UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)
