"""BossMan's worker: it dials the boss, builds the layers it is asked for, and runs them."""
