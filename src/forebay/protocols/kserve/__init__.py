# SPDX-License-Identifier: Apache-2.0
"""The KServe v2 inference protocol as a codec: tensors and calls to bytes and back, over gRPC and HTTP; no I/O.

    calls     requests and responses as values; their tensors are those of `types.tensor`
    messages  the protobuf messages
    rpc       calls to and from protobuf bytes, with raw or typed contents
    rest      calls to and from JSON, with or without the binary tensor extension

What a client needs stands here: requests are encoded, responses are decoded.
"""
