# SPDX-License-Identifier: Apache-2.0
"""The tenants of a server, and how they travel to the owner of a model."""

import msgspec
import pytest

from forebay.owners.wire import HandedOn
from forebay.transports.api_keys import KeyHolders
from forebay.types.tenant import MAX_TENANTS, OTHER, ApiKeys, TenantConfig, Tenants, name_of_tenant


def test_a_request_may_wish_for_a_less_urgent_class_and_for_no_other():
    tenants = Tenants({"a": TenantConfig(tier=1, weight=3.0)})
    assert (tenants.of("a").tier, tenants.of("a", 0).tier, tenants.of("a", 3).tier) == (1, 1, 3)
    assert tenants.of("a") is tenants.of("a")
    assert (tenants.of("b").tier, tenants.of("b").weight) == (1, 1.0)


def test_what_tenants_may_have_changes_for_those_that_are_known():
    tenants = Tenants({"a": TenantConfig(weight=3.0)})
    known, later = tenants.of("a"), tenants.of("a", 2)
    tenants.configure({"a": TenantConfig(weight=2.0, tier=1)})
    assert (known.weight, known.tier, later.tier) == (2.0, 1, 2)
    assert known.deadline_s == float("inf")
    tenants.configure({"a": TenantConfig(deadline_ms=200)})
    assert known.deadline_s == later.deadline_s == 0.2
    tenants.configure({})
    assert (known.weight, known.tier) == (1.0, 1)


def test_the_number_of_tenants_is_bounded():
    tenants = Tenants(are_named=True)
    for number in range(MAX_TENANTS + 100):
        tenants.of(str(number))
    assert len(tenants._known) <= MAX_TENANTS + 1
    assert tenants.of("one more").name == OTHER
    assert tenants.of("5").name == "5"


@pytest.mark.parametrize("name", ["", "a b", "x" * 65, "other", "\u00e4", "a\n"])
def test_not_every_text_is_the_name_of_a_tenant(name):
    with pytest.raises(ValueError, match="expected a tenant name of"):
        name_of_tenant(name)


def test_the_holder_of_a_key_is_its_name_and_a_plain_list_has_none():
    keys = ApiKeys([("a", "k1"), ("b", "k2"), ("a", "k3"), ("", "k4")])
    holders = KeyHolders(keys)
    names = [holders.of([key]) for key in (b"k1", b"Bearer k2", b"k3", b"k4", b"k5", b"")]
    assert [one and one.name for one in names] == ["a", "b", "a", None, None, None]
    assert holders.of([b"none", b"k2"]) is keys.tenants.of("b")
    assert keys.tenants.are_told_apart
    assert not KeyHolders(("k1",))
    assert not ApiKeys([("", "k1")]).tenants.are_told_apart


def test_a_request_on_its_way_to_its_owner_has_its_tenant_if_there_is_one():
    told = 1, b"p", 1, 2.5, "id", "", 7
    read = msgspec.msgpack.Decoder(HandedOn).decode
    assert read(msgspec.msgpack.encode(told)).tenant == ""
    found = read(msgspec.msgpack.encode((*told, "a", 2)))
    assert (found.tenant, found.tier, found.is_due) == ("a", 2, False)
    assert read(msgspec.msgpack.encode((*told, "", 0, True))).is_due
    for tenant, tier in (("x" * 65, 1), ("a", 4), ("a", -1)):
        with pytest.raises(msgspec.ValidationError):
            read(msgspec.msgpack.encode([*told, tenant, tier]))
