# SPDX-License-Identifier: Apache-2.0
"""mmjax: multimodal inference in JAX."""
