# SPDX-License-Identifier: Apache-2.0
"""A request whose head is remembered belongs to the tenant, and to the child of it, that its own headers name."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.transports.http.driven import Door, request

from forebay.types.tenant import ApiKeys

HEADER = "x-llm-d-inference-fairness-id"
KEYS = [("one", "k1"), ("two", "k2"), ("", "k3")]

HEADS = st.tuples(
    st.sampled_from(["k1", "k1", "k2", "k3", "no key"]),
    st.lists(st.sampled_from(["a", "a", "b", "", "x" * 129, "a\tb"]), max_size=2),
    st.booleans(),
)


def made():
    """A door whose keys have names."""
    return Door(api_keys=ApiKeys(KEYS, child_header=HEADER))


def asked(door, head):
    """Send a request with a head on a new connection; return whose it was, and how it was answered."""
    key, children, is_first = head
    named = [f"{HEADER}: {child}" for child in children]
    headers = [*named, f"x-api-key: {key}"] if is_first else [f"x-api-key: {key}", *named]
    before = len(door.alpha.asked)
    client = door.connect().send(request("alpha", b"1", *headers))
    door.turn()
    door.pass_seconds(3)  # refusals may wait for a moment
    door.turn()
    tenants = [one.tenant and (one.tenant.name, one.tenant.child) for one in door.alpha.asked[before:]]
    return tenants, client.statuses


def expected(head):
    key, children, _ = head
    name = {one: name for name, one in KEYS}.get(key)
    if name is None:
        return [], [401]
    if name and (len(children) > 1 or any(len(child) > 128 or not child.isprintable() for child in children)):
        return [], [400]
    return [(name, *children) if children else (name, "")] if name else [None], [200]


@settings(max_examples=60, deadline=None)
@given(heads=st.lists(HEADS, min_size=2, max_size=12))
def test_a_remembered_head_has_the_tenant_and_the_child_of_one_never_seen(heads):
    door = made()
    try:
        for head in heads:
            fresh = made()
            try:
                assert asked(door, head) == asked(fresh, head) == expected(head)
            finally:
                fresh.close()
    finally:
        door.close()
