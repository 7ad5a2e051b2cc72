# SPDX-License-Identifier: Apache-2.0
"""Other engines, which `mmjax bench --peer` measures beside ours: the only code that runs on torch or vLLM for that."""
