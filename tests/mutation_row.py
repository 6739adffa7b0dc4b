"""One row of the mutation tables: a bug as a replacement of text in one source file."""

from __future__ import annotations

from dataclasses import dataclass


class BadMutation(Exception):
    """A mutation that proves nothing: its text is not there once, or the mutant does not build or run."""

    def __init__(self, mutation: Mutation, problem: str):
        super().__init__(f"{mutation.name}: {problem}")


@dataclass(frozen=True, slots=True)
class Mutation:
    """A bug to put back; `why` says what it was, with its case of CASES.md where it has one."""

    name: str
    why: str
    file: str
    """Relative to the root of the checkout."""
    old: str
    new: str

    def mutated(self, text: str) -> str:
        """The file's text with the bug in it. Raises BadMutation unless the old text occurs exactly once."""
        count = text.count(self.old)
        if count != 1:
            raise BadMutation(self, f"the old text occurs {count} times in {self.file}, not once:\n{self.old}")
        return text.replace(self.old, self.new)
