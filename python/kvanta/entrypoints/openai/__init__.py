"""Modules under the names of vLLM."""
