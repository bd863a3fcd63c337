# SPDX-License-Identifier: Apache-2.0
from forebay.types.plurals import counted


def test_one_thing_is_not_several():
    assert [counted(number, "op") for number in range(3)] == ["0 ops", "1 op", "2 ops"]
    assert [counted(number, "process", "processes") for number in (1, 2)] == ["1 process", "2 processes"]
