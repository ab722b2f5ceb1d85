"""What a command line needs. The only package that knows the flags' names."""
