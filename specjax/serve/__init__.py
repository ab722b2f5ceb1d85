"""The HTTP server: `python -m specjax.serve`. The only part of specjax that imports a web framework."""
