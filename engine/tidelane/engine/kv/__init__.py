"""Where keys and values live: the layout of a block, the device pool, and who holds which block."""
