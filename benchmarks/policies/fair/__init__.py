# SPDX-License-Identifier: Apache-2.0
"""Tenants that share a queue: what each gets, simulated with the queue of the server, and what that costs."""
