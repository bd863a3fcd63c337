# SPDX-License-Identifier: Apache-2.0
"""Asks the service as any client of gRPC would; the first argument says where it is."""

import sys

import grpc

messages, services = grpc.protos_and_services("iris.proto")  # compiled here and now, by grpcio-tools

with grpc.insecure_channel(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8080") as channel:
    stub = services.IrisStub(channel)
    flower = messages.Flower(sepal_length=5.2, sepal_width=3.6, petal_length=1.4, petal_width=0.3)
    answer = stub.Classify(flower, timeout=30)
    print(f"{answer.name} ({answer.score:.2f})")
    try:
        stub.Classify(messages.Flower(sepal_length=5.2), timeout=30)
    except grpc.RpcError as error:
        print(f"{error.code().name}: {error.details()}")
