# SPDX-License-Identifier: Apache-2.0
"""Who runs the batches: the loop, threads, processes, and workers that dial in."""
