# SPDX-License-Identifier: Apache-2.0
"""The run of a graph, stepped by hand: what fires when, and what it leads to, whatever completes first."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.errors import BadOutcome, ConfigError, InvalidRequest
from forebay.graph.plan import Plan
from forebay.graph.run import Firing, GraphRun
from forebay.graph.spec import GraphSpec, NodeSpec, check


def node(name: str, *inputs: str, out: str | None = None, **more: Any) -> NodeSpec:
    """A node with one port for each stream it reads, named after it, and one output."""
    return NodeSpec(name=name, inputs={i: i for i in inputs}, outputs={"out": out or name}, **more)


def graph(*nodes: NodeSpec, inputs: tuple[str, ...] = ("x",), output: str | None = None) -> GraphSpec:
    return GraphSpec(name="g", inputs=inputs, outputs={"result": output or nodes[-1].name}, nodes=nodes)


def names(firings: list[Firing]) -> list[str]:
    return [firing.node.spec.name for firing in firings]


# --- one timestamp: requests -----------------------------------------------------------------------------------------


def test_a_join_waits_for_all_its_inputs():  # P64
    run = GraphRun(Plan(graph(node("a", "x"), node("b", "x"), node("join", "a", "b"))))
    run.feed("x", 0, 1)
    first, second = run.ready()
    assert run.complete(first, {"out": "A"}) == []
    assert run.ready() == []
    run.complete(second, {"out": "B"})
    [join] = run.ready()
    assert join.inputs == {"a": "A", "b": "B"}
    [emission] = run.complete(join, {"out": "both"})
    assert (emission.output, emission.value) == ("result", "both")
    assert run.is_finished


def test_an_edge_may_skip_levels():  # P67, P68
    run = GraphRun(Plan(graph(node("a", "x"), node("b", "a"), node("c", "b"), node("join", "x", "a", "c"))))
    run.feed("x", 0, 0)
    for value in ("a", "b", "c"):
        [firing] = run.ready()
        assert names([firing]) == [value]
        run.complete(firing, {"out": value})
    [join] = run.ready()
    assert join.inputs == {"x": 0, "a": "a", "c": "c"}


def test_a_branch_that_was_not_taken_is_passed_over():
    route = NodeSpec(name="route", inputs={"x": "x"}, outputs={"left": "l", "right": "r"})
    both = NodeSpec(name="join", inputs={"a": "a2", "b": "b2"}, outputs={"out": "join"}, optional=frozenset({"a", "b"}))
    spec = graph(route, node("a", "l"), node("a2", "a"), node("b", "r"), node("b2", "b"), both)
    run = GraphRun(Plan(spec))
    run.feed("x", 0, 1)
    [firing] = run.ready()
    run.complete(firing, {"right": 1})
    [b] = run.ready()
    assert names([b]) == ["b"]
    run.complete(b, {"out": 2})
    run.complete(run.ready()[0], {"out": 3})
    [join] = run.ready()
    assert join.inputs == {"b": 3}


def test_a_node_without_a_required_input_does_not_run():
    route = NodeSpec(name="route", inputs={"x": "x"}, outputs={"left": "l", "right": "r"})
    run = GraphRun(Plan(graph(route, node("needs", "l", "r"), node("after", "needs"))))
    run.feed("x", 0, 1)
    run.complete(run.ready()[0], {"left": 1})
    assert run.ready() == []
    assert run.is_finished


def test_the_first_arrival_is_enough_and_the_rest_is_dropped():  # P74
    run = GraphRun(Plan(graph(node("a", "x"), node("b", "x"), node("any", "a", "b", policy="first"))))
    run.feed("x", 0, 1)
    a, b = run.ready()
    run.complete(b, {"out": "B"})
    [any_] = run.ready()
    assert any_.inputs == {"b": "B"}
    run.complete(a, {"out": "A"})
    assert run.ready() == []
    run.complete(any_, {"out": 1})
    assert run.is_finished


def test_nothing_fires_after_a_failure():  # P70
    run = GraphRun(Plan(graph(node("a", "x"), node("b", "x"), node("join", "a", "b"))))
    run.feed("x", 0, 1)
    a, b = run.ready()
    run.abort(ValueError("no"))
    assert run.complete(a, {"out": 1}) == run.complete(b, {"out": 1}) == []
    assert run.ready() == []
    assert run.is_finished
    assert isinstance(run.error, ValueError)


def test_a_port_that_does_not_exist_is_refused():
    run = GraphRun(Plan(graph(node("a", "x"))))
    with pytest.raises(InvalidRequest, match="no input 'y'"):
        run.feed("y", 0, 1)
    run.feed("x", 0, 1)
    with pytest.raises(InvalidRequest, match="'x'"):
        run.feed("x", 0, 2)
    with pytest.raises(BadOutcome, match="no output 'other'"):
        run.complete(run.ready()[0], {"other": 1})


def test_a_chain_of_thousands_can_be_passed_over():
    chain = [node(f"n{i}", f"n{i - 1}" if i else "x") for i in range(3000)]
    run = GraphRun(Plan(graph(*chain)))
    run.feed("x", 0, 1)
    run.complete(run.ready()[0], {})
    assert run.is_finished


# --- many timestamps: streams ----------------------------------------------------------------------------------------


def test_results_are_released_in_the_order_of_their_firings():
    run = GraphRun(Plan(graph(node("a", "x"))), streams=True)
    for at in range(3):
        run.feed("x", at, at)
    first, second, third = run.ready()
    assert run.complete(third, {"out": "c"}) == []
    assert run.complete(second, {"out": "b"}) == []
    emissions = run.complete(first, {"out": "a"})
    assert [(emission.timestamp, emission.value) for emission in emissions] == [(0, "a"), (1, "b"), (2, "c")]


def test_packets_of_one_moment_belong_together():
    spec = graph(node("join", "x", "y", optional=frozenset({"x", "y"})), inputs=("x", "y"))
    run = GraphRun(Plan(spec), streams=True)
    run.feed("x", 1, "x1")
    run.feed("x", 3, "x3")
    assert run.ready() == []
    run.feed("y", 2, "y2")  # so y has nothing at 1
    assert [firing.inputs for firing in run.ready()] == [{"x": "x1"}, {"y": "y2"}][:2]
    run.feed("y", 3, "y3")
    assert [firing.inputs for firing in run.ready()] == [{"x": "x3", "y": "y3"}]
    run.close_input("y")
    run.feed("x", 4, "x4")
    assert [firing.inputs for firing in run.ready()] == [{"x": "x4"}]


def test_timestamps_must_rise():
    run = GraphRun(Plan(graph(node("a", "x"))), streams=True)
    run.feed("x", 5, 1)
    with pytest.raises(InvalidRequest, match="5"):
        run.feed("x", 5, 1)
    run.close_input("x")
    with pytest.raises(InvalidRequest, match="closed"):
        run.feed("x", 9, 1)


def test_sync_sets_wait_only_for_their_own():
    spec = graph(node("n", "x", "y", "z", sets=(frozenset({"x", "y"}), frozenset({"z"}))), inputs=("x", "y", "z"))
    run = GraphRun(Plan(spec), streams=True)
    run.feed("z", 7, "z")
    assert [firing.inputs for firing in run.ready()] == [{"z": "z"}]
    run.feed("x", 1, "x")
    assert run.ready() == []
    run.feed("y", 1, "y")
    assert [firing.inputs for firing in run.ready()] == [{"x": "x", "y": "y"}]


def test_immediate_fires_for_every_packet():
    run = GraphRun(Plan(graph(node("n", "x", "y", policy="immediate"), inputs=("x", "y"))), streams=True)
    run.feed("y", 4, "y")
    run.feed("x", 2, "x")
    assert [firing.inputs for firing in run.ready()] == [{"y": "y"}, {"x": "x"}]


def test_packets_that_wait_for_a_busy_node_come_by_their_timestamps():  # F93
    spec = graph(node("n", "x", "y", policy="immediate", max_in_flight=1), inputs=("x", "y"))
    run = GraphRun(Plan(spec), streams=True)
    run.feed("x", 1, "x1")
    [firing] = run.ready()
    run.feed("y", 5, "y5")
    run.feed("x", 3, "x3")
    run.feed("x", 5, "x5")
    found = []
    while firing is not None:
        found += [(one.timestamp, one.value) for one in run.complete(firing, {"out": firing.inputs})]
        firing = next(iter(run.ready()), None)
    assert found == [(1, {"x": "x1"}), (3, {"x": "x3"}), (5, {"x": "x5", "y": "y5"})]


def test_a_node_settles_nothing_that_another_set_may_still_write():  # F93
    first = node("n", "x", "y", sets=(frozenset({"x"}), frozenset({"y"})))
    run = GraphRun(Plan(graph(first, node("after", "n"), inputs=("x", "y"))), streams=True)
    run.feed("x", 5, "x")
    [late] = run.ready()
    run.feed("y", 3, "y")
    run.complete(late, {})
    [early] = [one for one in run.ready() if one.timestamp == 3] or [None]
    assert early is not None
    run.complete(early, {"out": "3"})
    [after] = run.ready()
    assert after.inputs == {"n": "3"}


def test_a_loop_turns_until_it_says_so():
    looping = NodeSpec(
        name="count",
        inputs={"start": "x", "again": "loop"},
        outputs={"again": "loop", "out": "done"},
        sets=(frozenset({"start"}), frozenset({"again"})),
        back_edges=frozenset({"again"}),
    )
    spec = GraphSpec(name="g", inputs=("x",), outputs={"result": "done"}, nodes=(looping,))
    run = GraphRun(Plan(spec), streams=True)
    run.feed("x", 0, 3)
    run.close_input("x")
    emitted = []
    turns = 0
    while firings := run.ready():
        [firing] = firings
        left = next(iter(firing.inputs.values())) - 1
        turns += 1
        emitted += run.complete(firing, {"again": left} if left else {"out": "boom"})
    assert turns == 3
    assert [(emission.timestamp, emission.value) for emission in emitted] == [(2, "boom")]
    assert run.is_finished


def test_a_barrier_waits_for_a_packet_on_each_port_whatever_their_timestamps():
    run = GraphRun(Plan(graph(node("n", "x", "y", policy="barrier"), inputs=("x", "y"))), streams=True)
    run.feed("x", 4, "x4")
    run.feed("x", 5, "x5")
    assert run.ready() == []
    run.feed("y", 9, "y9")
    [firing] = run.ready()
    assert (firing.timestamp, firing.inputs) == (4, {"x": "x4", "y": "y9"})
    [emission] = run.complete(firing, {"out": 1})
    assert emission.timestamp == 4
    run.close_input("y")  # x5 will never have company
    assert run.is_finished


def test_a_barrier_that_lacks_a_packet_is_passed_over():
    after = NodeSpec(name="after", inputs={"n": "n", "x": "x"}, outputs={"out": "after"}, optional=frozenset({"n"}))
    run = GraphRun(Plan(graph(node("n", "x", "y", policy="barrier"), after, inputs=("x", "y"))))
    run.feed("x", 0, 1)
    run.skip("y", 0)
    assert [firing.inputs for firing in run.ready()] == [{"x": 1}]


def test_a_node_runs_no_more_often_at_a_time_than_it_may():  # O62: labels are in place before the image after them
    run = GraphRun(Plan(graph(node("n", "x", max_in_flight=1))), streams=True)
    for timestamp in range(3):
        run.feed("x", timestamp, timestamp)
    for timestamp in range(3):
        [firing] = run.ready()
        assert firing.timestamp == timestamp
        assert run.open == 1
        assert [emission.value for emission in run.complete(firing, {"out": timestamp})] == [timestamp]
    assert run.is_finished


def test_what_waits_for_its_turn_leads_to_nothing_after_a_failure():
    run = GraphRun(Plan(graph(node("n", "x", max_in_flight=1))), streams=True)
    run.feed("x", 0, 0)
    run.feed("x", 1, 1)
    [firing] = run.ready()
    run.abort(ValueError("no"))
    assert run.ready() == []
    assert run.complete(firing, {"out": 0}) == []
    assert run.is_finished


def looping(**more: Any) -> GraphSpec:
    """A node that turns as often as its input says, and has a result each time."""
    one = NodeSpec(
        name="count",
        inputs={"start": "x", "again": "loop"},
        outputs={"again": "loop", "out": "done"},
        sets=(frozenset({"start"}), frozenset({"again"})),
        back_edges=frozenset({"again"}),
        **more,
    )
    return GraphSpec(name="g", inputs=("x",), outputs={"result": "done"}, nodes=(one,))


def test_what_comes_while_a_closed_loop_turns_waits_for_its_timestamp():  # O73
    run = GraphRun(Plan(looping(max_in_flight=1, closed_loop=True)), streams=True)
    run.feed("x", 0, 3)
    [firing] = run.ready()
    run.complete(firing, {"again": 2, "out": 3})
    [firing] = run.ready()
    run.feed("x", 5, 1)
    run.complete(firing, {"again": 1, "out": 2})
    [firing] = run.ready()
    assert (firing.timestamp, firing.inputs) == (2, {"again": 1})
    run.complete(firing, {"out": 1})
    [firing] = run.ready()
    assert (firing.timestamp, firing.inputs) == (5, {"start": 1})


def test_a_closed_loop_that_turns_up_to_what_waits_is_an_error():  # O73
    run = GraphRun(Plan(looping(max_in_flight=1, closed_loop=True)), streams=True)
    run.feed("x", 0, 3)
    [firing] = run.ready()
    run.complete(firing, {"again": 2, "out": 3})
    [firing] = run.ready()
    run.feed("x", 1, 1)  # this turn may be the last
    with pytest.raises(InvalidRequest, match="'count' is already processing data"):
        run.complete(firing, {"again": 1, "out": 2})


def test_what_comes_in_the_last_turn_of_a_closed_loop_begins_again():  # O72
    run = GraphRun(Plan(looping(max_in_flight=1, closed_loop=True)), streams=True)
    run.feed("x", 0, 2)
    [firing] = run.ready()
    run.complete(firing, {"again": 1, "out": 1})
    [firing] = run.ready()
    run.feed("x", 5, 1)
    assert run.complete(firing, {}) == []
    [firing] = run.ready()
    assert (firing.timestamp, firing.inputs) == (5, {"start": 1})


def test_a_closed_loop_that_has_ended_begins_again():  # O72
    run = GraphRun(Plan(looping(max_in_flight=1, closed_loop=True)), streams=True)
    emitted = []
    for start in (0, 100):
        run.feed("x", start, 3)
        while firings := run.ready():
            [firing] = firings
            left = next(iter(firing.inputs.values())) - 1
            emitted += run.complete(firing, {"again": left, "out": left} if left else {"out": left})
    assert [emission.timestamp for emission in emitted] == [0, 1, 2, 100, 101, 102]


def test_timestamps_may_be_as_far_apart_as_64_bits_allow():  # O71
    run = GraphRun(Plan(graph(node("n", "x"))), streams=True)
    for timestamp in (-(2**63) + 3, 2**63 - 4):
        run.feed("x", timestamp, 1)
        [firing] = run.ready()
        assert run.complete(firing, {"out": 1})[0].timestamp == timestamp


def test_what_a_node_writes_too_late_is_an_error():
    run = GraphRun(Plan(graph(node("n", "x", "y", policy="immediate"), inputs=("x", "y"))), streams=True)
    run.feed("y", 4, "y")
    [firing] = run.ready()
    run.complete(firing, {"out": 1})
    run.feed("x", 2, "x")
    [firing] = run.ready()
    with pytest.raises(InvalidRequest, match="node 'n' wrote to 'n' at timestamp 2, which is already at 4"):
        run.complete(firing, {"out": 1})


# --- against a plain evaluator ---------------------------------------------------------------------------------------


@st.composite
def zoos(draw: st.DrawFn) -> tuple[GraphSpec, list[frozenset[str]]]:
    """Random graphs: fan-out, joins, level-skipping edges, optional ports; and for each node what makes it skip."""
    count = draw(st.integers(1, 12))
    nodes: list[NodeSpec] = []
    skips = []
    for i in range(count):
        before = ["x", *(n.name for n in nodes)]
        inputs = draw(st.lists(st.sampled_from(before), min_size=1, max_size=4, unique=True))
        optional = frozenset(draw(st.lists(st.sampled_from(inputs), unique=True)))
        nodes.append(node(f"n{i}", *inputs, optional=optional))
        skips.append(draw(st.booleans()) and draw(st.booleans()))
    spec = GraphSpec(name="zoo", inputs=("x",), outputs={n.name: n.name for n in nodes}, nodes=tuple(nodes))
    return spec, skips  # type: ignore[return-value]


def evaluate(spec: GraphSpec, skips: list[Any], value: Any) -> dict[str, Any]:
    """What the graph means, in six lines."""
    values = {"x": value}
    for one, skip in zip(spec.nodes, skips, strict=True):
        given_ = {port: values[port] for port in one.inputs if port in values}
        if given_ and set(one.inputs) - one.optional <= set(given_) and not skip:
            values[one.name] = (one.name, *sorted(map(repr, given_.values())))
    return {name: found for name, found in values.items() if name != "x"}


def step(run: GraphRun, firing: Firing, skip: bool) -> dict[str, tuple[int, Any]]:
    name = firing.node.spec.name
    value = (name, *sorted(map(repr, firing.inputs.values())))
    return {e.output: (e.timestamp, e.value) for e in run.complete(firing, {} if skip else {"out": value})}


@settings(max_examples=150, deadline=None)
@given(zoos(), st.integers())
def test_any_graph_gives_what_it_means_whatever_completes_first(zoo: Any, seed: int):  # P68
    spec, skips = zoo
    skip_of = {n.name: skip for n, skip in zip(spec.nodes, skips, strict=True)}
    rng = random.Random(seed)
    run = GraphRun(Plan(spec))
    results = {e.output: e.value for e in run.feed("x", 0, "v")}
    open_ = run.ready()
    while open_:
        firing = open_.pop(rng.randrange(len(open_)))
        results |= {name: value for name, (_, value) in step(run, firing, skip_of[firing.node.spec.name]).items()}
        open_ += run.ready()
    assert run.is_finished
    assert results == evaluate(spec, skips, "v")


@settings(max_examples=80, deadline=None)
@given(zoos(), st.integers(), st.integers(1, 4))
def test_a_stream_gives_for_each_moment_what_a_request_would(zoo: Any, seed: int, moments: int):
    spec, skips = zoo
    skip_of = {n.name: skip for n, skip in zip(spec.nodes, skips, strict=True)}
    rng = random.Random(seed)
    run = GraphRun(Plan(spec), streams=True)
    found: list[dict[str, Any]] = [{} for _ in range(moments)]
    fed = 0
    open_: list[Firing] = []
    while open_ or fed < moments:
        if fed < moments and (not open_ or rng.random() < 0.4):
            run.feed("x", fed, f"v{fed}")
            fed += 1
            if fed == moments:
                run.close_input("x")
        else:
            firing = open_.pop(rng.randrange(len(open_)))
            skip = skip_of[firing.node.spec.name]
            value = (firing.node.spec.name, *sorted(map(repr, firing.inputs.values())))
            for emission in run.complete(firing, {} if skip else {"out": value}):
                assert emission.output not in found[emission.timestamp]
                found[emission.timestamp][emission.output] = emission.value
        open_ += run.ready()
    assert run.is_finished
    assert found == [evaluate(spec, skips, f"v{at}") for at in range(moments)]


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec, told",
    [
        (graph(node("a", "b"), node("b", "a")), "cycle: 'a' -> 'b' -> 'a'|cycle: 'b' -> 'a' -> 'b'"),
        (graph(node("a", "y")), "node 'a' reads 'y', which nothing writes; there is 'x', 'a'"),
        (graph(node("a", "x"), node("a", "x", out="b"), output="b"), "two nodes named 'a'"),
        (
            graph(node("a", "x"), node("b", "x", out="a"), output="a"),
            "one writer of 'a', got node 'a' and node 'b'",
        ),
        (graph(node("a", "x", optional=frozenset({"q"}))), "node 'a' has no input port 'q'; it has 'x'"),
        (graph(node("a", "x"), inputs=("x", "x")), "two inputs named 'x'"),
        (graph(node("a", "x"), output="aa"), "the output 'result' reads 'aa', which nothing writes; there is 'x', 'a'"),
        (
            graph(node("sum", "x"), output="smu"),
            "the output 'result' reads 'smu', which nothing writes; did you mean 'sum'",
        ),
        (GraphSpec(name="g", inputs=("x",), outputs={}, nodes=(node("a", "x"),)), "has no result"),
        (graph(NodeSpec(name="a", inputs={}, outputs={"out": "a"})), "'a' reads no stream"),
        (graph(node("a", "x", "y", sets=(frozenset({"x"}),)), inputs=("x", "y")), "sync sets of node 'a'"),
    ],
)  # P69
def test_a_graph_that_is_not_well_formed_is_refused_by_name(spec: GraphSpec, told: str):
    with pytest.raises(ConfigError, match=told):
        check(spec)


def test_what_nobody_reads_is_a_warning():  # P69
    assert check(graph(node("a", "x"), node("b", "x"), output="a")) == ["graph 'g': nothing reads what 'b' returns"]
    assert check(graph(node("a", "x"), inputs=("x", "y"), output="a")) == ["graph 'g': nothing reads the input 'y'"]
