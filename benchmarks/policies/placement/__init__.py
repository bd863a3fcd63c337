# SPDX-License-Identifier: Apache-2.0
"""Where the queue of a model stands when it has many fronts and many workers: five designs, simulated."""
