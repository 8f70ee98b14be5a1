"""Options, their types and conversion, registries, and errors. Imports nothing else of burnish."""
