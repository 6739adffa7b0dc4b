"""Every case from practice of areas 2, 5 and X is named by a test: grep for its id to find what proves it."""

from __future__ import annotations

import ast
import re

import pytest

from conftest import ROOT, shared_folder

CASE = re.compile(r"\b(?:A[25]-\d{2}|X-\d{2})\b")
HEADING = re.compile(r"^(?:\*\*|- \*\*)(A[25]-\d{2}|X-\d{2})\b", re.MULTILINE)


def cases():
    document = shared_folder() / "CASES.md"
    return sorted(set(HEADING.findall(document.read_text()))) if document.is_file() else []


@pytest.fixture(scope="module")
def proven():
    """Which tests name which case, in their docstring or in that of their module."""
    found = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        module = ast.parse(path.read_text())
        functions = [
            node for node in module.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        ]
        for function in functions:
            for case in CASE.findall(ast.get_docstring(function) or ""):
                found.setdefault(case, []).append(f"{path.name}::{function.name}")
    return found


@pytest.mark.parametrize("case", cases())
def test_case_is_named_by_a_test(proven, case):
    assert proven.get(case), f"no test's docstring names {case}"


def test_tests_name_no_case_that_does_not_exist(shared, proven):
    assert set(proven) <= set(cases())
    assert len(cases()) >= 30, "the document was read"
