# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry's metrics of models that speak OpenAI's protocol, as a page of metrics has them."""

from prometheus_client.parser import text_string_to_metric_families

DURATION, TO_FIRST, AFTER_FIRST = "request_duration", "time_to_first_token", "time_per_output_token"


def times_on(page, model):
    """How many values each histogram of a model has and their sum, by what it is of, the operation and the error."""
    found = {}
    for family in text_string_to_metric_families(page):
        what = family.name.removeprefix("gen_ai_server_").removesuffix("_seconds")
        for sample in family.samples:
            labels = sample.labels
            is_one = what in (DURATION, TO_FIRST, AFTER_FIRST) and not sample.name.endswith("_bucket")
            if not is_one or labels["endpoint"] != model:
                continue
            assert labels["gen_ai_provider_name"] == "forebay"
            assert labels["gen_ai_request_model"] == labels["gen_ai_response_model"] == model
            kind = what, labels["gen_ai_operation_name"], labels.get("error_type", "")
            place = ("count", "sum").index(sample.name.rpartition("_")[2])
            found.setdefault(kind, [0.0, 0.0])[place] = sample.value
    return found


def added(before, now):
    """What has been added to each, counts and sums."""
    each = {kind: [one - other for one, other in zip(now[kind], before.get(kind, (0, 0)), strict=True)] for kind in now}
    return {kind: tuple(some) for kind, some in each.items() if some[0]}
