# SPDX-License-Identifier: Apache-2.0
"""OpenTelemetry's metrics of servers of generative AI, as lines of Prometheus text, in families of their own.

Names, bounds and labels are those of its semantic conventions 1.41.1, in Prometheus' spelling. `server.address` and
`server.port` are left out: Prometheus has them as the label `instance`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from forebay.observe.metrics.histograms import Histogram, histogram_text

Kind = tuple[str, str, str]
"""The family, the operation, and the code of the error; empty for an answer."""

DURATION: Final = "gen_ai_server_request_duration_seconds"
TO_FIRST: Final = "gen_ai_server_time_to_first_token_seconds"
AFTER_FIRST: Final = "gen_ai_server_time_per_output_token_seconds"
FAMILIES: Final = (
    (DURATION, "histogram", "From submission of a request to its last token or its error"),
    (TO_FIRST, "histogram", "From submission of a request to its first token"),
    (AFTER_FIRST, "histogram", "Time of each token after the first ones"),
)
BOUNDS: Final = {
    DURATION: (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
    TO_FIRST: (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    AFTER_FIRST: (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5),
}


def histogram_of(times: dict[Kind, Histogram], kind: Kind) -> Histogram:
    """Return the histogram of a kind, which is new with the first value."""
    if kind not in times:
        times[kind] = Histogram(BOUNDS[kind[0]])
    return times[kind]


def gen_ai_lines(endpoint: str, version: str, times: Mapping[Kind, Histogram]) -> list[bytes]:
    """Return the lines of each family for one endpoint."""
    model = endpoint.removeprefix("endpoint=")
    about = f'gen_ai_provider_name="forebay",gen_ai_request_model={model},gen_ai_response_model={model}'
    lines: dict[str, list[str]] = {family: [] for family in BOUNDS}
    for (family, operation, error), histogram in times.items():
        failed = f'error_type="{error}",' if error else ""
        labels = f'{endpoint},{failed}gen_ai_operation_name="{operation}",{about}'
        lines[family].append(histogram_text(family, labels, version, histogram))
    return ["".join(some).encode() for some in lines.values()]
