"""The HTTP server: `specjax serve`. The only part of specjax that imports a web framework."""
