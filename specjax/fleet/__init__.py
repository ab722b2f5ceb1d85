"""Several engines or processes behind one server, and Ray. In reading order:

replicas     data parallelism: several engines in one process
hosts        processes that share a model: how they connect, compare their engines, and end
launch       a group of processes from the flags of `specjax serve`, and the loop of a follower
routers      `/v1/loads` and `/get_load`, which routers read
ray          Ray Serve: `SpecjaxServer`, `build_app`; `ray_ingress` carries requests to the replicas
ray_data     Ray Data: `Generate` completes the rows of a dataset
"""
