"""Loads torch once with its import-time warnings off: they are errors in tests."""

import warnings

with warnings.catch_warnings():
    # Without numpy, which nothing here needs, importing torch warns.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
    import torch  # noqa: F401  imported for its effect
