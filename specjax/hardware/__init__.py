"""`--dry-run` (`dry_run`): memory, buckets and bounds of the speed of a model on a device, without loading it."""
