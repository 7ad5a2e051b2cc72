# SPDX-License-Identifier: Apache-2.0
"""What Mistral3 and Pixtral-12B share: the Pixtral tower, its processor, and the Mistral decoder's options."""
