# SPDX-License-Identifier: Apache-2.0
"""Proof that a checkpoint computes here what it computes elsewhere: `verify`, and `render` for its report."""

from conversion.verify.run import verify
from conversion.verify.stages import Report, StageResult, render

__all__ = ["Report", "StageResult", "render", "verify"]
