# SPDX-License-Identifier: Apache-2.0
"""Composed functions: what is drawn, what is refused and where, and that the graph does what the function does."""

import asyncio
import collections.abc
import functools
import inspect
import threading
import typing
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st
from tests.waiting import PATIENCE_S, reached

import forebay
from forebay import SKIP, ConfigError, Last, Model, compose, either, node
from forebay.batching.queue import BatchConfig
from forebay.graph.composition.border import WirePool
from forebay.graph.composition.compose import Composition
from forebay.graph.composition.types_fit import element_of, fits, spell
from forebay.graph.spec import NodeSpec
from forebay.server.config import Overrides
from forebay.serving.endpoint import Endpoint, EndpointConfig
from forebay.surfaces.native.compositions import GraphTarget, serve_composition, unserved
from forebay.testing import ManualPool
from forebay.types.call import Request
from forebay.workers.wire.objects import Packed, dump, pack

INLINE = Overrides(worker_kind="inline")
PARAMS = {"in": "json", "out": "json"}


class Image:
    pass


class Scan(Image):
    pass


class Box:
    pass


class Detect(Model):
    def predict(self, batch: list[Image]) -> list[list[Box]]:
        return [[Box(), Box()] for _ in batch]


class Pair(Model):
    """Takes two inputs."""

    def predict(self, images: list[Image], boxes: list[list[Box]]) -> list[int]:
        return [len(found) for _, found in zip(images, boxes, strict=True)]


class Polished(Model):
    """Has hooks, and coroutines."""

    def load(self):
        self.offset = 100

    def preprocess(self, text: str) -> int:
        return int(text)

    async def predict(self, batch):
        return [number + self.offset for number in batch]

    def postprocess(self, number: int) -> str:
        return str(number)


@node
def decode(image: bytes) -> Scan:
    return Scan()


@node
def crop(image: Image, boxes: list[Box]) -> list[Image]:
    return [image] * len(boxes)


@node
def count(images: list[Image], at_least: int = 0) -> int:
    return max(len(images), at_least)


detect = node(Detect)
pair = node(Pair)


def here(offset: int = 0) -> str:
    """The line that calls this, as messages name it."""
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return f"{frame.f_back.f_code.co_filename}:{frame.f_back.f_lineno + offset}"


def alone(target) -> Composition:
    """A composition of one node."""
    return compose(name="g")(lambda value: target(value))  # noqa: PLW0108 - a node is no function, and this one is


def drawn(function) -> list[NodeSpec]:
    return list(compose(name="g")(function).graph.spec.nodes)


def refused(function) -> str:
    with pytest.raises(ConfigError) as caught:
        compose(name="g")(function).graph  # noqa: B018 - drawing is what fails
    return caught.value.message


# ---------------------------------------------------------------------------------------------------------------------
# Drawing


def test_a_call_is_a_node_and_a_value_is_a_stream():
    def scan(image: bytes):
        picture = decode(image)
        boxes = detect(picture)
        return pair(boxes=boxes, images=picture)

    first, second, third = drawn(scan)
    assert (first.name, dict(first.inputs)) == ("decode", {"image": "image"})
    assert (second.name, dict(second.inputs)) == ("detect", {"batch": "decode.out"})
    assert dict(third.inputs) == {"boxes": "detect.out", "images": "decode.out"}
    assert dict(compose(scan).graph.spec.outputs) == {"out": "pair.out"}


def test_a_node_used_twice_has_two_names_and_one_set_of_workers():
    @compose
    def twice(image):
        return pair(image, detect(image)), pair(image, detect(image))

    assert [spec.name for spec in twice.graph.spec.nodes] == ["detect", "pair", "detect-2", "pair-2"]
    served = serve_composition(GraphTarget(twice, Path(__file__), "twice", INLINE, {"worker_kind"}))
    assert list(served.nodes) == ["detect", "pair"]


def test_equal_nodes_made_on_the_spot_are_one():
    assert [spec.name for spec in drawn(lambda image: (node(Detect)(image), node(Detect)(image)))] == [
        "detect",
        "detect-2",
    ]


