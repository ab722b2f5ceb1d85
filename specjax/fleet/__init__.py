"""Several processes that share one model. In reading order:

hosts       how the processes find each other, and end together: `Leader`, `Follower`
agreement   what their engines must have in common
following   what a follower does: the leader's programs, in its order
"""
