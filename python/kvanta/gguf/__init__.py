"""GGUF files as folders in Hugging Face layout, in place or converted."""
