"""Compares ways of drafting on sets of prompts: `python -m specjax.bench`."""
