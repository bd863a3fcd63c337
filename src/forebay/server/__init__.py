# SPDX-License-Identifier: Apache-2.0
"""What one server is made of: options, endpoints, lifecycle."""