def test_a_composition_inside_another_one_is_part_of_its_graph():
    @compose
    def boxes(image: bytes):
        return detect(decode(image))

    assert [spec.name for spec in drawn(lambda image: crop(decode(image), boxes(image)))] == [
        "decode",
        "decode-2",
        "detect",
        "crop",
    ]


def test_inputs_with_defaults_are_optional_ports():
    (with_both,) = drawn(lambda images, least: count(at_least=least, images=images))
    assert with_both.optional == {"at_least"}
    assert alone(count).graph.spec.nodes[0].optional == set()


def test_several_results_are_an_object_or_an_array():
    assert dict(compose(name="g")(lambda image: {"a": decode(image), "b": image}).graph.spec.outputs) == {
        "a": "decode.out",
        "b": "image",
    }
    graph = compose(name="g")(lambda image: (decode(image), image)).graph
    assert graph.value_of({"0": 1}) == [1, None]


def test_the_result_has_the_annotated_type_or_that_of_its_node():
    def without(image: bytes):
        return decode(image)

    def wider(image: bytes) -> Image:
        return decode(image)

    assert compose(without).graph.result is Scan
    assert compose(wider).graph.result is Image


def test_what_nobody_reads_is_a_warning():
    @compose
    def wasteful(image: bytes, rest: int):
        detect(decode(image))
        return decode(image)

    assert wasteful.graph.warnings == [
        "graph 'wasteful': nothing reads what 'detect' returns",
        "graph 'wasteful': nothing reads the input 'rest'",
    ]


def test_an_annotation_that_cannot_be_read_is_a_warning_and_fits_all():
    def odd(image: "Nowhere") -> "Image":  # noqa: F821  # pyright: ignore[reportUndefinedVariable]
        return image

    graph = compose(name="g")(lambda image: detect(node(odd)(image))).graph
    assert graph.warnings == [
        "odd: `image` is annotated Nowhere, which is not checked (NameError: name 'Nowhere' is not defined)"
    ]


def test_a_node_that_is_in_no_graph_is_told():
    module = ModuleType("some")
    module.__file__ = "some.py"
    vars(module).update(detect=detect, crop=crop, Detect=Detect)
    assert unserved(module, {"g": alone(detect)}) == ["some.py: no composition calls the node 'crop'"]


# ---------------------------------------------------------------------------------------------------------------------
# What is refused, and where


def use_attribute(image):
    return detect(image).shape


def use_index(image):
    return detect(image)[0]


def use_if(image):
    return detect(image) if image else image


def use_loop(image):
    return [crop(image, box) for box in detect(image)]


def use_unpacking(image):
    one, other = detect(image)
    return one, other


def use_arithmetic(image):
    return 1 + detect(image)


def use_comparison(image):
    return decode(image) == decode(image)


def use_length(image):
    return count(len(detect(image)))


def use_text(image):
    return decode(f"{image}")


def use_membership(image):
    return image in decode(image)


@pytest.mark.parametrize(
    "function,what",
    [
        (use_attribute, "the result of 'detect' has no value yet, and here the attribute `shape` is read"),
        (use_index, "the result of 'detect' has no value yet, and here it is indexed"),
        (use_if, "'image' has no value yet, and here it is asked whether it is true"),
        (use_loop, "`NODE.map(values)` runs a node for each element"),
        (use_unpacking, "it is iterated over"),
        (use_arithmetic, "it is calculated with"),
        (use_comparison, "`outputs=`"),
        (use_length, "it is measured"),
        (use_text, "it is converted"),
        (use_membership, "it is iterated over"),
    ],
)
def test_a_symbol_can_only_be_passed_on_and_returned(function, what):
    message = refused(function)
    assert what in message
    assert "do this in a node of its own" in message
    first = function.__code__.co_firstlineno
    assert message.startswith((f"{__file__}:{first + 1}: ", f"{__file__}:{first + 2}: "))


