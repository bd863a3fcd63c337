# SPDX-License-Identifier: Apache-2.0
"""Arrays of numpy, torch and jax in trees, the batches they travel in, and how functions of them are compiled."""
