# SPDX-License-Identifier: Apache-2.0
"""Takes ten primes of a stream without end, then asks about some numbers; the first argument says where."""

import itertools
import sys

import grpc

messages, services = grpc.protos_and_services("primes.proto")  # compiled here and now, by grpcio-tools

with grpc.insecure_channel(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:8080") as channel:
    stub = services.PrimesStub(channel)
    answers = stub.Count(messages.From(number=1000), timeout=30)
    print("from 1000:", *[prime.number for prime in itertools.islice(answers, 10)])
    answers.cancel()
    numbers = (messages.Number(number=number) for number in (97, 91, 2047, 8191))
    for verdict in stub.Check(numbers, timeout=30):
        is_prime = verdict.factor == verdict.number
        print(verdict.number, "is prime" if is_prime else f"has the factor {verdict.factor}")
