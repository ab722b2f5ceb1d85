"""Parameters, pages and state over several devices. In reading order:

sharding   the mesh, and how leaves lie on it
shares     how much of a leaf or a page each device holds
"""
