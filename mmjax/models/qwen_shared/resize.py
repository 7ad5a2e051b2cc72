# SPDX-License-Identifier: Apache-2.0
"""Moved to `mmjax.models.images.resize`."""

from mmjax.models.images.resize import Filter, resize  # noqa: F401
