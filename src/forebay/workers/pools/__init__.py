# SPDX-License-Identifier: Apache-2.0
"""Pools of workers: on the loop, in threads, in processes, and those that others started."""
