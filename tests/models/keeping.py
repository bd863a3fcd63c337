# SPDX-License-Identifier: Apache-2.0
"""Models that keep every sample and answer with the last byte of each."""

import msgspec

from forebay import Model


class _Keeps(Model):
    def load(self):
        self.kept = []

    def answers(self, batch):
        self.kept += batch
        return [[bytes(sample)[-1] for sample in self.kept]] * len(batch)


class KeepsRaw(_Keeps):
    def predict(self, batch: list[msgspec.Raw]) -> list[list[int]]:
        return self.answers(batch)


class KeepsView(_Keeps):
    def predict(self, batch: list[memoryview]) -> list[list[int]]:
        return self.answers(batch)


class KeepsBytes(_Keeps):
    def predict(self, batch: list[bytes]) -> list[list[int]]:
        return self.answers(batch)


class KeepsRows(_Keeps):
    batchable = True

    def predict(self, batch: list[msgspec.Raw]) -> list[list[int]]:
        return self.answers(batch)
