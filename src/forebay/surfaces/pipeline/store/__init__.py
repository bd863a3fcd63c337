# SPDX-License-Identifier: Apache-2.0
"""Values that are too large to be handed on."""
