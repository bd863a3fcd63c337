# SPDX-License-Identifier: Apache-2.0
"""`forebay.Serving`: functions of batches of arrays, run inline or started in partitions that batch their callers."""
