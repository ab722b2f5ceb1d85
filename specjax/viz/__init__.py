"""SVG pictures of draft trees: `drawing` makes them, `__main__` is the command `specjax viz`."""