@pytest.mark.parametrize(
    "function,what",
    [
        (lambda image: (crop(image), image), "'crop' takes (image, boxes), and it is not given 'boxes'"),
        (lambda image: count(), "'count' takes (images, [at_least]), and it is not given 'images'"),
        (lambda image: decode(image, image), "'decode' takes (image), and it is given 2"),
        (lambda image: crop(image, box=image), "it has no 'box'; did you mean 'boxes'?"),
        (lambda image: decode(image, image=image), "it is given 'image' twice"),
        (lambda image: count(image, 3), "'count' is given 3 as 'at_least'; a graph connects results"),
        (lambda image: detect(decode(image), batch=None), "it is given 'batch' twice"),
        (
            lambda image: detect.map(decode(image)),
            "'detect' is mapped over the result of 'decode': expected a list, got Scan",
        ),
        (
            lambda image: crop(decode(image), crop(decode(image), detect(decode(image)))),
            "the result of 'crop' does not fit 'crop': its type is list[Image], and 'boxes' takes list[Box]",
        ),
        (
            lambda image: decode.map(detect(decode(image))),
            "the result of 'detect' does not fit 'decode': its elements are Box, and 'image' takes bytes",
        ),
        (lambda image: (either(image), image), "either() takes the results of at least two branches"),
        (lambda image: either(image, 3), "'either' is given 3 as '1'"),
        (lambda image: (detect(image), node(Detect, workers=3)(image)), "there is another node 'detect'"),
        (lambda image: node(decode.target, outputs=["a", "b"]).map(image), "'decode' cannot be mapped"),
    ],
)
def test_a_wrong_call_is_refused_at_its_place(function, what):
    message = refused(function)
    assert what in message
    lines, first = inspect.getsourcelines(function)
    found = int(message.removeprefix(f"{__file__}:").partition(":")[0])
    assert first <= found < first + len(lines)


@pytest.mark.parametrize(
    "function,what",
    [
        (lambda image: None, "returns nothing"),
        (lambda image: [decode(image)], "return the result of a node, or a dict or tuple of results"),
        (lambda image: {"a": 3}, "returns 3 as 'a'"),
        (lambda image: {1: image}, "as 1"),
        (lambda: None, "has no parameter"),
        (lambda *images: None, "takes *images"),
        (lambda image: int("3x") + image, "ValueError: invalid literal for int()"),
        (
            lambda image: (Detect(image), image),  # pyright: ignore[reportCallIssue]
            "Detect() takes no arguments; Detect is a model, and node(Detect) makes a node",
        ),
    ],
)
def test_a_composition_that_is_none_is_refused(function, what):
    assert what in refused(function)


def test_a_result_of_another_type_than_annotated_is_refused():
    def wrong(image: bytes) -> Box:
        return decode(image)

    def several(image: bytes) -> bytes:
        return image, image  # pyright: ignore[reportReturnType] - as intended

    assert "'wrong' is annotated to return Box, and the result of 'decode' is Scan" in refused(
        compose(name="wrong")(wrong).function
    ).replace("'g'", "'wrong'")
    assert "returns several values" in refused(several)


class Streams(Model):
    def predict(self, batch):
        yield batch


class Hooked(Model):
    def preprocess(self, sample):
        return sample

    def predict(self, images, boxes):
        return images


@pytest.mark.parametrize(
    "target,settings,what",
    [
        (Detect, {"wokers": 2}, "node(Detect): unknown setting 'wokers'; did you mean 'workers'?"),
        (Detect, {"workers": 0}, "node(Detect): workers: expected a whole number from 1 to 1024 or None, got 0"),
        (
            Detect,
            {"workers": 10**9},
            "node(Detect): workers: expected a whole number from 1 to 1024 or None, got 1000000000",
        ),  # F134
        (
            Detect,
            {"worker_kind": "fiber"},
            "worker_kind: expected 'inline', 'process', 'thread' or None, got 'fiber'",
        ),
        (Detect, {"outputs": "ab"}, "outputs: expected a list of strings, got 'ab'"),
        (Detect, {"outputs": ["a", "a"]}, "each needs a name of its own"),
        (Detect, {"batched": True}, "batched is for functions"),
        (Detect, {"batch_key": 3}, "batch_key: expected a function of the inputs or None, got 3"),
        (len, {"batch_key": len, "name": "length"}, "a node that runs for batches"),
        (Streams, {"outputs": ["a", "b"]}, "Streams streams, and its parts have left: it cannot have several outputs"),
        (Streams, {"attempts": 2}, "it cannot have several attempts"),
        (lambda x: x, {}, "at most 128 in all, or two such names joined by '/', got '<lambda>'"),
        (3, {}, "expected a function or a forebay.Model, got int"),
        (detect, {}, "expected a function or a forebay.Model, got NodeDefinition"),
    ],
)
def test_a_node_with_wrong_settings_is_refused(target, settings, what):
    with pytest.raises(ConfigError) as caught:
        node(target, **settings)
    assert what in caught.value.message


