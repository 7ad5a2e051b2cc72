# SPDX-License-Identifier: Apache-2.0
"""The text decoder that families share: LLaMA's layout with the options that separate its descendants."""
