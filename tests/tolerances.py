# SPDX-License-Identifier: Apache-2.0
"""Every tolerance of the tests, with its reason. Bounds are absolute unless the name says otherwise."""

from __future__ import annotations

# Whole models in float32 against transformers on the same weights, hidden states and logits of order 1: sums of up to
# a few hundred products, in another order, through a handful of layers.
LOGITS = 1e-4

# Rows of a vision tower against transformers, float32, values of order 1.
TOWER_ROWS = 1e-4

# The same float32 arithmetic in another layout (another bucket, chunk, batch or kernel).
OTHER_LAYOUT = 1e-5

# bfloat16 against float32, relative to the error that transformers itself makes in bfloat16 on the same weights: both
# round at the same places, so neither may be clearly worse.
BF16_ERROR_RATIO = 1.5

# One attention in half precision against float32 on the same inputs of order 1: inputs are equal, so what is rounded
# is the weights, at most 1, and the output, of order 1.
HALF_ATTENTION = {"bfloat16": 2e-2, "float16": 3e-3, "float32": 1e-5}
