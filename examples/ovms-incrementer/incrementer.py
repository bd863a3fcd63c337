# SPDX-License-Identifier: Apache-2.0
"""Adds one to what it is given, in whichever node of the graph it runs."""

import numpy as np
from pyovms import Tensor


def increment(input):
    output = np.array(input)
    output += 1
    return output


class OvmsPythonModel:
    # Assuming this code is used with nodes
    # that have single input and single output

    def initialize(self, kwargs):
        self.output_name = kwargs["output_names"][0]

    def execute(self, inputs):
        my_input = inputs[0]
        my_output = Tensor(self.output_name, increment(my_input))
        return [my_output]
