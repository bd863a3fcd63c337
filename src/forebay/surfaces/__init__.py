# SPDX-License-Identifier: Apache-2.0
"""Front doors: each surface reads one kind of project and builds core objects from it."""
