# SPDX-License-Identifier: Apache-2.0
"""`mmjax bench`: what each part costs on this machine, beside the least that it could cost."""
