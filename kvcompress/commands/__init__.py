"""The options of `kvcompress analyze`, `eval` and `retrofit`: nothing here imports PyTorch before a command runs."""
