"""The parts of gpu_static.py."""
