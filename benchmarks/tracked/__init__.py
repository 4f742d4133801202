"""asv's view of the catalogue: `asv run` collects this folder alone (asv.conf.json)."""
