# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: Hugging Face directories in, orbax directories in and out, and proof that both compute the same."""
