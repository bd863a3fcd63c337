# SPDX-License-Identifier: Apache-2.0
"""Measure forebay beside other model servers; `README.md` says how to run it."""
