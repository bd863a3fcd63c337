# SPDX-License-Identifier: Apache-2.0
"""Makes the model's row of a file: its head and its tail, without the white space around it."""

import numpy as np
from pyovms import Tensor

BLOCK = 4096
END = 1024
PADDING = 256


class OvmsPythonModel:
    def execute(self, inputs):
        content = bytes(inputs[0])
        head = np.frombuffer(content[:BLOCK].lstrip()[:END], np.uint8)
        tail = np.frombuffer(content[-BLOCK:].rstrip()[-END:], np.uint8)
        row = np.full((1, 2 * END), PADDING, np.int32)
        row[0, : len(head)] = head
        row[0, 2 * END - len(tail) :] = tail
        return [Tensor("row_py", row)]
