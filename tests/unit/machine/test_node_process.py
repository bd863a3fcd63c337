# SPDX-License-Identifier: Apache-2.0
"""Children of a node process: started wave by wave, started again, replaced, and ended with it."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.waiting import PATIENCE_S, eventually

from forebay.errors import ConfigError
from forebay.machine.children import Child, ChildFailed
from forebay.machine.lifeline import VARIABLE
from forebay.machine.node_process import NodeProcess

LIVE = """
import os, pathlib, signal, sys, time
from forebay.machine.lifeline import take_lifeline

line, name = take_lifeline(), sys.argv[1]

def note(what):
    with open("notes", "a") as notes:
        notes.write(f"{what} {name}\\n")

def end(*_):
    note("ended")
    os._exit(0)

signal.signal(signal.SIGTERM, end)
note("started")
SCRIPT
line.ready(f"{name} is here")
while True:
    time.sleep(60)
"""


def child(folder, name, script="", **more):
    """A process that notes what happens to it, and does what the script says before it is ready."""
    script = LIVE.replace("SCRIPT", textwrap.dedent(script))
    return Child(name=name, argv=(sys.executable, "-c", script, name), cwd=str(folder), **more)


def notes(folder):
    with contextlib.suppress(FileNotFoundError):
        return (folder / "notes").read_text().splitlines()
    return []


def is_there(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.fixture
def node():
    """A node process whose children end with the test."""
    node = NodeProcess()
    yield node
    node.hurry()
    node.end()


def state(node, name):
    return next(one for one in node.states() if one.name == name)


def test_what_a_plan_names_runs_and_says_so(node, tmp_path):
    assert node.converge([child(tmp_path, "a"), child(tmp_path, "b")])
    assert [(one.name, one.is_ready, one.said) for one in node.states()] == [
        ("a", True, "a is here"),
        ("b", True, "b is here"),
    ]


def test_a_wave_begins_once_the_one_before_is_ready_and_ends_before_it(node, tmp_path):
    first = child(tmp_path, "first", "time.sleep(0.3); note('is almost ready')")
    node.converge([child(tmp_path, "second", wave=1), first])
    assert notes(tmp_path) == ["started first", "is almost ready first", "started second"]
    node.end()
    assert notes(tmp_path)[3:] == ["ended second", "ended first"]


def test_a_child_that_is_killed_is_started_again(node, tmp_path):
    node.converge([child(tmp_path, "it"), child(tmp_path, "other")])
    before, other = state(node, "it"), state(node, "other")
    os.kill(before.pid, signal.SIGKILL)
    after = eventually(lambda: (now := state(node, "it")).pid != before.pid and now.is_ready and now)
    assert after.starts == 2
    assert state(node, "other") == other


def test_a_child_that_ends_with_a_status_once_it_was_ready_is_started_again_for_ever(node, tmp_path):
    node.converge([child(tmp_path, "it", "if os.path.exists('broken'): sys.exit(3)")])
    (tmp_path / "broken").touch()
    os.kill(state(node, "it").pid, signal.SIGKILL)
    eventually(lambda: state(node, "it").starts >= 4)
    assert "ended with status 3 before it was ready" in eventually(lambda: state(node, "it").problem)
    (tmp_path / "broken").unlink()
    eventually(lambda: state(node, "it").is_ready)


def test_another_plan_keeps_what_it_names_and_ends_the_rest_once_all_is_ready(node, tmp_path):
    kept, gone = child(tmp_path, "kept"), child(tmp_path, "gone")
    node.converge([kept, gone])
    before = state(node, "kept")
    node.converge([kept, child(tmp_path, "new", "time.sleep(0.3); note('is almost ready')")])
    assert state(node, "kept") == before
    assert [one.name for one in node.states()] == ["kept", "new"]
    assert notes(tmp_path)[2:] == ["started new", "is almost ready new", "ended gone"]


def test_a_child_that_is_defined_otherwise_takes_the_place_of_the_one_before(node, tmp_path):
    node.converge([child(tmp_path, "it")])
    before = state(node, "it").pid
    node.converge([child(tmp_path, "it", "note('anew')")])
    assert state(node, "it").pid != before
    assert notes(tmp_path) == ["started it", "started it", "anew it", "ended it"]


def test_a_plan_whose_new_child_says_why_it_cannot_start_changes_nothing(node, tmp_path):
    node.converge([child(tmp_path, "kept")])
    before = node.states()
    with pytest.raises(ChildFailed, match="bad ended with status 3 before it was ready") as caught:
        node.converge([child(tmp_path, "good"), child(tmp_path, "bad", "sys.exit(3)", wave=1)])
    assert caught.value.status == 3
    assert node.states() == before
    assert notes(tmp_path) == ["started kept", "started good", "started bad", "ended good"]


def test_a_command_that_is_not_there_is_said(node, tmp_path):
    with pytest.raises(ChildFailed, match="it cannot be started: No such file or directory") as caught:
        node.converge([Child(name="it", argv=(str(tmp_path / "missing"),))])
    assert caught.value.status is None


def test_two_children_of_one_name_are_refused(node, tmp_path):
    with pytest.raises(ConfigError, match="two children of the plan are called 'a'"):
        node.converge([child(tmp_path, "a"), child(tmp_path, "b"), child(tmp_path, "a")])
    assert notes(tmp_path) == []


def test_who_does_not_end_in_time_is_killed(node, tmp_path):
    node.converge([child(tmp_path, "it", "signal.signal(signal.SIGTERM, signal.SIG_IGN)", end_s=0.2)])
    pid = state(node, "it").pid
    node.end()
    assert not is_there(pid)


def test_the_end_interrupts_what_is_being_started(node, tmp_path):
    thread = threading.Thread(target=node.converge, args=([child(tmp_path, "it", "time.sleep(600)")],))
    thread.start()
    eventually(lambda: notes(tmp_path))
    node.end()
    thread.join(PATIENCE_S)
    assert notes(tmp_path) == ["started it", "ended it"]
    assert node.states() == []


def test_a_signal_reaches_the_child_that_it_is_for(node, tmp_path):
    script = "signal.signal(signal.SIGHUP, lambda *_: note('heard'))"
    node.converge([child(tmp_path, "a", script), child(tmp_path, "b", script)])
    node.signal("b", signal.SIGHUP)
    eventually(lambda: "heard b" in notes(tmp_path))
    assert "heard a" not in notes(tmp_path)


def test_what_a_child_starts_does_not_know_of_the_node_process(node, tmp_path):
    node.converge([child(tmp_path, "it", f"note(str({VARIABLE!r} in os.environ))")])
    assert notes(tmp_path)[1:] == ["False it"]


# ---------------------------------------------------------------------------------------------------------------------
# The life of a node process, from outside

NODE = """
import sys
from forebay.machine.children import Child
from forebay.machine.node_process import NodeProcess

