# SPDX-License-Identifier: Apache-2.0
"""What a pipeline tells about itself: profile lines, the tracer, metrics, and what they add up to."""
