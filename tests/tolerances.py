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

# A product of matrices in half precision against float32 on the same inputs, results of order 1 and at most 8: the sum
# is kept in float32, so what is rounded is the result, and where a gate is applied after a kernel the two smaller sums.
HALF_PRODUCT = {"bfloat16": 2e-2, "float16": 3e-3}

# Two logits that are closer than this may swap places between implementations: the bound of LOGITS.
TIE = LOGITS

# The same for bfloat16 at 7B sizes in another layout. An estimate: the largest of 152,000 logits are about 5, and 28
# layers of rounding to 8 bits may leave one or two hundredths of that.
BF16_TIE = 0.1

# One or two float32 operations on values of order 1.
ROUNDING = 1e-6

# Relative: logarithms and gradients of a few float32 operations against the same in another order.
FLOAT32_RELATIVE = 1e-5

# Levels of 255 that lossy codecs may be off: a JPEG of flat areas (CMYK through another colour space); a clip, in flat
# areas and at edges.
JPEG_LEVELS, JPEG_CMYK_LEVELS = 1, 3
CLIP_LEVELS, CLIP_EDGE_LEVELS = 4, 40

# A resampled tone against the exact one, amplitude 0.5, away from its ends.
RESAMPLED = 1e-3
