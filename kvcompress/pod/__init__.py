"""PoD: layers that attend alike share the keys of distant tokens."""
