"""`kvcompress analyze`: what a model says of how it can be compressed, before anything is trained."""
