# SPDX-License-Identifier: Apache-2.0
"""Processes that workers live in: how they start, what they are tied to, and what ends with them."""
