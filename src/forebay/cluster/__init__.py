# SPDX-License-Identifier: Apache-2.0
"""Programs and servers that know of each other: the directory of what runs where."""
