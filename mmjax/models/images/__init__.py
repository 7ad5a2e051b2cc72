# SPDX-License-Identifier: Apache-2.0
"""Host side that families with pictures share: settings files, exact resizing, byte tables, packing into buckets."""
