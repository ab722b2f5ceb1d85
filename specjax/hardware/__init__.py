"""What a model needs on a device, and would at best reach there: `--dry-run`. In reading order:

outline    a model described by its configs and its tensors' headers
plan       memory, pool, buckets and bounds of the speed
remedies   what to change so that a model fits
dry_run    the report
"""
