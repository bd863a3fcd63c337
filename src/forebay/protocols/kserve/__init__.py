# SPDX-License-Identifier: Apache-2.0
"""The KServe v2 inference protocol as a codec: tensors and calls to bytes and back, over gRPC and HTTP; no I/O.

Values are in `calls`, messages of protobuf in `messages` (with `contents`, where elements stand one by one), JSON is in
`rest`. As a client, `rpc` speaks protobuf through its library. As a server, `wire` reads requests from their bytes by
hand, so that tensors are views of them, and `written` writes responses in pieces; `places` is for tensors
that lie in shared memory.
"""
