"""KV events: changes of the prefix cache, published in vLLM's format. Needs `pip install kvanta[events]`."""

from __future__ import annotations
