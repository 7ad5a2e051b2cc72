# SPDX-License-Identifier: Apache-2.0
"""How the demo checkpoint was made: assets, batches, training and evaluation."""
