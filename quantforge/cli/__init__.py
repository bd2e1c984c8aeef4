"""The command line, one file a command; each defines ``register(app)``."""
