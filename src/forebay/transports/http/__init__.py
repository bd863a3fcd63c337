# SPDX-License-Identifier: Apache-2.0
"""HTTP: the fast lane for inference, Starlette for everything else."""
