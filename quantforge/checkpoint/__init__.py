"""Model folders on disk: lazy reading, atomic writing, formats, provenance and verification."""
