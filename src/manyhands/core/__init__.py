"""Plain values: errors, addresses, peers and views. No torch, no I/O."""
