# SPDX-License-Identifier: Apache-2.0
"""What a worker and its server say to each other, and the sockets by which they do."""
