"""The runtime of a plan: stages on peers, samples that move between them, one optimizer step."""
