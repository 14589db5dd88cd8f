"""Presses of kvpress on the same prompts, in a Python of their own."""
