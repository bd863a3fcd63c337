# SPDX-License-Identifier: Apache-2.0
"""Work that holds Python's lock from its first turn to its last."""


def spin(turns: int) -> int:
    value = 1
    for _ in range(turns):
        value = value * 31 & 0xFFFF
    return value
