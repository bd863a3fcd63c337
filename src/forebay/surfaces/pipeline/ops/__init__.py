# SPDX-License-Identifier: Apache-2.0
"""What a project writes, and what runs it: ops, their hooks in the forms of every version, the batches they work on."""
