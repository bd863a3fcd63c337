# SPDX-License-Identifier: Apache-2.0
"""Calls of the user's code: the boundary that they all pass, and what may hang, wait or print in them."""
