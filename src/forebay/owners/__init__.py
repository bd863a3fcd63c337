# SPDX-License-Identifier: Apache-2.0
"""Servers that hand requests on to other servers: a front has the clients, an owner has the queue."""
