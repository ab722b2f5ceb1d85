"""Several engines or processes behind one server, and Ray. In reading order:

replicas     data parallelism: several engines in one process
hosts        how processes that share one model find each other, and end together: `Leader`, `Follower`
agreement    from the flags of `specjax serve` to a group; what its processes must have in common
following    `SharedEngine`, whose device sends each launch to the followers; the command of a follower
routers      `/v1/loads` and `/get_load`, which routers read
ray          Ray Serve: `SpecjaxServer`, `build_app`; `ray_ingress` carries requests to the replicas
"""
