# SPDX-License-Identifier: Apache-2.0
"""The node process: the parent of servers and workers on one machine. It has no clients and runs no user code."""
