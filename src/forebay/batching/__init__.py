# SPDX-License-Identifier: Apache-2.0
"""Which requests travel together, and when."""
