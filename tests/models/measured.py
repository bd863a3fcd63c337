# SPDX-License-Identifier: Apache-2.0
"""A composition of two functions."""

import forebay
from forebay import node


@node
def length(text: str) -> int:
    return len(text)


@node
def squared(number: int) -> int:
    return number * number


@forebay.compose
def measured(text: str) -> int:
    return squared(length(text))
