# SPDX-License-Identifier: Apache-2.0
"""What each tenant has had, as lines of Prometheus text, in families of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from forebay.observe.metrics.histograms import histogram_text
from forebay.types.tenant import OTHER

if TYPE_CHECKING:
    from forebay.observe.metrics.tenant_accounts import TenantAccount

FAMILIES: Final = (
    ("forebay_tenant_worker_seconds", "counter", "Seconds that workers were busy for a tenant"),
    ("forebay_tenant_tokens", "counter", "Tokens of prompts and of answers of a tenant, as the model counts them"),
    ("forebay_tenant_refused", "counter", "Requests of a tenant that were refused, by the reason"),
    ("forebay_tenant_waiting_samples", "gauge", "Samples of a tenant in the queue"),
    ("forebay_tenant_queue_seconds", "histogram", "From submission of a request of a tenant to leaving the queue"),
)
"""Their names, kinds and descriptions."""


def tenant_lines(
    endpoint: str, version: str, tenants: Mapping[str, TenantAccount], in_queue: Mapping[str, int]
) -> list[bytes]:
    """Return the lines of each family for one endpoint.

    Args:
        tenants: The accounts of its tenants, by name.
        in_queue: Their waiting samples.
    """
    waiting: dict[str, int] = {}
    for name, rows in in_queue.items():
        known = name if name in tenants else OTHER
        waiting[known] = waiting.get(known, 0) + rows
    worker: list[str] = []
    tokens: list[str] = []
    refused: list[str] = []
    queue: list[str] = []
    for name, account in tenants.items():
        labels = f'{endpoint},tenant="{name}",{version}'
        worker.append(f"forebay_tenant_worker_seconds_total{{{labels}}} {account.worker_s}\n")
        tokens += [
            f'forebay_tenant_tokens_total{{{endpoint},kind="{kind}",tenant="{name}",{version}}} {count}.0\n'
            for kind, count in (("completion", account.completion_tokens), ("prompt", account.prompt_tokens))
            if account.prompt_tokens or account.completion_tokens
        ]
        refused += [
            f'forebay_tenant_refused_total{{{endpoint},reason="{reason}",tenant="{name}",{version}}} {count}.0\n'
            for reason, count in account.refused.items()
        ]
        queue.append(histogram_text(FAMILIES[-1][0], endpoint, f'tenant="{name}",{version}', account.queue_s))
    names = [*tenants, *(name for name in waiting if name not in tenants)]
    gauge = [
        f'forebay_tenant_waiting_samples{{{endpoint},tenant="{name}",{version}}} {waiting.get(name, 0)}.0\n'
        for name in names
    ]
    return ["".join(lines).encode() for lines in (worker, tokens, refused, gauge, queue)]
