# SPDX-License-Identifier: Apache-2.0
"""Numbers: counted on the hot path, added up, and shown as Prometheus text."""
