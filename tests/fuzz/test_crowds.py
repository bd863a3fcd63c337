# SPDX-License-Identifier: Apache-2.0
"""Bodies of very many small elements take no more memory than their bytes, at any door.  F73 F74 F75

Sixty attacks of the thousands that `make fuzz` sends. The time that they take is measured there, not here.
"""

import contextlib
import random
from collections import defaultdict

import pytest
from tests.attacks.crowds import CROWD, PROTO_CROWDS, Spot, packed, proto_attack
from tests.attacks.doors import Attacker, doors, serving
from tests.fuzz.door_crowds import allowed_bytes
from tests.processes import peak_bytes, start_peak

from forebay.protocols.tfserving import messages as tfserving

ATTACKS = 60
SEED = 20261128


def chosen():
    """Attacks by the server that gets them, from each door about as many."""
    dice, found = random.Random(SEED), defaultdict(list)
    listed = doors()
    for number in range(ATTACKS):
        door = listed[number % len(listed)]
        is_packed = door.way != "worker" and dice.random() < 0.5
        found[door.server].append((door, dice.choice(door.attacks), is_packed))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["models", "pipeline", "nucleus", "graph"])
def test_a_crowd_takes_no_more_memory_than_it_may(name, tmp_path):  # F73 F74 F75
    with serving(name, tmp_path) as server, contextlib.closing(Attacker(server, tmp_path)) as attacker:
        for door, make, is_packed in chosen()[name]:
            attack = packed(make()) if is_packed else make()
            before = start_peak(server.process.pid)
            status = attacker.send(door, attack)
            taken = peak_bytes(server.process.pid) - before
            assert taken <= allowed_bytes(attack, status), f"{door.name}, {attack.spot}: {status}, {taken >> 20} MiB"
    assert not server.defects()


def test_crowds_of_protobuf_are_what_the_library_reads():
    kinds = tfserving.SERVING.classes()
    spots = {
        "number": (Spot((1, 2), "model_spec.version.value", 1, "number"), kinds.PredictRequest),
        "message": (Spot((2, 1), "input.example_list.examples", 1, "message"), kinds.ClassificationRequest),
        "text": (Spot((), "output_filter", 3, "text"), kinds.PredictRequest),
        "map": (Spot((), "inputs", 2, "map"), kinds.PredictRequest),
    }
    for kind, (spot, message) in spots.items():
        for crowd in PROTO_CROWDS[kind]:
            if crowd == "packed":
                continue  # the version is no list
            message.FromString(proto_attack(b"", spot, crowd).body)
    found = kinds.PredictRequest.FromString(proto_attack(b"", spots["text"][0], "empty").body)
    assert len(found.output_filter) == CROWD
    found = kinds.PredictRequest.FromString(proto_attack(b"", spots["map"][0], "entries").body)
    assert len(found.inputs) == CROWD
