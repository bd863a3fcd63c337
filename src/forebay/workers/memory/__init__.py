# SPDX-License-Identifier: Apache-2.0
"""Memory that processes share, and memory that is kept for the next batch."""
