"""GGUF files as folders in Hugging Face layout, in place or converted."""

from kvanta.gguf.convert import convert_gguf, index_gguf

__all__ = ["convert_gguf", "index_gguf"]
