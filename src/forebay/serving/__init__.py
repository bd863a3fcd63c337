# SPDX-License-Identifier: Apache-2.0
"""What answers: endpoints, the models behind them, and servings for callers in the same program."""
