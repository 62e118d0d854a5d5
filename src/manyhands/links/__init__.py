"""Links: how a peer talks to the others of its run."""