class PaddedPair(Model):
    pad = forebay.Pad(("length",))

    def predict(self, images, boxes):
        return images


def test_a_model_of_several_inputs_has_no_preprocess_and_no_pad():
    assert "prepare the inputs in a node before it" in refused(lambda image: node(Hooked)(image, image))
    assert "samples of one input can be padded" in refused(lambda image: node(PaddedPair)(image, image))


def test_settings_of_a_node_reach_the_graph():
    once = alone(node(Detect, timeout_ms=250, attempts=3, workers=2, max_queue=5, max_wait_ms=2))
    served = serve_composition(GraphTarget(once, Path(__file__), "once", Overrides(), ()))
    assert isinstance(served.endpoint.pool, WirePool)
    settings = served.endpoint.pool.graph.nodes["detect"]
    assert (settings.timeout_s, settings.attempts, settings.packs) == (0.25, 3, True)
    batching = served.nodes["detect"].batching
    assert (batching.capacity, batching.max_wait_s, batching.idle) == (5, 0.002, "wait")
    assert served.nodes["detect"].pool.statistics().slots == 2


def test_a_composition_predicts_by_what_waits_at_its_nodes():
    served = serve_composition(GraphTarget(alone(detect), Path(__file__), "once", INLINE, ()))
    assert isinstance(served.endpoint.pool, WirePool)
    deadlines = served.endpoint.keep_deadlines()
    assert deadlines is not None
    assert deadlines.inside is served.endpoint.pool.graph.inside() is not None
    assert served.nodes["detect"].keep_deadlines() is not None


def test_a_latency_objective_of_a_model_holds_in_a_graph():
    class Quick(Detect):
        policy = "auto"
        latency_objective_ms = 20

    served = serve_composition(GraphTarget(alone(node(Quick)), Path(__file__), "g", INLINE, ()))
    assert served.nodes["quick"].batching.objective_s == 0.02


@pytest.mark.parametrize(
    "settings", [{"name": "a b"}, {"version": "a/b"}, {"timeout_ms": 0}, {"max_in_flight": 0}, {"max_queue": "many"}]
)
def test_a_composition_with_wrong_settings_is_refused(settings):
    with pytest.raises(ConfigError, match=rf"compose\(draw\).*{next(iter(settings))}"):

        @compose(**settings)
        def draw(image):
            return decode(image)


def test_only_a_function_can_be_composed():
    async def later(image):
        return detect(image)

    for wrong, told in ((detect, "def ocr"), (later, "without `async`")):
        with pytest.raises(ConfigError, match=f"expected a plain function that calls nodes, got .*{told}"):
            compose(wrong)


def test_what_cannot_travel_is_told_with_the_place():
    def odd(image: Image):
        return detect(image)

    composition = compose(odd)
    with pytest.raises(ConfigError) as caught:
        serve_composition(GraphTarget(composition, Path(__file__), "odd", INLINE, ()))
    assert caught.value.message.startswith(f"{here(-6)}: the composition 'odd' cannot be served: ")


# ---------------------------------------------------------------------------------------------------------------------
# Types

Number = typing.NewType("Number", int)


class Shape(typing.TypedDict):
    corners: int


