# SPDX-License-Identifier: Apache-2.0
"""Graphs written as Python functions: their nodes, the types between them, and the border to the bytes of a request."""
