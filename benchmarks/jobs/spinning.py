# SPDX-License-Identifier: Apache-2.0
"""A model that computes in pure Python in two threads, and two quick ones that share the server with it.

SWITCH_S in the environment is the interpreter's switch interval instead of the server's.
"""

import os
import sys
from typing import Any

from benchmarks.work.spin import spin

from forebay import Model


class Spin(Model):
    def load(self) -> None:
        if "SWITCH_S" in os.environ:
            sys.setswitchinterval(float(os.environ["SWITCH_S"]))

    def predict(self, samples: list[int]) -> list[int]:
        return [spin(turns) for turns in samples]


class Echo(Model):
    def predict(self, samples: list[Any]) -> list[Any]:
        return samples
