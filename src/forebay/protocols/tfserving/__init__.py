# SPDX-License-Identifier: Apache-2.0
"""TensorFlow Serving's own protocol: its messages, its JSON, and examples as tensors."""
