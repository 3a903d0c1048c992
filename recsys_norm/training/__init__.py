"""The training program: `main` composes the configuration with Hydra, `trainer` runs it."""
