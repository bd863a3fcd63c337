# SPDX-License-Identifier: Apache-2.0
"""`Analyst` and `forebay analyse`: files of ours and of the original, as a trace and as numbers."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.errors import ConfigError
from forebay.observe.metrics import capacity
from forebay.surfaces.pipeline.figures.analyst import Analyst

START = 1_700_000_000_000_000


def line(pid, *events):
    """A profile line; each event is its name, begin and end in milliseconds."""
    marks = [f"{name}_{end}:{START + round(ms * 1000)}" for name, *times in events for end, ms in enumerate(times)]
    return f"PROFILE\tpid:{pid}\t{' '.join(marks)} \n"


def run(op, worker, at, prep=2, midp=5, postp=1):
    where = f"[{op}|{worker}]"
    begun = (at, at + prep, at + prep + midp, at + prep + midp + postp)
    return tuple((f"{step}#{where}", *begun[i : i + 2]) for i, step in enumerate(("prep", "midp", "postp")))


def call(data_id, at, took=20, dag="DAG"):
    return (
        (f"prepack_{data_id}#@DAGExecutor", at, at + 1),
        (f"postpack_{data_id}#@DAGExecutor", at + took - 2, at + took),
        (f"call_{data_id}#{dag}", at, at + took),
    )


@pytest.fixture
def profile(tmp_path):
    """Two ops, two calls, between the lines of a log; blank lines as the original writes them."""
    path = tmp_path / "profile.txt"
    path.write_text(
        "I1121 some log line\n\n"
        + line(10, *run("bow", 0, 1))
        + "\nWARNING PROFILE is not a line\n"
        + line(11, *run("combine", 0, 9, prep=1, midp=10, postp=1))
        + line(12, *run("combine", 1, 9, prep=1, midp=30, postp=1))
        + "\n"
        + line(10, *call(0, 0))
        + line(10, *call(1, 5, took=30))
    )
    return path


def check(trace):
    """Asserts that the events are what viewers take: a stack for each thread, on which the last begun ends first."""
    opened = {}
    for event in trace:
        assert set(event) == {"name", "ph", "ts", "pid", "tid"}
        assert isinstance(event["ts"], int | float)
        assert isinstance(event["pid"], int)
        stack = opened.setdefault((event["pid"], event["tid"]), [])
        if event["ph"] == "B":
            stack.append(event["name"])
        else:
            assert event["ph"] == "E"
            assert stack, "nothing ends before it began"
            assert stack.pop() == event["name"], "of two that overlap, the first ends first"
    assert not any(opened.values()), "each begin has its end"
    assert [event["ts"] for event in trace] == sorted(event["ts"] for event in trace)


def test_a_profile_becomes_a_trace(profile, tmp_path):  # P135, trap 22
    trace = Analyst(profile).get_trace()
    check(trace)
    assert {event["tid"] for event in trace} == {
        "[bow|0]",
        "[combine|0]",
        "[combine|1]",
        "DAG",
        "DAG-2",
        "@DAGExecutor",
    }
    assert {event["name"] for event in trace if event["tid"] == "@DAGExecutor"} == {
        f"{kind}_{data_id}" for kind in ("prepack", "postpack") for data_id in (0, 1)
    }
    bow = [(event["name"], event["ph"], event["ts"] - START) for event in trace if event["tid"] == "[bow|0]"]
    assert bow[:3] == [("prep", "B", 1000), ("prep", "E", 3000), ("midp", "B", 3000)]
    Analyst(profile).save_trace(tmp_path / "trace")
    assert json.loads((tmp_path / "trace").read_text()) == trace


def test_calls_that_overlap_are_on_threads_of_their_own(tmp_path):  # P135
    path = tmp_path / "profile.txt"
    begins = {0: 0, 1: 5, 2: 6, 3: 25, 4: 30}
    for dag in ("DAG", "DAG-{}"):
        path.write_text("".join(line(1, *call(n, at, dag=dag.format(n))) for n, at in begins.items()))
        trace = Analyst(path).get_trace()
        check(trace)
        calls = {event["name"]: event["tid"] for event in trace if event["name"].startswith("call")}
        assert calls == {"call_0": "DAG", "call_1": "DAG-2", "call_2": "DAG-3", "call_3": "DAG", "call_4": "DAG-2"}


def test_files_of_every_generation_are_read(tmp_path):
    path = tmp_path / "profile.txt"
    path.write_text(line(1, *run("bow", 0, 0)) + line(1, *call(0, 0, dag="DAG-0")) + line(1, *call(1, 5, dag="@G")))
    check(Analyst(path).get_trace())
    assert Analyst(path).get_profile()[0] == 20


def test_names_with_any_letter_but_a_blank_are_read(tmp_path):
    path = tmp_path / "profile.txt"
    path.write_text(line(1, *run("det_v2|a#b_0:1", 0, 0)))
    assert Analyst(path).get_profile()[3].ops == ["det_v2|a#b_0:1"]


@given(
    st.lists(
        st.sampled_from(["PROFILE\t", "pid:7\t", "prep#[a|0]_0:5 ", "prep#[a|0]_1:3 ", "x#y_", "\n", "#", "9" * 30])
    )
)
def test_whatever_stands_in_a_file_the_trace_is_balanced(tmp_path_factory, parts):
    path = tmp_path_factory.mktemp("any") / "profile.txt"
    path.write_text("".join(parts))
    check(Analyst(path).get_trace())


def test_lines_that_are_cut_off_lose_only_what_has_no_end(tmp_path):
    path = tmp_path / "profile.txt"
    whole = line(1, *run("bow", 0, 0))
    path.write_text(whole + whole[: whole.index("postp") + 20])
    trace = Analyst(path).get_trace()
    check(trace)
    assert sum(event["name"] == "postp" for event in trace) == 2
    assert sum(event["name"] == "midp" for event in trace) == 4


def test_the_numbers_of_a_profile(profile):  # P139, P140
    ave_call, ave_prepack, ave_postpack, ops = Analyst(profile).get_profile()
    assert (ave_call, ave_prepack, ave_postpack) == (25, 1, 2)
    assert ops.times("bow") == {"prep": 2, "midp": 5, "postp": 1}
    assert ops.times("combine") == {"prep": 1, "midp": 20, "postp": 1}
    assert ops.times() == {"bow": ops.times("bow"), "combine": ops.times("combine")}
    assert ops.qps("bow") == {"prep": 500, "midp": 200, "postp": 1000}
    assert ops.qps() == {"bow": ops.qps("bow"), "combine": ops.qps("combine")}
    assert ops.cost("combine").total_s == pytest.approx(0.022)
    assert ops.workers("combine") == 2
    with pytest.raises(ConfigError, match="no op 'bwo'; did you mean 'bow'"):
        ops.times("bwo")


def test_the_formulas_on_a_profile(profile):  # P141, P142, P143
    ops = Analyst(profile).get_profile()[3]
    costs = {op: ops.cost(op) for op in ops.ops}
    assert capacity.workers_needed(costs["bow"].total_s, 50) == 1  # 0.4
    assert capacity.workers_needed(costs["combine"].total_s, 50) == 2  # 1.1
    able = capacity.throughput({op: (cost.total_s, ops.workers(op)) for op, cost in costs.items()})
    assert able == ("combine", pytest.approx(2 / 0.022))


def test_the_analysis_of_cards(profile, tmp_path):  # P139, trap 22
    ops = Analyst(profile).get_profile()[3]
    config = tmp_path / "cards.yml"
    config.write_text('bow:\n  midp: 0\ncombine:\n  prep: 1\n  midp: "1,2"\n')
    # the slowest stage on its cards: 20 ms on two of them, 10 ms
    assert ops.concurrency_analysis(config) == {"bow": 0.8, "combine": 2.2}
    config.write_text('bow:\n  midp: 0\ncombine:\n  midp: "0,1"\n')
    with pytest.raises(ConfigError, match="card 0 is given to 'bow' and to 'combine'"):
        ops.concurrency_analysis(str(config))


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("bow:\n  midp: [1]\n", "expected a map of ops"),
        ("bow:\n  process: 1\n", "a map of prep, midp, postp to cards"),
        ('bow:\n  midp: "1,"\n', "op 'bow' has midp"),
        ("bow: 1\n", "expected a map of ops"),
        ("{", "expected a map of ops"),
        ("{}", "names no stage that takes time"),
        ("cnn:\n  midp: 0\n", "no op 'cnn'"),
        ("!!python/object/apply:os.getcwd []\n", "expected a map of ops"),
    ],
)
def test_a_wrong_file_of_cards_is_told(profile, tmp_path, text, sentence):
    config = tmp_path / "cards.yml"
    config.write_text(text)
    with pytest.raises(ConfigError, match=sentence):
        Analyst(profile).get_profile()[3].concurrency_analysis(config)


def test_a_file_that_is_not_there_is_told(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        Analyst(tmp_path / "no")
    (tmp_path / "profile.txt").write_text(line(1, *run("bow", 0, 0)))
    with pytest.raises(ConfigError, match="cannot be read"):
        Analyst(tmp_path / "profile.txt").get_profile()[3].concurrency_analysis(tmp_path / "no")


def test_the_command_says_what_an_expected_load_needs(profile, cli, tmp_path):  # P141
    trace = tmp_path / "trace.json"
    told = cli("analyse", profile, "--qps", "50", "--trace", trace)
    assert told.returncode == 0, told.stderr
    rows = [row.split() for row in told.stdout.splitlines()]
    assert rows[0] == ["mean", "in", "ms", "prep", "midp", "postp", "cost", "calls/run", "workers"]
    assert rows[1] == ["bow", "2.000", "5.000", "1.000", "8.000", "2.00", "1"]
    assert rows[2] == ["combine", "1.000", "20.000", "1.000", "22.000", "1.00", "2"]
    assert "bottleneck: combine, which lets up to 90.91 requests/s through" in told.stdout
    assert "takes 30 ms on the path bow, combine; give --path if some of them run in parallel" in told.stdout
    assert "workers needed for 50 requests/s: bow 1, combine 2" in told.stdout
    assert "more wait" not in told.stdout
    check(json.loads(trace.read_text()))
    told = cli("analyse", profile, "--qps", "100", "--path", "combine")
    assert "takes 22 ms on the path combine\n" in told.stdout
    assert "9.091 requests more wait after each second" in told.stdout  # P143


def test_calls_that_share_a_run_share_its_cost(cli, tmp_path):  # P141, P142
    path = tmp_path / "profile.txt"
    calls = [line(1, *call(data_id, 0)) for data_id in range(4)]
    path.write_text(line(1, *run("bow", 0, 0)) + "".join(calls))  # a batch of four in 8 ms
    told = cli("analyse", path, "--qps", "400").stdout
    assert "bow, which lets up to 500 requests/s through" in told
    assert "workers needed for 400 requests/s: bow 1" in told
    assert "without waiting, a request takes 8 ms" in told


def test_the_command_says_what_is_wrong_in_one_sentence(profile, cli, tmp_path):
    (tmp_path / "empty.txt").write_text("nothing\n")
    for arguments, sentence in [
        ([tmp_path / "no.txt"], "cannot be read"),
        ([tmp_path / "empty.txt"], "has no PROFILE line of an op; serve with use_profile: true"),
        ([profile, "--path", "bow,combin"], "no op 'combin'; did you mean 'combine'?"),
        ([profile, "--qps", "-1"], "expected a number > 0, got '-1'"),
        ([profile, "--trace", tmp_path / "no" / "trace"], "cannot be written"),
    ]:
        told = cli("analyse", *arguments)
        assert told.returncode == 2
        assert sentence in told.stderr
        assert told.stderr.count("\n") == 1


def test_the_script_of_the_original_that_analyses_a_profile(profile, tmp_path, capsys):
    # F42: analyse.py saves a trace, takes the ops and prints what their workers should be
    (tmp_path / "analyse.yaml").write_text("bow:\n    midp: 0\ncombine:\n    midp: 1\n")
    analyst = Analyst(str(profile))
    analyst.save_trace(str(tmp_path / "trace.json"))
    ops = analyst.get_op_analyst()
    assert ops.concurrency_analysis(str(tmp_path / "analyse.yaml")) == {"bow": 0.4, "combine": 1.1}
    analyst.print_profile()
    call, prepack, postpack, *rest = capsys.readouterr().out.splitlines()
    assert (call, prepack, postpack) == ("graph engine call: 25.0", "rpc prepack: 1.0", "rpc postpack: 2.0")
    assert json.loads("\n".join(rest).removeprefix("OP: ")) == ops.times()
