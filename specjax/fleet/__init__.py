"""Several engines or processes behind one server, and Ray. In reading order:

replicas    data parallelism: several engines in one process
hosts       how processes that share one model find each other, and end together: `Leader`, `Follower`
agreement   the properties that their engines must have in common
following   `SharedEngine`, whose device sends each launch to the followers; the loop of a follower
launch      from the flags of `specjax serve` to a group of processes
routers     the routes that routers read: `/v1/loads`, `/get_load`
ray         Ray Serve: `SpecjaxServer`, `build_app`; `in_process` and `ingress` carry its requests
ray_data    Ray Data: `Generate` completes the rows of a dataset
"""
