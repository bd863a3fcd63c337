# SPDX-License-Identifier: Apache-2.0
"""What is left of the limits of a tenant."""

import pytest

from forebay.errors import Code, LimitReached, TooLarge, revive
from forebay.types.call import Request
from forebay.types.tenant import ALL, TenantConfig, Tenants
from forebay.types.tenant_limits import LimitsConfig, RateConfig, WorkerTimeConfig

REQUESTS = LimitsConfig(requests_per_s=RateConfig(rate=2, burst=3))


def limits_of(limits, fronts=1):
    tenants = Tenants({"a": TenantConfig(limits=limits)})
    tenants.divide(fronts)
    allowance = tenants.of("a").allowance
    assert allowance is not None
    return allowance


def asked(size=1):
    return Request("", lambda *_: None, size=size)


def refused(allowance, request, now, *, is_stream=False):
    with pytest.raises(LimitReached) as caught:
        allowance.admit(request, now, is_stream=is_stream)
    return caught.value


# F45: limits of a tenant
def test_requests_are_let_in_up_to_the_burst_and_then_at_the_rate():
    allowance = limits_of(REQUESTS)
    for _ in range(3):
        allowance.admit(asked(50), 10.0, is_stream=False)
    error = refused(allowance, asked(), 10.1)
    assert (error.limit, error.code) == ("requests", Code.RESOURCE_EXHAUSTED)
    assert error.retry_ms(10.1) in {400, 401}
    assert "'a'" in error.message
    allowance.admit(asked(), 10.5, is_stream=False)
    refused(allowance, asked(), 10.5)
    crossed = revive(error.kind, error.message, error.detail)
    assert isinstance(crossed, LimitReached)
    assert crossed.limit == "requests"


def test_who_is_refused_is_told_when_there_is_a_token_for_it_as_well():
    allowance = limits_of(REQUESTS)
    for _ in range(3):
        allowance.admit(asked(), 10.0, is_stream=False)
    moments = [refused(allowance, asked(), 10.0).retry_at for _ in range(100)]
    assert moments[:60] == pytest.approx([10.5 + number / 2 for number in range(60)])
    assert all(25.5 <= one <= 40.5 for one in moments[60:])  # none is sent away for longer than 30 s beyond the wait
    assert len(set(moments)) == 100
    for moment in moments[:6]:
        allowance.admit(asked(), moment, is_stream=False)
    rows = limits_of(LimitsConfig(rows_per_s=RateConfig(rate=10, burst=20)))
    rows.admit(asked(18), 0.0, is_stream=False)
    assert [refused(rows, asked(5), 0.0).retry_at for _ in range(3)] == pytest.approx([0.3, 0.8, 1.3])
    assert refused(rows, asked(5), 5.0 - 4.75).retry_at == pytest.approx(1.8)


def test_a_request_that_is_refused_uses_up_nothing():
    allowance = limits_of(
        LimitsConfig(requests_per_s=RateConfig(rate=1, burst=2), rows_per_s=RateConfig(rate=1, burst=8), open_streams=1)
    )
    allowance.admit(asked(6), 0.0, is_stream=True)
    assert refused(allowance, asked(4), 0.0).limit == "rows"
    assert refused(allowance, asked(2), 0.0, is_stream=True).limit == "open_streams"
    with pytest.raises(TooLarge, match="9 samples; at most 8"):
        allowance.admit(asked(9), 0.0, is_stream=False)
    allowance.admit(asked(2), 0.0, is_stream=False)
    assert refused(allowance, asked(), 0.0).limit == "requests"


def test_a_stream_is_open_until_its_request_is_answered():
    allowance = limits_of(LimitsConfig(open_streams=2))
    streams = [asked(), asked()]
    for request in streams:
        allowance.admit(request, 0.0, is_stream=True)
    refused(allowance, asked(), 0.0, is_stream=True)
    allowance.admit(asked(), 0.0, is_stream=False)
    for _ in range(2):  # a transport that fails is told again
        streams[0].reply(streams[0], None)
    assert allowance.streams == 1
    allowance.admit(asked(), 0.0, is_stream=True)


