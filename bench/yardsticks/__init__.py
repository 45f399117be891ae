"""Programs that benches measure against, built and run in the same process."""
