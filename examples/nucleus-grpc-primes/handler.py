# SPDX-License-Identifier: Apache-2.0
"""Prime numbers over gRPC streams: without end in one direction, question by question in both."""

import itertools
import math


class Handler:
    def __init__(self, proto_module_pb2):
        self.pb = proto_module_pb2

    def Count(self, payload):
        """Each prime is sent when it is found; the generator is closed once the client has seen enough."""
        for number in itertools.count(max(payload.number, 2)):
            if smallest_factor(number) == number:
                yield self.pb.Prime(number=number)

    def Check(self, payload):
        """The messages of the client are an iterator; each is answered before the next is asked for."""
        for message in payload:
            yield self.pb.Verdict(number=message.number, factor=smallest_factor(message.number))


def smallest_factor(number):
    return next((one for one in range(2, math.isqrt(max(number, 0)) + 1) if number % one == 0), number)
