# SPDX-License-Identifier: Apache-2.0
"""Codecs of wire formats: bytes to requests, outcomes to bytes; no I/O."""
