"""Evaluation of caches on tasks that users know: `kvcompress eval`."""
