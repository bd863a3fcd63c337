# SPDX-License-Identifier: Apache-2.0
"""What holds of designs that `benchmarks.policies.placement` simulates, and what theory says of the simplest one."""

import math
from dataclasses import replace
from pathlib import Path

import pytest
from benchmarks.policies.placement.offers import Offers
from benchmarks.policies.placement.own_workers import OwnWorkers
from benchmarks.policies.placement.owner import OneOwner, OneOwnerAhead, OneQueue
from benchmarks.policies.placement.picture import picture
from benchmarks.policies.placement.scenario import BatchCost, Scenario
from benchmarks.policies.placement.tables import DESIGNS, design_table, fleet_table, fleets, traffic_table
from benchmarks.policies.placement.two_choices import TwoChoices

ROOT = Path(__file__).parents[3]
WITH_NETWORK = (OwnWorkers, Offers, OneOwner, OneOwnerAhead, TwoChoices)
SMALL = Scenario(cost=BatchCost(0.010, 0.0002, 64), fronts=4, workers=8, load=0.5, requests=6_000)
ROWS = [replace(SMALL, load=load) for load in (0.1, 0.5, 0.95)]
ROWS += [
    replace(SMALL, load=0.6, burst=3.0),
    replace(SMALL, fronts=16, workers=16, load=0.8, shards=3, frame_s=5e-6, seat_s=0.9e-6),
]


@pytest.mark.parametrize("design", [OneQueue, *WITH_NETWORK])
@pytest.mark.parametrize("row", ROWS, ids=str)
def test_every_request_is_run_and_answered_once(design, row):
    simulation = design(row)
    simulation.run()
    assert sum(simulation.batch_sizes) == row.requests
    assert max(simulation.batch_sizes) <= row.cost.max_size
    assert min(simulation.latencies_s) >= row.cost.seconds(1) * (1 - row.jitter / 2)
    assert not any(map(math.isnan, simulation.latencies_s))


@pytest.mark.parametrize("design", WITH_NETWORK)
@pytest.mark.parametrize("row", ROWS[:3], ids=lambda row: f"load {row.load}")
def test_no_design_is_quicker_than_one_queue_without_a_network(design, row):
    assert design(row).run().mean_ms > 0.99 * OneQueue(row).run().mean_ms


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_one_worker_without_batches_waits_as_queueing_theory_says(load):
    took_s = 0.010
    row = Scenario(cost=BatchCost(took_s, 0.0, 1), fronts=1, workers=1, load=load, jitter=0.0, requests=60_000, seed=3)
    waiting_s = load * took_s / (2 * (1 - load))  # Pollaczek and Khinchine, for an M/D/1 queue
    assert OneQueue(row).run().mean_ms == pytest.approx((took_s + waiting_s) * 1e3, rel=0.03)


def test_bursts_have_the_rate_that_is_named():
    row = replace(SMALL, burst=3.0, requests=400_000)
    *_, (_, ends_s) = row.arrivals()
    assert row.requests / ends_s == pytest.approx(row.rate, rel=0.1)
    assert {front for front, _ in row.arrivals()} == {0, 1, 2, 3}


def test_a_way_through_an_owner_costs_four_messages_and_its_time():
    row = replace(SMALL, cost=BatchCost(0.010, 0.0, 1), load=0.001, jitter=0.0, requests=100)
    result = OneOwner(row).run()
    assert result.messages == 4
    assert result.p50_ms == pytest.approx(10 + 4 * 0.1)
    assert OneQueue(row).run().p50_ms == pytest.approx(10)


def test_an_owner_is_as_busy_as_its_frames_and_requests_make_it():
    row = replace(SMALL, cost=BatchCost(0.010, 0.0, 1), load=0.3, requests=2_000, frame_s=5e-6, seat_s=1e-6)
    assert OneOwner(row).run().cpu == pytest.approx(row.rate * (4 * 5e-6 + 1e-6), rel=0.1)


def test_the_seed_makes_the_numbers():
    assert Offers(SMALL).run() == Offers(SMALL).run()
    assert Offers(SMALL).run() != Offers(replace(SMALL, seed=2)).run()


def test_tables_and_picture_have_all_designs():
    def simulate(design, row):
        return design(replace(row, requests=200)).run()

    *_, last = design_table(ROWS[:1], simulate)
    assert last.count(" / ") == len(DESIGNS)
    (small, *_) = fleets(seed=1, requests=200)
    for table in (fleet_table, traffic_table):
        heads, _, row = (line.count("|") for line in table([small], simulate))
        assert heads == row
    lines = {design.name: [(0.1, 13.0), (0.9, 30.0)] for design in DESIGNS}
    drawn = picture("a title", {"p50": lines})
    assert drawn.count("<polyline") == len(DESIGNS)
    assert all(f">{design.name}</text>" in drawn for design in DESIGNS)


def test_the_page_has_the_figures_of_the_simulation():
    page, results = (
        (ROOT / name).read_text().splitlines()
        for name in ("docs/explanation/one-queue.md", "benchmarks/policies/RESULTS-placement.md")
    )
    shown = [line for line in page if line.startswith("|")]
    assert len(shown) > 30
    assert set(shown) <= set(results)
