# SPDX-License-Identifier: Apache-2.0
"""How a function is called, whatever its annotations name."""

import typing

import pytest

from forebay.types.call_signature import as_written, signature_of

LATE = """
def late(one: Nowhere, two: list[Nowhere] = None) -> dict[str, Nowhere]:
    pass
"""


def test_a_name_that_is_not_there_is_no_reason_not_to_tell_the_parameters():
    names = {}
    exec("from __future__ import annotations\n" + LATE, names)
    assert list(signature_of(names["late"]).parameters) == ["one", "two"]
    try:
        exec(LATE, names)
    except NameError:
        return  # before Python 3.14
    assert list(signature_of(names["late"]).parameters) == ["one", "two"]
    assert as_written(signature_of(names["late"])) == "(one: Nowhere, two: list[Nowhere] = None) -> dict[str, Nowhere]"


@pytest.mark.parametrize(
    "annotation, text",
    [
        ("Nowhere", "Nowhere"),
        (typing.ForwardRef("Nowhere"), "Nowhere"),
        (list[typing.ForwardRef("a.B")], "list[a.B]"),
        ("ForwardRef('X', owner=<function f at 0x7f>) | ForwardRef('Y', is_class=True)", "X | Y"),
        (dict[str, int], "dict[str, int]"),
    ],
)
def test_forward_references_are_the_names_that_were_written(annotation, text):
    assert as_written(annotation) == text
