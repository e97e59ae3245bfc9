"""Measuring losses: for now the peak memory of a function call.

>>> from cce.bench import peak_memory
>>> peak_memory(lambda: torch.ones(1000))     # bytes beyond what was alive before
4000
"""

from cce.bench.memory import peak_memory

__all__ = ["peak_memory"]
