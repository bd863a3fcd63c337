# SPDX-License-Identifier: Apache-2.0
"""What runs the batches: the loop, threads, processes, and workers that dial in."""
