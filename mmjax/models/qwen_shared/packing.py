# SPDX-License-Identifier: Apache-2.0
"""Moved to `mmjax.models.images.packing`."""

from mmjax.models.images.packing import grid_positions, pack_items, window_table  # noqa: F401
