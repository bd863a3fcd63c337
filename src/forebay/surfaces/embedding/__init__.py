# SPDX-License-Identifier: Apache-2.0
"""Models served from within another program: mounted in its application, or on a port of their own."""
