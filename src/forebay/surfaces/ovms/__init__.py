# SPDX-License-Identifier: Apache-2.0
"""Graphs of OpenVINO Model Server: a `graph.pbtxt` and `OvmsPythonModel` classes, served unchanged."""
