"""`--dry-run`, in `dry_run`: memory and bounds of the speed on a device, and what to change so that a model fits."""
