# SPDX-License-Identifier: Apache-2.0
"""Values that travel through every layer: no I/O, no loop, no clock."""