def test_worker_time_is_used_up_afterwards_and_comes_back():
    allowance = limits_of(LimitsConfig(worker_seconds_per_min=WorkerTimeConfig(rate=30, burst=2)))
    allowance.require_workers(1, 0, 0.0)
    allowance.worked(5.0, 0.0)
    with pytest.raises(LimitReached) as caught:
        allowance.require_workers(1, 0, 0.0)
    assert (caught.value.limit, caught.value.retry_at) == ("worker_seconds", 6.0)
    with pytest.raises(LimitReached) as caught:  # the one before it is taken to need 5 s as well
        allowance.require_workers(1, 0, 0.0)
    assert caught.value.retry_at == 16.0
    allowance.require_workers(1, 0, 6.0)


def test_samples_wait_up_to_a_level():
    allowance = limits_of(LimitsConfig(waiting_rows=10))
    allowance.require_workers(4, 6, 0.0)
    with pytest.raises(LimitReached, match=r"7 samples of the tenant .* wait, and at most 10 may"):
        allowance.require_workers(4, 7, 0.0)
    with pytest.raises(TooLarge, match="at most 10"):
        allowance.require_workers(11, 0, 0.0)


def test_each_of_several_fronts_lets_in_its_part():
    allowance = limits_of(LimitsConfig(requests_per_s=RateConfig(rate=8, burst=16), open_streams=3), fronts=4)
    for _ in range(4):
        allowance.admit(asked(), 0.0, is_stream=False)
    refused(allowance, asked(), 0.0)
    allowance.admit(asked(), 0.5, is_stream=True)
    assert refused(allowance, asked(), 1.0, is_stream=True).limit == "open_streams"


def test_classes_and_children_share_what_is_left_and_limits_that_stay_the_same_go_on():
    tenants = Tenants({ALL: TenantConfig(limits=REQUESTS), "b": TenantConfig()})
    one, other, child = tenants.of("a"), tenants.of("a", 3), tenants.of("a", 0, "kid")
    assert tenants.are_limited
    assert one.allowance is other.allowance is child.allowance is not None
    assert tenants.of("b").allowance is None
    assert tenants.of("c").allowance not in {None, one.allowance}
    before = one.allowance
    tenants.configure({"a": TenantConfig(weight=2.0, limits=REQUESTS)})
    assert one.allowance is before
    assert tenants.of("c").allowance is None
    tenants.configure({"a": TenantConfig(limits=LimitsConfig(open_streams=1))})
    assert before is not one.allowance is child.allowance
    tenants.configure({})
    assert (one.allowance, child.allowance, tenants.are_limited) == (None, None, False)


def test_what_is_left_is_said_as_structured_fields():
    limits = LimitsConfig(
        requests_per_s=RateConfig(rate=2, burst=3), rows_per_s=RateConfig(rate=10, burst=5), open_streams=2
    )
    allowance = limits_of(limits)
    streams = '"open_streams";q=2;qu="concurrent-requests"'
    assert allowance.policy == f'"requests";q=3;w=2, "rows";q=5;w=1;qu="rows", {streams}'
    assert allowance.left(0.0) == '"requests";r=3, "rows";r=5, "open_streams";r=2'
    allowance.admit(asked(5), 0.0, is_stream=True)
    assert allowance.left(0.0) == '"requests";r=2;t=1, "rows";r=0;t=1, "open_streams";r=1'
    assert allowance.left(0.4) == '"requests";r=2;t=1, "rows";r=4;t=1, "open_streams";r=1'
    slow = limits_of(LimitsConfig(requests_per_s=RateConfig(rate=0.1, burst=100)))
    for _ in range(50):
        slow.admit(asked(), 0.0, is_stream=False)
    assert slow.left(0.0) == '"requests";r=50;t=10'  # when the next one is there, not all of them
    assert limits_of(LimitsConfig(waiting_rows=5)).policy == ""
