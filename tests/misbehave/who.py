# SPDX-License-Identifier: Apache-2.0
"""Who is hurt by which way to misbehave, for each place and each kind of worker: the table that the tests hold us to.

A cell is a letter, the request that misbehaves (`R`), its whole batch (`B`) or nobody (`-`), and what becomes of the
worker: it is replaced (`w`), or is held up until the code ends (`t`). Where the server itself is hurt it is `S`, where
the server does not start, and says why, `E`, and where it cannot be, `x`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tests.misbehave.catalogue import WAYS

if TYPE_CHECKING:
    from tests.misbehave.catalogue import Way

KINDS: Final = ("inline", "thread", "process", "attached")
MODELS: Final = ("plain", "batched", "async", "streamed", "async streamed", "steps")
PLACES: Final = (*MODELS, "graph", "Serving", "Nucleus", "pipeline")
"""Where requests are answered; hooks have a table of their own."""
HOOKS: Final = ("hooks", "key", "load")
PLACE_OF_HOOK: Final = {
    "preprocess": "hooks",
    "postprocess": "hooks",
    "batch_key": "key",
    "load": "load",
    "unload": "load",
    "start": "steps",
    "finish": "steps",
}
_STREAMED: Final = {"streamed", "async streamed"}

LETTERS: Final = {
    "-": "nobody",
    "R": "the request alone",
    "B": "its batch",
    "w": "and a worker, which is replaced (an attached one by whoever started it); a thread that hangs is abandoned",
    "t": "and a worker, until the code ends or the worker is killed by hand, as with the original",
    "S": "the server; tried only for Nucleus, where the original exits as well",
    "E": "the server does not start, and says why",
    "x": "not possible there",
}

_ONE_RESULT: Final = {
    *("return_coroutine", "return_error", "return_own_error", "return_failure", "return_failure_of_text"),
    *("return_surrogate", "return_cycle", "return_deep", "return_object", "return_rude", "return_fake", "return_after"),
}
"""What is wrong with one result only."""
_FINE: Final = {"return_nan", "return_huge", "return_int_huge", "return_media", "return_user_list", "return_deque"}
"""What can be sent, or is as good as a list."""
_HARMLESS: Final = {"keep", "fork", "print", "thread", "mutate"}
_HARMFUL: Final = {"mutate_clear", "mutate_append", "mutate_cleared", "mutate_profile"}
"""What spoils the call it is done in."""
_OF_THE_PROCESS: Final = {
    *("print_closed", "mutate_settings", "mutate_switch_interval", "mutate_recursion_limit", "mutate_descriptors"),
    "thread_signals",
}
"""What hurts whatever else its process does."""

_ELSEWHERE: Final = {
    **{("Serving", name): "B" for name in (*_ONE_RESULT, *_FINE)},
    ("Serving", "return_too_many"): "-",  # as rows of padding are
    **{("Nucleus", name): "B" for name in ("return_user_list", "return_deque")},
    **{("pipeline", name): "B" for name in ("return_user_list", "return_deque")},
    **{(place, name): "B" for place in _STREAMED for name in ("return_user_list", "return_deque")},
    **{("steps", name): "B" for name in ("return_user_list", "return_deque")},
    **{("steps", name): "-" for name in ("mutate_clear", "mutate_append", "raise_in_finish")},
    ("steps", "raise_in_start"): "R",
    **{(place, "return_media"): "R" for place in (*_STREAMED, "steps", "Nucleus", "pipeline")},
    **{("pipeline", name): "R" for name in ("return_nan", "return_huge", "return_int_huge")},
    ("graph", "return_after"): "-",
    **{(place, name): "-" for place in ("Nucleus", "pipeline") for name in ("mutate_clear", "mutate_append")},
}
"""Where a place has its own way of looking at it."""


def who(way: Way, kind: str, place: str) -> str:
    """The letters of a cell."""
    if why_not(way, kind, place):
        return "x"
    if place == "load":
        return _loading(way, kind)
    found = _worst(way, kind, place)
    return found.replace("B", "R") if place in {"plain", "hooks", "key"} else found


def why_not(way: Way, kind: str, place: str) -> str:
    """Why a cell is not possible; empty if it is."""
    if (place in HOOKS or way.hook) and PLACE_OF_HOOK.get(way.hook) != place:
        return "another hook"
    if kind == "attached":
        if place in {"graph", "Serving", "Nucleus", "pipeline"}:
            return "only models attach"
        if place == "key":
            return "a model with a `batch_key` cannot attach: the server would have to run it"
        if place == "load":
            return "an attached worker loads and unloads by itself: the server sees it come and go"
    if place == "Nucleus" and kind != "process":
        return "Nucleus handlers run in processes"
    if place == "pipeline" and kind == "inline":
        return "ops run in threads or processes"
    if way.is_async and place not in {"async", "async streamed"}:
        return "only coroutines await"
    if way.is_generator and place not in _STREAMED:
        return "only generators yield"
    return ""


def is_tried(way: Way, kind: str, place: str) -> bool:
    """Whether the tests do it."""
    letters = who(way, kind, place)
    return letters != "x" and (letters != "S" or place == "Nucleus")


def _worst(way: Way, kind: str, place: str) -> str:
    shares_process = kind in {"inline", "thread"}
    if way.exits:
        return "S" if shares_process or place == "Nucleus" else "Bw"
    if shares_process and way.name in _OF_THE_PROCESS:
        return "S"
    if way.name == "mutate_signals" and kind == "inline":
        return "S"  # elsewhere it is not the main thread, or a process of its own
    if way.name == "thread_signals" and kind == "attached":
        return "-w"  # it is told to leave
    if way.hangs:
        return _hanging(way, kind, place)
    if way.name == "return_int_huge" and place == "Serving" and shares_process:
        return "-"  # an array of objects need not travel
    if (place, way.name) in _ELSEWHERE:
        return _ELSEWHERE[place, way.name]
    if way.name in _ONE_RESULT or way.hook in {"preprocess", "postprocess"}:
        return "R"
    if way.name in {*_FINE, "return_key_without_eq"} or (way.kind in _HARMLESS and way.name not in _HARMFUL):
        return "-"
    return "B"


def _hanging(way: Way, kind: str, place: str) -> str:
    if way.name in {"hang_await", "hang_yield"} or (way.is_async and place == "async streamed"):
        return "B"  # it is cancelled, closed, or left behind beside the others
    if kind == "inline":
        return "B" if way.is_async else "S"
    return "Bt" if place == "Nucleus" else "Bw"


def _loading(way: Way, kind: str) -> str:
    if way.exits and kind in {"inline", "thread"}:
        return "S"
    if way.hook == "load":
        return "E"
    return "S" if way.hangs and kind == "inline" else "-"


def cells(kind: str, place: str, *, is_full: bool) -> list[int]:
    """The ways to try in a place; in the short run each way in one place of a kind, and a few in each place.

    In this process all of them: they cost nothing there.
    """
    if place == "load":
        return [number for number, way in enumerate(WAYS) if is_tried(way, kind, place)]
    found: list[int] = []
    for number, way in enumerate(WAYS):
        possible = [one for one in (*PLACES, *HOOKS) if is_tried(way, kind, one)]
        if place not in possible:
            continue
        is_turn = possible[number % len(possible)] == place
        if is_full or kind in {"inline", "thread"} or is_turn or way.name in EVERYWHERE:
            found.append(number)
    return found


EVERYWHERE: Final = {"raise_own", "return_error", "return_too_few", "mutate_clear", "keep_batch", "print_much"}
"""Ways that the short run tries in every place."""
