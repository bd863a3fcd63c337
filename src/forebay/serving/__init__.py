# SPDX-License-Identifier: Apache-2.0
"""Models and the endpoints that answer for them."""
