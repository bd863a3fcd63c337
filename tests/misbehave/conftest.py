# SPDX-License-Identifier: Apache-2.0
"""What the tests of misbehaving models share: one event loop for a place, and all of its cells in it."""

from __future__ import annotations

import asyncio
import os

import pytest
from tests.misbehave import catalogue, models, observing, rigs
from tests.misbehave.who import cells, who

from forebay.errors import ModelError
from forebay.server.config import Overrides
from forebay.surfaces.native.model_endpoint import serve_model
from forebay.surfaces.pipeline.dag import served_graph
from forebay.workers.pools import inline
from forebay.workers.processes import supervisor

IS_FULL = os.environ.get("MISBEHAVE") == "all"


@pytest.fixture
def surroundings(tmp_path, monkeypatch):
    """Where workers find what they need, and how soon they are replaced."""
    monkeypatch.setenv(catalogue.FOLDER, str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(rigs.ROOT))
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(supervisor, "MAX_PAUSE_S", 0.02)
    monkeypatch.setattr(inline, "CANCEL_S", 0.05)
    monkeypatch.setattr(served_graph, "STUCK_S", rigs.STUCK_S)
    # Otherwise it depends on how soon there is another process whether the neighbours of what ends one are hurt.
    monkeypatch.setattr(served_graph, "HANDOVER_S", 0.0)
    return tmp_path


@pytest.fixture
def differences(surroundings):
    """Tries the cells of a place; returns those where somebody else was hurt than the table says."""

    async def run(kind, place):
        found = {}
        async with rigs.rig_of(kind, place, surroundings) as rig:
            for number in cells(kind, place, is_full=IS_FULL):
                way = catalogue.WAYS[number]
                declared = who(way, kind, place)
                with observing.sheltered():
                    seen = await observing.observe(rig, number, surroundings, declared)
                is_leaving = way.name == "thread_signals" and (seen, declared) == ("-", "-w")  # not noticed yet
                if seen != declared and not is_leaving:
                    found[way.name] = f"{seen}, not {declared}"
        return found

    return lambda kind, place: asyncio.run(run(kind, place))


@pytest.fixture
def lives(surroundings, monkeypatch):
    """Starts and stops a model that does a way where it is loaded or unloaded; returns who was hurt."""

    async def run(kind, number):
        served = serve_model(models.Loaded, Overrides(worker_kind=kind))
        try:
            await served.endpoint.start()
        except ModelError as error:
            return "E" if error.message else "an error that says nothing"
        finally:
            await asyncio.wait_for(served.endpoint.drain(0.0), rigs.PATIENCE_S)
        return "-"

    def begin(kind, number):
        monkeypatch.setenv(catalogue.WAY, str(number))
        with observing.sheltered():
            catalogue.again()
            return asyncio.run(run(kind, number))

    return begin
