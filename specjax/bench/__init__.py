"""Compares ways of drafting on sets of prompts: `specjax bench`."""
