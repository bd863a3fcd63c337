# SPDX-License-Identifier: Apache-2.0
"""Other servers that we ask: who is asked next, within which time, over HTTP and gRPC, in the KServe protocol."""
