"""Training code of one family each, at the size of a test: `python -m jagg_fx.models.examples.wan`."""
