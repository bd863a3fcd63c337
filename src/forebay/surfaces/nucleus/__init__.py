# SPDX-License-Identifier: Apache-2.0
"""Projects written for the Nucleus model server: a `nucleus.yaml` and a `Handler` class, served unchanged."""
