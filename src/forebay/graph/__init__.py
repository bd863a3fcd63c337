# SPDX-License-Identifier: Apache-2.0
"""Several models as one: what a graph is, how one request runs through it, and how it becomes an endpoint."""
