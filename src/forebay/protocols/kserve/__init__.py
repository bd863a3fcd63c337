# SPDX-License-Identifier: Apache-2.0
"""The KServe v2 inference protocol as a codec: tensors and calls to bytes and back, over gRPC and HTTP; no I/O.

    dtypes    what the data types are called and how they lie in memory
    calls     requests, responses and tensors as values; a tensor's data is always raw bytes
    arrays    tensors from and to NumPy
    messages  the protobuf messages
    rpc       calls to and from protobuf bytes, with raw or typed contents
    rest      calls to and from JSON, with or without the binary tensor extension

What a client needs stands here: requests are encoded, responses are decoded.
"""
