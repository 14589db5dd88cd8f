"""Continued pre-training of converted models: what every trained method shares."""
