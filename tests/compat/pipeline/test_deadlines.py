# SPDX-License-Identifier: Apache-2.0
"""A pipeline refuses on arrival what its ops have no time for: whatever waits at any of them counts."""

from __future__ import annotations

import asyncio
import time

import pytest
from tests.compat.pipeline.conftest import answer_of, ask, values_of
from tests.waiting import reached

from forebay.errors import TooLate
from forebay.surfaces.pipeline import Op, RequestOp
from forebay.surfaces.pipeline.protocol.messages import Request
from forebay.types.tenant import TenantConfig, Tenants

SLOW_S = 0.2
began_with: list[str] = []


class Slow(Op):
    def preprocess(self, input_dicts, data_id, log_id):
        (values,) = input_dicts.values()
        began_with.append(values["x"])
        time.sleep(SLOW_S)
        return values, False, None, ""


def chain():
    return Slow(name="b", input_ops=[Slow(name="a", input_ops=[RequestOp()])])


@pytest.mark.parametrize("config", [None, {"dag": {"retry": 3}}])
def test_what_two_ops_have_no_time_for_is_refused_as_it_comes(hosted, config):  # P90
    began_with.clear()

    async def use(service):
        values_of(await ask(service, x="a"))  # what a batch takes is known from now on
        inside = asyncio.ensure_future(ask(service, x="b"))
        await reached(lambda: "b" in began_with)
        began = time.monotonic()
        with pytest.raises(TooLate) as refused:
            await ask(service, 2.5 * SLOW_S, x="c")  # at each op it would be the second: three times in all
        assert time.monotonic() - began < SLOW_S
        assert 0.0 < refused.value.after_s < SLOW_S
        assert refused.value.retry_at > began
        values_of(await inside)

    hosted(chain(), use, config)


def test_the_deadline_of_a_tenant_holds_where_a_request_states_none(hosted):  # P90
    tenant = Tenants({"one": TenantConfig(deadline_ms=1)}).of("one")

    async def use(service):
        asked = Request(key=["x"], value=["a"])
        late = await service.answer(asked, deadline=float("inf"), peer="", tenant=tenant)
        assert late.err_no == 6000
        values_of(await answer_of(service, asked))

    hosted(chain(), use)


def test_a_process_refuses_nothing_that_its_server_has_let_in(hosted):  # P90
    async def use(service):
        for _ in range(2):
            asked = Request(key=["x"], value=["a"])
            late = await service.answer(asked, deadline=time.monotonic() + 0.01, peer="", came=time.monotonic())
            assert late.err_no == 6000
            values_of(await ask(service, x="b"))

    hosted(chain(), use)
