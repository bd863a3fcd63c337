# SPDX-License-Identifier: Apache-2.0
"""A diamond whose nodes do what a request asks of them: answer, raise, or be late. One node runs in processes."""

import time

import msgspec

import forebay
from forebay import node


class Order(msgspec.Struct):
    token: str
    wish: str = "answer"


class Part(msgspec.Struct):
    token: str
    by: str


def obey(order: Order, by: str) -> Part:
    if order.wish == f"raise in {by}":
        raise ValueError(f"{by} was asked to raise")
    if order.wish == f"be late in {by}":
        time.sleep(0.3)
    return Part(order.token, by)


@node(max_batch_size=16)
def read(order: Order) -> Order:
    return order


@node(worker_kind="process", workers=2, timeout_ms=2000, attempts=3)
def left(order: Order) -> Part:
    return obey(order, "left")


@node(workers=2)
def right(order: Order) -> Part:
    return obey(order, "right")


@node
def join(one: Part, other: Part) -> str:
    if one.token != other.token:
        raise AssertionError("two requests were mixed up")
    return one.token


@forebay.compose(max_in_flight=64, timeout_ms=10_000)
def diamond(order: Order) -> str:
    order = read(order)
    return join(left(order), right(order))
