"""Puts historical bugs of rank mapping back, one at a time, and expects the tests to be red for each.

`python tests/mutations.py [--list] [NAME...]`: all mutations of the tables, or the named ones; `core-*` are bugs in the
Rust core and run its unit tests, `reference-*` are bugs in `disagg.reference.mapping` and run the Python tests. Needs
cargo, and disagg installed. Works on copies. Exit status 1 if a mutant survived, 2 if a mutation proves nothing.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from mutation_beds import Broken, CoreBed, ReferenceBed, first_failure_of
from mutation_core_checks import CORE_CHECKS
from mutation_core_mapping import CORE_MAPPING
from mutation_reference import REFERENCE
from mutation_row import BadMutation, Mutation

MUTATIONS = [*CORE_MAPPING, *CORE_CHECKS, *REFERENCE]
BEDS = {"rust": CoreBed, "python": ReferenceBed}


def run_mutations(mutations: Iterable[Mutation], say: Callable[[str], None]) -> list[Mutation]:
    """Runs them and says how each went. Returns the survivors. Raises BadMutation, or Broken without a bug put in."""
    by_bed: dict[str, list[Mutation]] = {}
    for mutation in mutations:
        by_bed.setdefault(mutation.file.split("/")[0], []).append(mutation)
    survivors = []
    with tempfile.TemporaryDirectory(prefix="disagg-mutations-", ignore_cleanup_errors=True) as folder:
        for name, of_bed in by_bed.items():
            bed = BEDS[name](Path(folder, name))
            prove_green(bed, name, say)
            for number, mutation in enumerate(of_bed, start=1):
                began = time.monotonic()
                failed = first_failure_of(bed, mutation)
                if failed is None:
                    survivors.append(mutation)
                result = f"red, {failed}" if failed else f"SURVIVED: {mutation.why}"
                took = time.monotonic() - began
                say(f"{name} {number}/{len(of_bed)} ({took:.1f} s) {mutation.name}: {result}")
    return survivors


def prove_green(bed: CoreBed | ReferenceBed, name: str, say: Callable[[str], None]) -> None:
    began = time.monotonic()
    failed = bed.first_failure()
    if failed is not None:
        raise Broken(f"{name}: {failed} is red without a mutation")
    say(f"{name}: green without a mutation ({time.monotonic() - began:.1f} s)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print the mutations with their reasons and run none")
    parser.add_argument("names", nargs="*", metavar="NAME", help="run these only")
    options = parser.parse_args()
    unknown = set(options.names) - {mutation.name for mutation in MUTATIONS}
    if unknown:
        parser.error(f"no such mutation: {', '.join(sorted(unknown))} (see --list)")
    chosen = [mutation for mutation in MUTATIONS if not options.names or mutation.name in options.names]
    if options.list:
        for mutation in chosen:
            say_line(f"{mutation.name}: {mutation.why} ({mutation.file})")
        return 0
    # So that the copies and the processes go on SIGTERM too.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    try:
        survivors = run_mutations(chosen, say_line)
    except (BadMutation, Broken) as error:
        say_line(f"error: {error}")
        return 2
    except KeyboardInterrupt:
        return 130
    say_line(f"{len(chosen) - len(survivors)} of {len(chosen)} mutants are red")
    return 1 if survivors else 0


def say_line(text: str) -> None:
    print(text, flush=True)  # noqa: T201  (the output of a command)


if __name__ == "__main__":
    sys.exit(main())
