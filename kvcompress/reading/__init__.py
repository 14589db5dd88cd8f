"""Prompts read through a cache, and what was read asked."""
