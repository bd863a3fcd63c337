# SPDX-License-Identifier: Apache-2.0
"""Model classes: what a user's class says, and the runner that calls it."""
