# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry's metrics of servers of generative AI have its names, units, bounds and attributes. Issue 48"""

import json
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.metrics_page import whole_page

from forebay.observe.metrics.endpoint_metrics import EndpointMetrics
from forebay.observe.metrics.exposition import Exposition, Reading
from forebay.observe.metrics.gen_ai_families import FAMILIES, histogram_of
from forebay.protocols.openai.doors import DOORS
from forebay.transports.http.openai import OPERATIONS

KNOWN = json.loads(Path(__file__).with_name("gen_ai_server.json").read_text())
OURS = {"endpoint", "version", "le"}
"""Labels that all metrics here have, and one of every histogram."""


def spelled(name):
    return name.replace(".", "_")


@pytest.fixture(scope="module")
def families():
    """Those on a page with an answer and an error of each kind."""
    metrics = EndpointMetrics()
    for family, _, _ in FAMILIES:
        histogram_of(metrics.gen_ai, (family, "chat", "")).observe(0.03)
    histogram_of(metrics.gen_ai, (FAMILIES[0][0], "chat", "internal")).observe(0.03)
    page, _ = whole_page(Exposition(lambda: [Reading("words", "1", metrics, 0, 0, 1, 0)], lambda one: one))
    found = {family.name: family for family in text_string_to_metric_families(page.decode())}
    return {name: family for name, family in found.items() if name.startswith("gen_ai_")}


def test_they_have_these_names_units_and_bounds(families):
    units = {"s": "seconds"}
    assert set(families) == {f"{spelled(name)}_{units[one['unit']]}" for name, one in KNOWN["metrics"].items()}
    for name, one in KNOWN["metrics"].items():
        family = families[f"{spelled(name)}_seconds"]
        bounds = {float(sample.labels["le"]) for sample in family.samples if sample.name.endswith("_bucket")}
        assert (family.type, bounds) == (one["instrument"], {*one["boundaries"], float("inf")}), name


def test_they_have_these_attributes(families):
    needed = {spelled(name) for name, level in KNOWN["attributes"].items() if level == "required"}
    needed.add("gen_ai_request_model")
    for name, one in KNOWN["metrics"].items():
        for sample in families[f"{spelled(name)}_seconds"].samples:
            labels = set(sample.labels) - OURS
            assert needed <= labels <= set(map(spelled, KNOWN["attributes"]))
            assert "error_type" not in labels or "error.type" in one["attributes"]


def test_operations_are_called_as_there_but_for_ranks_scores_and_audio():
    ours = {OPERATIONS.get(door.spoken, door.spoken) for door in DOORS}
    assert ours - {*KNOWN["gen_ai.operation.name"]} == {"rerank", "speech", "transcription"}


def test_the_provider_is_none_of_theirs(families):
    (provider,) = {sample.labels["gen_ai_provider_name"] for one in families.values() for sample in one.samples}
    assert provider == "forebay"
    assert provider not in KNOWN["gen_ai.provider.name"]
