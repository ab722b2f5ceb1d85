"""Models split over devices. In reading order:

sharding   the mesh, and the placement of parameters, pages and state
shares     bytes of a leaf or a page on each device, without arrays
"""
