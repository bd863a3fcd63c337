# SPDX-License-Identifier: Apache-2.0
"""Values that leave a function while it runs, as it is and compiled by jax."""

import subprocess
import sys
import textwrap

import numpy as np
import pytest
from tests.later import jax, jnp
from tests.waiting import PATIENCE_S

from forebay import Batch, ConfigError, hook, jit, print_value
from forebay.arrays.value_hooks import collecting

COMPILERS = ["python", "jax"]


class Received(list):
    """The hooks of one run, as names and plain lists."""

    def __call__(self, name, value):
        assert isinstance(value, np.ndarray)
        self.append((name, value.tolist()))


def add_five_round_about(x):
    double = hook("double", x * 2)
    plus_ten = hook("plus_ten", double + 10)
    return hook("unused", plus_ten / 2)


@pytest.mark.parametrize("compiler", COMPILERS)
def test_listed_hooks_are_received_in_order(compiler):  # S58
    run = jit(add_five_round_about, compiler=compiler)
    batch = Batch.stack([np.float32(1), np.float32(2)])
    for names, expected in [
        (["double", "plus_ten"], [("double", [2, 4]), ("plus_ten", [12, 14])]),
        (["plus_ten"], [("plus_ten", [12, 14])]),
        (["other"], []),
        ([], []),
    ]:
        received = Received()
        with collecting(names, received):
            assert run(batch).tolist() == [6, 7]
        assert received == expected
    assert run(batch).tolist() == [6, 7]


@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_hook_may_carry_a_tree(compiler):  # S58
    received = []
    with collecting(["tree"], lambda name, value: received.append(value)):
        jit(lambda x: hook("tree", {"a": x, "b": (x + 1,)})["a"], compiler=compiler)(Batch.stack([1, 2]))
    assert [(tree["a"].tolist(), tree["b"][0].tolist()) for tree in received] == [([1, 2], [2, 3])]


@pytest.mark.parametrize("compiler", COMPILERS)
def test_what_a_receiver_raises_ends_that_run_only(compiler):
    def refuse(name, value):
        raise KeyError(name)

    run = jit(add_five_round_about, compiler=compiler)
    batch = Batch.stack([np.float32(1)])
    with pytest.raises(KeyError, match="double"), collecting(["double"], refuse):
        run(batch)
    received = Received()
    with collecting(["double"], received):
        run(batch)
    assert received == [("double", [2])]


def test_values_received_from_jax_stay_what_they_are():
    received = []
    run = jit(lambda x: hook("x", x * 2).sum(axis=1), compiler="jax")
    with collecting(["x"], lambda name, value: received.append(value)):
        for number in range(20):
            run(Batch.stack([np.full(1000, number, np.float32)] * 4))
    assert [int(value[0, 0]) for value in received] == [number * 2 for number in range(20)]
    assert all((value == value[0, 0]).all() for value in received)


def test_loops_and_nested_functions_of_jax():  # S58
    @jax.jit
    def inner(x):
        return hook("inner", x * 2)

    def outer(x):
        def step(carry, _):
            return inner(carry), None

        return inner(jax.lax.scan(step, x, jnp.arange(2))[0])

    run = jit(outer, compiler="jax")
    for value in ([1.0], [1.0], [1.0, 1.0]):  # without, with, and with another program that uses the same function
        assert run(Batch.stack(value)).tolist() == [8] * len(value)
        received = Received()
        with collecting(["inner"], received):
            assert run(Batch.stack(value)).tolist() == [8] * len(value)
        assert received == [("inner", [factor] * len(value)) for factor in (2, 4, 8)]
    assert inner(1.0) == 2


def test_a_failed_run_does_not_disturb_the_next():
    def check(x):
        if x[0] < 0:
            raise ValueError("negative")
        return x

    def fn(x):
        x = hook("before", x)
        return hook("after", jax.pure_callback(check, jax.ShapeDtypeStruct(x.shape, x.dtype), x))

    run = jit(fn, compiler="jax")
    for number in (1.0, -1.0, 2.0):
        received = Received()
        with collecting(["before", "after"], received):
            if number < 0:
                with pytest.raises(Exception, match="negative"):
                    run(Batch.stack([np.float32(number)]))
            else:
                run(Batch.stack([np.float32(number)]))
                assert received == [("before", [number]), ("after", [number])]


def test_a_hook_that_would_be_lost_says_so():
    run = jit(jax.jit(lambda x: hook("x", x)))
    with (
        pytest.raises(ConfigError, match=r"hook 'x' was reached while jax traces .* forebay\.jit"),
        collecting(["x"], print),
    ):
        run(Batch.stack([1.0]))


def test_devices_run_at_once_and_hooks_reach_their_own_run():  # S53 S58
    script = """
        import threading
        import jax, numpy as np
        import forebay
        from forebay.arrays.compilers import find_compiler
        from forebay.arrays.value_hooks import collecting

        together = threading.Barrier(4)

        def fn(x):
            def step(carry, _):
                return forebay.hook("double", carry * 2), None

            return jax.lax.scan(step, x, jax.numpy.arange(3))[0]

        def partition(number, options):
            run = forebay.jit(fn, compiler="jax", **options)
            for value in range(10):
                received = []

                def sink(name, value):
                    if not received:
                        together.wait(30)
                    received.append(value.tolist())

                with collecting(["double"], sink):
                    output = run(forebay.Batch.stack([np.float32(number * 100 + value)] * (number + 1)))
                assert received == [[(number * 100 + value) * factor] * (number + 1) for factor in (2, 4, 8)], received
            devices.add(output.device)

        devices = set()
        partitions = find_compiler("jax").partitions({})
        threads = [threading.Thread(target=partition, args=item) for item in enumerate(partitions)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        print(len(partitions), len(devices))
    """
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(script)],
        env={"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu", "PYTHONPATH": "src"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.stdout.split(), done.stderr) == (["4", "4"], "")


def test_values_are_printed(capfd):
    assert print_value([1, 2], "pair") == [1, 2]
    assert print_value("text") == "text"
    run = jit(lambda x: print_value(x + 1, "next"), compiler="jax")
    for number in (1, 2):
        run(Batch.stack([number]))
    jax.effects_barrier()
    out = capfd.readouterr().out
    assert out.startswith("pair: [1, 2]\n'text'\n")
    assert [line.split("[")[1][0] for line in out.splitlines()[2:]] == ["2", "3"]
    assert all(line.startswith("next: ") for line in out.splitlines()[2:])