@pytest.mark.parametrize(
    "given,wanted",
    [
        (int, Any),
        (Any, int),
        (Scan, Image),
        (int, float),
        (bool, int),
        (None, int | None),
        (int, typing.Optional[int]),  # noqa: UP045 - both spellings are one
        (int | str, str | int | None),
        (list[Scan], list[Image]),
        (list, list[int]),
        (list[int], list),
        (list[Scan], collections.abc.Sequence[Image]),
        (tuple[int, ...], collections.abc.Iterable[int]),
        (tuple[int, str], tuple[int, str]),
        (tuple[int, int], tuple[int, ...]),
        (dict[str, Scan], collections.abc.Mapping[str, Image]),
        (typing.Annotated[int, "meta"], int),
        (typing.Literal["a"], str),
        (typing.Literal["a"], typing.Literal["a", "b"]),
        (Number, int),
        (Shape, dict),
        (dict, Shape),
        (np.ndarray, np.ndarray),
        (np.ndarray[Any, np.dtype[np.float32]], np.ndarray[Any, np.dtype[np.floating]]),
        (collections.abc.Callable[[int], int], collections.abc.Callable[[str], int]),
        (int, typing.SupportsIndex),
        (typing.TypeVar("T"), int),
    ],
)
def test_types_that_fit(given, wanted):
    assert fits(given, wanted)


@pytest.mark.parametrize(
    "given,wanted",
    [
        (int, str),
        (Image, Scan),
        (float, int),
        (int | None, int),
        (int | str, int),
        (list[int], list[str]),
        (list[int], int),
        (int, list[int]),
        (list[list[int]], list[int]),
        (tuple[int, str], tuple[int, int]),
        (tuple[int, int, int], tuple[int, int]),
        (tuple[str, ...], list[str]),
        (tuple[str, ...], collections.abc.Iterable[int]),
        (dict[str, int], dict[str, str]),
        (str, bytes),
        (typing.Literal["a", "b"], typing.Literal["a"]),
        (typing.Literal[1], str),
        (int, Number),
        (np.ndarray, list),
        (list[float], np.ndarray),
        (np.ndarray[Any, np.dtype[np.int64]], np.ndarray[Any, np.dtype[np.floating]]),
    ],
)
def test_types_that_do_not_fit(given, wanted):
    assert not fits(given, wanted)


@hypothesis.given(st.from_type(type))
def test_everything_fits_itself(kind):
    assert fits(kind, kind)
    assert fits(list[kind], list[kind])
    assert spell(kind)


@pytest.mark.parametrize(
    "annotation,expected",
    [
        (list[int], (True, int)),
        (collections.abc.Sequence[str], (True, str)),
        (tuple[int, ...], (True, int)),
        (tuple[int, str], (True, Any)),
        (list[int] | None, (True, int)),
        (np.ndarray, (True, Any)),
        (Any, (True, Any)),
        (list, (True, Any)),
        (int, (False, Any)),
        (str, (False, Any)),
        (dict[str, int], (False, Any)),
    ],
)
def test_the_elements_of_a_list(annotation, expected):
    assert element_of(annotation) == expected


# ---------------------------------------------------------------------------------------------------------------------
# Running without a server


def test_a_composition_is_a_function_like_any_other():
    @compose
    def boxes(image: bytes):
        picture = decode(image)
        return pair(picture, detect(picture))

    assert boxes(b"") == boxes.run(b"") == 2


def test_a_node_is_a_function_like_any_other():
    assert isinstance(decode(b""), Scan)
    assert node(Polished)("1") == "101"
    assert node(Polished).map(["1", "2"]) == ["101", "102"]


def test_a_partial_function_is_a_node_with_a_name():
    resize = node(functools.partial(count.target, at_least=3), name="at-least-three")
    assert resize([]) == 3
    assert [spec.name for spec in alone(resize).graph.spec.nodes] == ["at-least-three"]


def test_what_a_function_raises_is_what_its_caller_sees():
    @node
    def bad(number: int) -> float:
        return 1 / number

    with pytest.raises(ZeroDivisionError):
        alone(bad)(0)


class Relayed(Model):
    """Waits for its results on the loop that has loaded it, which is the only one where they come."""

    async def load(self):
        self.loop = asyncio.get_running_loop()

    async def predict(self, batch: list[int]) -> list[int]:
        doubled = [self.loop.create_future() for _ in batch]
        for sample, future in zip(batch, doubled, strict=True):
            self.loop.call_soon(future.set_result, 2 * sample)
        return await asyncio.gather(*doubled)


