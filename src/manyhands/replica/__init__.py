"""Replicas: elastic averaging of whole copies of a model, whoever comes and goes."""
