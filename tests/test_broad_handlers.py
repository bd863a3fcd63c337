# SPDX-License-Identifier: Apache-2.0
"""User code is called through one module: no other one catches everything, but for those that say here why."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent.parent / "src" / "forebay"

BOUNDARY = {"workers/user_calls/user_code.py", "types/user_exceptions.py", "types/failures.py"}

DEFECT = "a defect of ours must not leave others without an answer; what is the user's came through the boundary before"
FOREIGN = "reads what somebody else sent, with a library that fails in any way; the sender is told, or it is logged"
CARRIED = "carried over a thread or a library and raised again, or handed to whoever waits"
ELSEWHERE = (
    "asks another machine through Ray, whose errors are of many kinds; what it could not do is asked again, or told"
)
LOGGING = "as every handler of logging does it: what is wrong with a line stops nobody"

ALLOWED = {
    "arrays/compile_jax.py": (1, CARRIED),
    "batching/batcher.py": (2, DEFECT),
    "cli/trace.py": (1, CARRIED),
    "cluster/controller.py": (3, ELSEWHERE),
    "cluster/ray_hosts.py": (2, ELSEWHERE),
    "cluster/ray_program.py": (2, ELSEWHERE),
    "graph/pool.py": (3, DEFECT),
    "observe/logs/line_handler.py": (1, LOGGING),
    "observe/logs/model_log.py": (1, LOGGING),
    "owners/caller_conversation.py": (1, FOREIGN),
    "owners/owner_conversation.py": (1, FOREIGN),
    "owners/owners.py": (1, DEFECT),
    "protocols/native.py": (1, "texts that cannot be written are made so, by the boundary"),
    "protocols/openai/openai_errors.py": (1, "texts that cannot be written are made so, by the boundary"),
    "surfaces/pipeline/protocol/tensors.py": (1, FOREIGN),
    "server/app.py": (1, DEFECT),
    "server/stock.py": (1, "whatever a load fails with, its lease is given back, and those who wait are told"),
    "serving/endpoint.py": (3, DEFECT),
    "serving/nx_serving/partitions.py": (1, DEFECT),
    "serving/stream_delivery.py": (1, DEFECT),
    "surfaces/native/reloading.py": (1, DEFECT),
    "surfaces/nucleus/model_store.py": (1, DEFECT),
    "surfaces/pipeline/dag/each_worker.py": (1, FOREIGN),
    "surfaces/pipeline/dag/predictions.py": (2, DEFECT),
    "surfaces/pipeline/figures/reports.py": (1, LOGGING),
    "surfaces/pipeline/fronts/pipeline_client.py": (1, CARRIED),
    "surfaces/pipeline/logs.py": (1, LOGGING),
    "transports/grpc/call_tasks.py": (1, DEFECT),
    "transports/grpc/calls.py": (2, DEFECT),
    "transports/grpc/connection.py": (1, DEFECT),
    "transports/grpc/methods.py": (5, DEFECT),
    "transports/grpc/port.py": (3, DEFECT),
    "transports/http/answering.py": (2, DEFECT),
    "transports/http/port.py": (1, DEFECT),
    "transports/http/same_turn.py": (1, DEFECT),
    "transports/http/dashboard/audience.py": (
        1,
        "a task nobody waits for: what is wrong is logged, and its streams end",
    ),
    "transports/reading_turns.py": (1, DEFECT),
    "transports/refusal_pacing.py": (1, DEFECT),
    "workers/processes/child.py": (
        1,
        "results that msgpack cannot write become the answer; it calls nothing of the user's",
    ),
    "workers/wire/conversation.py": (2, FOREIGN),
    "workers/user_calls/coroutines.py": (1, CARRIED),
    "workers/processes/joining.py": (1, DEFECT),
    "workers/processes/supervisor.py": (1, "whatever a start fails with, its thread goes on and tries again"),
}
"""How often a module catches everything, and why it may; user code is called by `workers/user_calls/user_code.py`."""


def is_broad(kind: ast.expr | None) -> bool:
    """Tell whether these are all exceptions."""
    if kind is None:
        return True
    if isinstance(kind, ast.Tuple):
        return any(map(is_broad, kind.elts))
    name = kind.attr if isinstance(kind, ast.Attribute) else getattr(kind, "id", "")
    return name in {"Exception", "BaseException"}


def broad_lines(text: str) -> list[int]:
    """Return where everything is caught or suppressed; what is raised again after a clean-up is not caught."""
    if not re.search(r"Exception\b|except\s*:", text):  # parsing takes long
        return []
    found: list[int] = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ExceptHandler) and is_broad(node.type):
            last = node.body[-1]
            if not (isinstance(last, ast.Raise) and last.exc is None):
                found.append(node.lineno)
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name == "suppress" and any(map(is_broad, node.args)):
                found.append(node.lineno)
    return sorted(found)


def test_nothing_but_the_boundary_catches_everything():
    found = {str(path.relative_to(HERE)): broad_lines(path.read_text()) for path in sorted(HERE.rglob("*.py"))}
    found = {name: lines for name, lines in found.items() if lines and name not in BOUNDARY}
    wrong = [f"{name}: {lines}" for name, lines in found.items() if len(lines) != ALLOWED.get(name, (0, ""))[0]]
    assert wrong == [], "call user code through forebay.workers.user_calls.user_code, or name what can really be raised"
    assert set(ALLOWED) <= set(found), "no longer needed"


@pytest.mark.parametrize(
    "text, count",
    [
        ("try: f()\nexcept Exception: pass", 1),
        ("try: f()\nexcept: pass", 1),
        ("try: f()\nexcept (OSError, builtins.BaseException) as e: log(e)", 1),
        ("with contextlib.suppress(Exception): f()", 1),
        ("try: f()\nexcept BaseException:\n    g()\n    raise", 0),
        ("try: f()\nexcept Exception as e:\n    raise Other from e", 1),
        ("try: f()\nexcept (OSError, ValueError): pass", 0),
    ],
)
def test_what_counts_as_catching_everything(text, count):
    assert len(broad_lines(text)) == count
