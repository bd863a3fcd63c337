# SPDX-License-Identifier: Apache-2.0
"""Movers of bytes."""
