# SPDX-License-Identifier: Apache-2.0
"""Recordings of what ran when, and spans."""