def test_coroutines_run_on_the_loop_that_loaded_their_model():
    relayed = node(Relayed)
    assert [relayed(number) for number in (1, 2)] == [2, 4]
    assert alone(relayed).run(3) == 6


def test_a_node_with_coroutines_called_on_a_loop_says_what_to_do():
    @node
    async def later(number: int) -> int:
        return number

    async def call(use):
        with pytest.raises(ConfigError, match=rf"{Path(__file__).name}:\d+: .* `await asyncio\.to_thread"):
            use(1)
        return await asyncio.to_thread(use, 1)

    assert asyncio.run(call(alone(later))) == 1
    assert asyncio.run(call(node(Relayed))) == 2


def test_a_skipped_value_skips_what_needs_it():
    @node
    def only_even(number: int) -> int:
        return number if number % 2 == 0 else SKIP

    @node
    def with_default(number: int, extra: int = 5) -> int:
        return number + extra

    @compose
    def skipping(number: int):
        even = only_even(number)
        return {"even": even, "sum": with_default(number, even), "none": with_default(even, number)}

    assert skipping.run(4) == {"even": 4, "sum": 8, "none": 8}
    assert skipping.run(3) == {"sum": 8}
    assert answers(skipping, [4, 3]) == [skipping.run(4), skipping.run(3)]


def test_outputs_that_are_no_mapping_of_them_fail_the_request():
    @node(outputs=["a", "b"])
    def wrong(number: int):
        return {"c": number} if number else number

    @compose
    def split(number: int):
        a, b = wrong(number)
        return a, b

    for number, found in ((1, "wrong returned ['c']"), (0, "wrong returned int")):
        (error,) = answers(split, [number])
        assert found in error.message.replace("'wrong'", "wrong")


def test_an_element_cannot_be_skipped():
    @node
    def skip(number: int) -> int:
        return SKIP

    (error,) = answers(alone(skip.map), [[1]])
    assert "skipped an element; return None for it" in error.message


def test_models_with_hooks_and_coroutines_run_as_nodes():
    polished = node(Polished)
    assert answers(alone(polished), ["1", "2"]) == ["101", "102"]


def test_one_bad_sample_does_not_fail_its_neighbours():
    polished = node(Polished, max_batch_size=8)
    good, bad = answers(alone(polished), ["1", "x"])
    assert good == "101"
    assert bad.message.startswith("ValueError: invalid literal for int()")


def passed_on(function):
    @functools.wraps(function)
    def call(*arguments, **named):
        return function(*arguments, **named)

    return call


def waited_for(function):
    @functools.wraps(function)
    def call(*arguments, **named):
        return asyncio.run(function(*arguments, **named))

    return call


def test_a_function_behind_a_plain_decorator_is_of_the_kind_that_it_wraps():
    @node
    @passed_on
    async def later(number: int) -> int:
        await asyncio.sleep(0)
        return number

    @node(batched=True)
    @passed_on
    async def doubled(numbers: list[int]) -> list[int]:
        return [2 * number for number in numbers]

    for one, told in ((later, [1, 2]), (doubled, [2, 4])):
        assert answers(alone(one), [1, 2]) == told
        assert [one(1), one(2)] == told


def test_a_coroutine_that_its_decorator_waits_for_is_a_plain_function():
    @node(worker_kind="thread")
    @waited_for
    async def later(number: int) -> int:
        await asyncio.sleep(0)
        return number

    assert answers(alone(later), [1, 2]) == [1, 2]
    assert later(1) == 1


def test_a_model_of_two_inputs_may_load_by_a_coroutine():
    class Sum(Model):
        async def load(self):
            self.offset = 10

        def predict(self, a: list[int], b: list[int]) -> list[int]:
            return [one + other + self.offset for one, other in zip(a, b, strict=True)]

    total = node(Sum)

    @compose
    def added(a: int, b: int) -> int:
        return total(a, b)

    assert answers(added, [{"a": 1, "b": 2}]) == [13]


def test_a_node_that_fails_leaves_none_behind_that_was_to_begin_beside_it(caplog):
    @node
    async def later(number: int) -> int:
        await asyncio.sleep(0)
        return number

    @node
    def positive(number: int) -> int:
        if number < 0:
            raise forebay.RequestError("negative")
        return number

    @compose
    def both(number: int):
        return later(number), positive(number)

    bad, good = answers(both, [-1, 1])
    assert (bad.message, good, caplog.messages) == ("negative", [1, 1], [])


