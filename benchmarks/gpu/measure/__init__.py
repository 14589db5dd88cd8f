"""What gpu_check.py measures, a file for each part."""
