# SPDX-License-Identifier: Apache-2.0
"""From ops to a running graph: how they are wired, where they run, and the way of one request through them."""
