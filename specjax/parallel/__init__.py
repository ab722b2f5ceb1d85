"""Parameters, pages and state over several devices. In reading order:

sharding   the mesh, and how leaves lie on it
placing    the parameters of models, as their tables declare them
shares     how much of a leaf or a page each device holds
"""
