# SPDX-License-Identifier: Apache-2.0
"""The recipe for inference gateways has only what both endpoint pickers read. Issue 48"""

import json
from pathlib import Path

import pytest
import yaml

from forebay.observe.metrics.exposition import GAUGES

RECIPES = Path(__file__).parents[3] / "examples/deploy"
KNOWN = json.loads(Path(__file__).with_name("pickers.json").read_text())


def names(what):
    return set(KNOWN[what]["names"])


@pytest.fixture
def values():
    return yaml.safe_load((RECIPES / "inference-gateway.yaml").read_text())


@pytest.fixture
def picker(values):
    extension = values["inferenceExtension"]
    return yaml.safe_load(extension["pluginsCustomConfig"][extension["pluginsConfigFile"]])


def test_the_chart_has_these_values(values):
    assert {f"{part}.{name}" for part, told in values.items() for name in told} <= names("values")


def test_the_picker_knows_its_plugins(picker):
    assert (picker["apiVersion"] in names("apiVersions"), picker["kind"]) == (True, "EndpointPickerConfig")
    plugins = {plugin["type"] for plugin in picker["plugins"]}
    assert plugins <= names("plugins")
    (profile,) = picker["schedulingProfiles"]
    assert {plugin["pluginRef"] for plugin in profile["plugins"]} == plugins - {"core-metrics-extractor"}


def test_the_picker_reads_our_gauges_of_one_model(picker):
    (found,) = (plugin["parameters"] for plugin in picker["plugins"] if "parameters" in plugin)
    (engine,) = found["engineConfigs"]
    assert set(found) <= names("extractor")
    assert set(engine) <= names("engine")
    assert engine.pop("name") == found["defaultEngine"]
    for spec in engine.values():
        metric, _, labels = spec.partition("{")
        assert (metric in GAUGES, labels) == (True, 'endpoint="chat"}'), spec


def test_the_route_leads_to_the_pool(values):
    route = yaml.safe_load((RECIPES / "inference-route.yaml").read_text())
    (rule,) = route["spec"]["rules"]
    (pool,) = rule["backendRefs"]
    assert {route["apiVersion"], route["kind"], pool["group"], pool["kind"]} == names("route")
    assert pool["name"] == values["inferencePool"]["modelServers"]["matchLabels"]["app"]
