"""A token that does not show itself."""

from __future__ import annotations

from typing import NoReturn

__all__ = ["Secret"]


class Secret:
    """Holds a text that is in no repr and no pickle; `reveal` is the only way to it."""

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """Return the text, for the one place that sends it."""
        return self._text

    def __repr__(self) -> str:
        return "Secret(...)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("cannot pickle Secret: it stays in the process that was given it")
