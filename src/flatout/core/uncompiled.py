"""Decorator of functions that ``torch.compile`` does not trace."""

from __future__ import annotations

import torch

uncompiled = torch._disable_dynamo
"""The decorator ``torch.compiler.disable``, except that ``torch._dynamo`` is imported at the first call.

The import takes longer than that of all of flatout. The methods of torch's optimizers have this decorator, too.
"""
