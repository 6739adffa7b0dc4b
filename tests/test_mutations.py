"""The mutations: that their table fits the sources, and in the long profile that no mutant survives."""

from __future__ import annotations

import shutil
from collections import Counter

import pytest

from mutation_beds import ROOT
from mutation_row import BadMutation, Mutation
from mutations import MUTATIONS, run_mutations

FIRST = next(mutation for mutation in MUTATIONS if mutation.name.startswith("core-"))
REFERENCE = "python/disagg/reference/mapping.py"


def test_the_old_text_of_each_mutation_occurs_once_and_the_new_one_differs():
    for mutation in MUTATIONS:
        sound = (ROOT / mutation.file).read_text()
        assert mutation.mutated(sound) != sound, mutation.name


def test_the_names_of_mutations_are_unique_and_say_which_side_they_change():
    counts = Counter(mutation.name for mutation in MUTATIONS)
    assert [name for name, count in counts.items() if count > 1] == []
    sides = {"rust": "core-", "python": "reference-"}
    assert all(mutation.name.startswith(sides[mutation.file.split("/")[0]]) for mutation in MUTATIONS)


def test_no_two_mutations_are_the_same_change():
    changes = Counter((mutation.file, mutation.mutated((ROOT / mutation.file).read_text())) for mutation in MUTATIONS)
    assert max(changes.values()) == 1


@pytest.mark.parametrize(("text", "count"), [("", 0), ("a b a", 2)])
def test_a_text_that_is_not_there_once_is_an_error_with_the_mutation_and_the_text(text, count):
    mutation = Mutation("core-x", "why", "file.rs", "a", "b")
    with pytest.raises(BadMutation, match=f"core-x: the old text occurs {count} times in file.rs, not once:\na"):
        mutation.mutated(text)


@pytest.fixture
def cargo():
    if shutil.which("cargo") is None:
        pytest.skip("no cargo")


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("cargo", "shared")
def test_no_mutant_survives():
    lines: list[str] = []
    survivors = run_mutations(MUTATIONS, lines.append)
    assert [mutation.name for mutation in survivors] == []
    assert sum(": red, " in line for line in lines) == len(MUTATIONS)


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("cargo", "shared")
def test_a_change_without_effect_survives():
    """The counterpart of all the red ones: the script can tell."""
    harmless = [
        Mutation("core-harmless", "", FIRST.file, FIRST.old, f"{FIRST.old} // the same"),
        Mutation("reference-harmless", "", REFERENCE, "r = decode.engine_rank % d", "r = decode.engine_rank % (d)"),
    ]
    assert run_mutations(harmless, lambda line: None) == harmless


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("cargo", "shared")
@pytest.mark.parametrize(
    ("file", "old", "new", "problem"),
    [
        (FIRST.file, FIRST.old, "real: Some(no_such_name),", "does not compile"),
        (REFERENCE, "r = decode.engine_rank % d", "r = (", "pytest ended"),
        (REFERENCE, "r = decode.engine_rank % d", "r = decode.engine_rank % dd", "does not run: NameError"),
    ],
    ids=["rust", "syntax", "name"],
)
def test_a_mutant_that_does_not_build_or_run_is_an_error_and_not_red(file, old, new, problem):
    with pytest.raises(BadMutation, match=f"typo: {problem}"):
        run_mutations([Mutation("typo", "", file, old, new)], lambda line: None)