plan = [
    Child(name=name, argv=(sys.executable, "-c", script, name), wave=wave)
    for wave, (name, script) in enumerate(PLAN)
]
node = NodeProcess()
sys.exit(node.run(plan, ready=lambda states: print(*(one.pid for one in states), flush=True), reload=RELOAD))
"""


def foreground(folder, *children, reload="None") -> Any:
    plan = [(one.name, one.argv[2]) for one in children]
    script = NODE.replace("PLAN", repr(plan)).replace("RELOAD", reload)
    return subprocess.Popen([sys.executable, "-c", script], cwd=folder, stdout=subprocess.PIPE, text=True)


def test_the_death_of_a_node_process_leaves_nothing_behind(tmp_path):
    with foreground(tmp_path, child(tmp_path, "a"), child(tmp_path, "b")) as process:
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert all(map(is_there, pids))
        process.kill()
        eventually(lambda: not any(map(is_there, pids)))


def test_a_signal_ends_all_the_highest_wave_first(tmp_path):
    with foreground(tmp_path, child(tmp_path, "a"), child(tmp_path, "b")) as process:
        process.stdout.readline()
        process.terminate()
        assert process.wait(PATIENCE_S) == 0
    assert notes(tmp_path)[2:] == ["ended b", "ended a"]


def test_a_second_signal_reaches_all_at_once(tmp_path):
    twice = "signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, end) and note('told'))"
    with foreground(tmp_path, child(tmp_path, "a"), child(tmp_path, "b", twice)) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        eventually(lambda: "told b" in notes(tmp_path))
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) == 0
    assert sorted(notes(tmp_path)[-2:]) == ["ended a", "ended b"]


def test_a_child_that_says_why_it_cannot_start_ends_the_node_process_with_its_status(tmp_path):
    bad = child(tmp_path, "bad", "sys.exit(7)")
    with foreground(tmp_path, child(tmp_path, "good"), bad) as process:
        assert process.wait(PATIENCE_S) == 7
    assert notes(tmp_path) == ["started good", "started bad", "ended good"]


def test_a_hangup_reloads_where_there_is_something_to_reload(tmp_path):
    passes_on = f"lambda: node.signal('it', {signal.SIGHUP:d})"
    script = "signal.signal(signal.SIGHUP, lambda *_: note('heard'))"
    with foreground(tmp_path, child(tmp_path, "it", script), reload=passes_on) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGHUP)
        eventually(lambda: "heard it" in notes(tmp_path))
        process.terminate()
        assert process.wait(PATIENCE_S) == 0


def test_a_plan_that_waits_for_nothing_starts_and_ends_children_meanwhile(node, tmp_path):
    node.adjust([child(tmp_path, "a"), child(tmp_path, "slow", "while not os.path.exists('go'): time.sleep(0.01)")])
    eventually(lambda: state(node, "a").is_ready)
    node.adjust([child(tmp_path, "slow"), child(tmp_path, "b")])
    eventually(lambda: [one.name for one in node.states()] == ["slow", "b"] and state(node, "b").is_ready)
    assert not state(node, "slow").is_ready
    assert "ended a" in notes(tmp_path)
    (tmp_path / "go").touch()
    eventually(lambda: state(node, "slow").is_ready)


def test_a_child_that_comes_back_while_it_ends_is_started_again(node, tmp_path):
    held = """
    def hold(*_):
        while not os.path.exists("go"):
            time.sleep(0.01)
        end()

    signal.signal(signal.SIGTERM, hold)
    """
    node.adjust([child(tmp_path, "a", held)])
    eventually(lambda: state(node, "a").is_ready)
    node.adjust([])
    node.adjust([child(tmp_path, "a")])
    assert notes(tmp_path) == ["started a"]
    (tmp_path / "go").touch()
    eventually(lambda: notes(tmp_path) == ["started a", "ended a", "started a"])
    eventually(lambda: state(node, "a").is_ready)
