"""Model families, one file each: what differs from the one decoder, as data."""
