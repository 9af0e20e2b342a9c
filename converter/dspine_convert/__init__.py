"""Converts a DSpine checkpoint in Hugging Face layout to GGUF for llama.cpp."""

__version__ = "0.1.0"
