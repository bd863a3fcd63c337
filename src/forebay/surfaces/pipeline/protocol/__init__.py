# SPDX-License-Identifier: Apache-2.0
"""The wire of Pipeline Serving: its messages, the texts and tensors in them; no I/O."""
