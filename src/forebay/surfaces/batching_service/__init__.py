# SPDX-License-Identifier: Apache-2.0
"""The original batching service: jobs come over HTTP, workers join over a socket and ask for them in batches."""
