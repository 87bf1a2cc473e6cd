"""GGUF files to folders in Hugging Face layout."""

from kvanta.gguf_convert.convert import convert_gguf

__all__ = ["convert_gguf"]
