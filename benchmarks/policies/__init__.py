# SPDX-License-Identifier: Apache-2.0
"""The auto policy beside hand-set sizes and waits."""
