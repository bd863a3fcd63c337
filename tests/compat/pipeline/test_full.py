# SPDX-License-Identifier: Apache-2.0
"""A full pipeline reads nothing of what it refuses."""

import pytest
from tests.compat.pipeline.fronts import Echo

from forebay.errors import QueueFull


@pytest.mark.parametrize("is_quick", [True, False])
def test_what_a_full_queue_refuses_is_not_read(monkeypatch, is_quick):  # F69
    echo = Echo()
    monkeypatch.setattr(echo.endpoint, "is_full", lambda: True)
    told = []
    found = echo.submit(
        lambda: pytest.fail("it was read"),
        is_quick=is_quick,
        deadline=1e9,
        peer="ipv4:192.0.2.1:7",
        respond=lambda found, asked: told.append((found, asked)),
    )
    assert found is None
    assert [(type(error), asked) for error, asked in told] == [(QueueFull, None)]
    assert echo.endpoint.metrics.codes[QueueFull.code] == 1