# ---------------------------------------------------------------------------------------------------------------------
# The graph does what the function does


def answers(composition: Composition, bodies: list[Any]) -> list[Any]:
    """What the served graph answers to requests that come together: values, or errors."""
    import msgspec

    served = serve_composition(GraphTarget(composition, Path(__file__), "", INLINE, {"worker_kind"}))

    async def ask(body):
        try:
            return msgspec.json.decode(await served.endpoint.call(msgspec.json.encode(body), params=PARAMS))
        except forebay.ForebayError as error:
            return error

    async def serve():
        await served.endpoint.start()
        try:
            return await asyncio.gather(*map(ask, bodies))
        finally:
            await served.endpoint.drain(1.0)

    return asyncio.run(serve())


def test_who_is_late_is_told_in_which_node():
    entered, gate = threading.Event(), threading.Event()

    @node
    def stuck(number: int) -> int:
        entered.set()
        gate.wait(PATIENCE_S)
        return number

    endpoint = serve_composition(GraphTarget(alone(stuck), Path(__file__), "", Overrides(), set())).endpoint

    async def main():
        await endpoint.start()
        request = Request(body=b"1", reply=lambda *_: None, params=PARAMS)
        endpoint.submit(request)
        await reached(entered.is_set)
        assert endpoint.whereabouts(request) == "in 'stuck' while it ran"
        gate.set()
        await endpoint.drain(PATIENCE_S)

    asyncio.run(main())


def test_equal_requests_to_a_model_run_once_inside_of_a_graph():
    gate, ran = threading.Event(), []

    class Shared(Model):
        single_flight = "tenant"
        max_batch_size = 1

        def predict(self, batch: list[list[int]]) -> list[list[int]]:
            assert gate.wait(PATIENCE_S)
            ran.append(batch)
            return batch

    @node
    def parity(number: int) -> list[int]:
        return [number % 2]

    shared = node(Shared)
    composition = compose(name="g")(lambda number: shared(parity(number)))
    served = serve_composition(
        GraphTarget(composition, Path(__file__), "", Overrides(worker_kind="thread"), {"worker_kind"})
    )
    assert (
        serve_composition(GraphTarget(composition, Path(__file__), "", Overrides(single_flight="off"), ()))
        .nodes["shared"]
        .config.single_flight
        == "off"
    )

    async def main():
        await served.endpoint.start()
        found = asyncio.gather(*(served.endpoint.call(b"%d" % number, params=PARAMS) for number in range(8)))
        await reached(lambda: served.nodes["shared"].in_flight == 8)
        gate.set()
        assert await found == [b"[0]", b"[1]"] * 4
        await served.endpoint.drain(PATIENCE_S)

    asyncio.run(main())
    assert sorted(ran) == [[[0]], [[1]]]
    assert served.nodes["shared"].metrics.shared == 6


def test_equal_values_from_other_processes_are_equal_requests():
    pool = ManualPool(0)
    endpoint = Endpoint(EndpointConfig(name="n", single_flight="all"), BatchConfig(max_size=4, idle="go"), pool)

    async def main():
        await endpoint.start()
        for made in (lambda: pack({"x": [1]}), lambda: {"x": Packed(dump([1]))}):
            before = endpoint.waiting
            for _ in range(3):
                endpoint.submit(Request(body=made(), reply=lambda *_: None))
            assert endpoint.waiting == before + 1
        await endpoint.drain(0.0)

    asyncio.run(main())


def test_a_graph_as_a_whole_shares_no_runs_and_says_what_does():
    with pytest.raises(ConfigError, match="set single_flight in the classes of those"):
        serve_composition(GraphTarget(alone(decode), Path(__file__), "", Overrides(single_flight="all"), ()))
    streams = type("Streams", (Streams,), {"single_flight": "all"})
    with pytest.raises(ConfigError, match="node 'streams': single_flight is 'all' and its predict streams"):
        serve_composition(GraphTarget(alone(node(streams)), Path(__file__), "", INLINE, ()))


