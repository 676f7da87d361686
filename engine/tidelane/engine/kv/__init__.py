"""Where keys and values live: names of blocks, who holds which, the tiers, and what moves between them."""
