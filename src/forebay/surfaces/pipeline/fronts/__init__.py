# SPDX-License-Identifier: Apache-2.0
"""The two ports of a pipeline and its clients."""