@node
def plus(a: int, b: int) -> int:
    return a + b


@node
def negative(a: int) -> int:
    return -a


@node(outputs=("even", "odd"))
def route(a: int):
    return {"odd" if a % 2 else "even": a}


@node
def drop_threes(a: int) -> int:
    return SKIP if a % 3 == 0 else a


@node(batched=True, max_batch_size=4)
def sums(a: list[int], b: list[int | None] | None = None) -> list[int]:
    assert b is not None
    return [one + (10 if other is None else other) for one, other in zip(a, b, strict=True)]


@node
def up_to(a: int) -> list[int]:
    return list(range(a % 4))


@node
def total(a: list[int]) -> int:
    return sum(a)


@node
def or_seven(a: int = 7) -> int:
    return a


class Double(Model):
    max_batch_size = 3

    def predict(self, batch: list[int]) -> list[int]:
        return [2 * number for number in batch]


double = node(Double)

STEPS = [
    "plus",
    "negative",
    "route",
    "drop_threes",
    "sums",
    "sums_one",
    "map",
    "map_absent",
    "or_seven",
    "either",
    "double",
]


def build(steps: list[tuple[str, int, int]]) -> Composition:
    """A composition that follows the steps; each takes two of the values there are so far."""

    def follow(x: int, y: int):
        values: list[Any] = [x, y]
        for step, first, second in steps:
            a, b = values[first % len(values)], values[second % len(values)]
            match step:
                case "plus":
                    values.append(plus(a, b))
                case "negative":
                    values.append(negative(a))
                case "route":
                    values += route(a)
                case "drop_threes":
                    values.append(drop_threes(a))
                case "sums":
                    values.append(sums(a, b))
                case "sums_one":
                    values.append(sums(a))
                case "map":
                    values.append(total(sums.map(up_to(a), b)))
                case "map_absent":
                    values.append(total(or_seven.map(up_to(drop_threes(a)))))
                case "or_seven":
                    values.append(or_seven(a))
                case "either":
                    values.append(either(a, b))
                case _:
                    values.append(double(a))
        return {str(index): value for index, value in enumerate(values)}

    return compose(name="follow")(follow)


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(
    st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 20), st.integers(0, 20)), max_size=8),
    st.lists(st.tuples(st.integers(-20, 20), st.integers(-20, 20)), min_size=1, max_size=6),
)
def test_every_graph_answers_what_its_function_returns(steps, inputs):
    composition = build(steps)
    assert answers(composition, [{"x": x, "y": y} for x, y in inputs]) == [composition.run(x, y) for x, y in inputs]


class Spelt(Model):
    """Streams the letters of a text."""

    def start(self, sample: str) -> list[str]:
        return list(sample)

    def step(self, states: list[list[str]]) -> list[str | Last[str]]:
        return [Last(one.pop(0)) if len(one) == 1 else one.pop(0) for one in states]


spelt = node(Spelt)


@node
def upper_case(text: str) -> str:
    return text.upper()


def test_a_stream_is_the_end_of_its_graph():
    @compose
    def spell(text: str) -> Iterator[str]:
        return spelt(text)

    assert spell.graph.streams
    assert spell.graph.result is str
    assert spell.run("abc") == spelt("abc") == ["a", "b", "c"]

    @compose
    def also_read(text: str):
        return upper_case(spelt(text))

    @compose
    def one_of_two(text: str):
        return {"spelt": spelt(text), "upper": upper_case(text)}

    @compose
    def two(text: str):
        spelt(text)
        return spelt(text)

    for composition in (also_read, one_of_two, two):
        assert "which streams: its parts can only be the answer" in refused(composition.function)

    @compose
    def whole(text: str) -> str:
        return spelt(text)

    assert "annotated to return str, and streams; annotate Iterator[...]" in refused(whole.function)

    @compose
    def wrong(text: str) -> Iterator[int]:
        return spelt(text)

    assert "annotated to return int" in refused(wrong.function)

    @compose
    def mapped(texts: list[str]):
        return spelt.map(texts)

    assert "streams, and cannot be mapped" in refused(mapped.function)
