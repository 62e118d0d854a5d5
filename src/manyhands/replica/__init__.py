"""Replica: one model on several peers, averaged in rounds; peers may come and go."""
