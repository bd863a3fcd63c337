# SPDX-License-Identifier: Apache-2.0
"""What /openapi.json says is what the server does: schemathesis makes requests from it and checks every answer."""

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

PREDICT = "/models/weigh"
CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]


@pytest.fixture(scope="module")
def server(launch):
    return launch("fuzzed.py", "--worker-kind", "thread", "--max-body-bytes", "100000")


@pytest.fixture(scope="module")
def document(server):
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def operations(document):
    found = [result.ok() for result in document.get_all_operations()]
    assert {operation.path for operation in found} >= {"/", PREDICT, "/models", "/healthz", "/metrics"}
    return found


def checked(cases, examples):
    """Makes requests and holds each answer against the document."""

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.function_scoped_fixture],
    )
    @given(case=cases)
    def run(case):
        response = case.call()
        case.validate_response(response, checks=CHECKS)
        assert response.status_code < 500 or response.status_code in {503, 504}  # a millisecond may be too short
        statuses.append(response.status_code)

    statuses = []
    run()
    return statuses


def test_every_answer_is_one_that_the_document_promises(document):
    for operation in operations(document):
        statuses = checked(operation.as_strategy(), 40 if operation.method == "post" else 3)
        assert 200 in statuses, operation.label


def test_what_breaks_the_document_is_refused_as_it_promises(document):
    for operation in operations(document):
        if operation.method == "post":
            statuses = checked(operation.as_strategy(generation_mode=GenerationMode.NEGATIVE), 60)
            assert {400, 422} & set(statuses)
