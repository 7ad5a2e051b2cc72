# SPDX-License-Identifier: Apache-2.0
"""Encoding, prefill and decoding as separate workers, and the transports between them; none is there yet."""
